"""tandem.v1.TargetService over gRPC: each call in a few lines, and each stream's one ending.

Knows grpc and the core's few verbs; nothing of steps, tensors or drafts. Errors leave as exceptions
that common.rpc turns into status codes.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from common import limits
from common.errors import InvalidRequest, Overloaded, Unavailable
from common.log import get_log
from common.pb.tandem.v1 import target_pb2, target_pb2_grpc
from common.version import tandem_version
from services.target.core.report import CoreStats
from services.target.core.request import (
    Event,
    FinishReason,
    Request,
    RequestFailed,
    RequestFinished,
    TokensCommitted,
)
from services.target.front.channel import EventChannel
from services.target.front.facts import DrafterFacts, DrafterState, ServedModel
from services.target.front.validation import parse_generate

log = get_log("front")

SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"]

# A full inbox is emptied once a step; a request to end early is repeated until it is in.
_ABORT_AGAIN_S = 0.05

_REASONS = {
    FinishReason.STOP: target_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: target_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: target_pb2.FINISH_REASON_ABORT,
}
_DRAFTER_STATES = {
    DrafterState.DISABLED: target_pb2.DRAFTER_STATE_DISABLED,
    DrafterState.UP: target_pb2.DRAFTER_STATE_UP,
    DrafterState.DOWN: target_pb2.DRAFTER_STATE_DOWN,
    DrafterState.MISMATCH: target_pb2.DRAFTER_STATE_MISMATCH,
}


class RunsRequests(Protocol):
    """What the front needs of the core; see services.target.core.core.Core."""

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def is_known(self, request_id: str) -> bool: ...

    def stats(self) -> CoreStats: ...


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Answers callers. All methods run on one event loop."""

    def __init__(
        self,
        core: RunsRequests,
        model: ServedModel,
        *,
        instance_id: str,
        drafter_facts: Callable[[], DrafterFacts],
        observe_rejected: Callable[[str], None],
        backlog_tokens_max: int = limits.STREAM_BACKLOG_TOKENS_MAX,
    ) -> None:
        """observe_rejected hears why a request was not admitted: invalid, overloaded, unavailable; or,
        for an admitted one, slow_reader."""
        self._core = core
        self._model = model
        self._instance_id = instance_id
        self._drafter_facts = drafter_facts
        self._observe_rejected = observe_rejected
        self._backlog_tokens_max = backlog_tokens_max
        self._started_at = time.monotonic()

    async def Generate(
        self, message: target_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[target_pb2.GenerateResponse]:
        """Admit, then pass events on. Nothing is sent before admission, so that a refusal is a status
        and not the end of a stream that had begun."""
        channel = EventChannel(lambda: self._on_overflow(message.request_id), self._backlog_tokens_max)
        self._admit(message, channel.emit)
        ended = False
        try:
            while not ended:
                event = await channel.receive()
                ended = not isinstance(event, TokensCommitted)
                if ended:
                    _log_end(message.request_id, event)
                if isinstance(event, RequestFailed):
                    raise event.error
                yield _encoded(event)
        finally:
            # The caller left, or its deadline passed: free what it holds within a step.
            if not channel.has_ended:
                log.info("caller_left", request_id=message.request_id)
                self._abort(message.request_id)

    async def Abort(self, message: target_pb2.AbortRequest, context: Any) -> target_pb2.AbortResponse:
        """End a request early; its stream still gets its Finished."""
        found = self._core.is_known(message.request_id)
        if found:
            self._abort(message.request_id)
        return target_pb2.AbortResponse(found=found)

    async def GetModelInfo(
        self, message: target_pb2.GetModelInfoRequest, context: Any
    ) -> target_pb2.GetModelInfoResponse:
        """Constants."""
        return target_pb2.GetModelInfoResponse(
            served_model_name=self._model.name,
            architecture=self._model.architecture,
            vocab_size=self._model.vocab_size,
            max_len=self._model.max_len,
            eos_token_ids=self._model.eos_token_ids,
            dtype=self._model.dtype,
        )

    async def GetServerInfo(
        self, message: target_pb2.GetServerInfoRequest, context: Any
    ) -> target_pb2.GetServerInfoResponse:
        """The core as of its last step, and the link to the drafter."""
        stats, drafter = self._core.stats(), self._drafter_facts()
        return target_pb2.GetServerInfoResponse(
            version=tandem_version(),
            instance_id=self._instance_id,
            uptime_s=time.monotonic() - self._started_at,
            num_requests_running=stats.num_running,
            num_requests_waiting=stats.num_waiting,
            num_pages=stats.num_pages,
            num_pages_free=stats.num_pages_free,
            drafter_state=_DRAFTER_STATES[drafter.state],
            block_size=drafter.block_size,
            contract_mismatches=drafter.mismatches,
            num_drafter_sessions=drafter.num_sessions,
        )

    def _admit(self, message: target_pb2.GenerateRequest, emit: Callable[[Event], None]) -> None:
        try:
            request = parse_generate(
                message, self._model, is_known=self._core.is_known,
                fresh_seed=lambda: secrets.randbits(64), emit=emit,
            )  # fmt: skip
            self._core.submit(request)
        except InvalidRequest as error:
            # The field, never the value: it may be a token.
            log.info("request_rejected", reason="invalid", field=error.field.partition("[")[0])
            self._observe_rejected("invalid")
            raise
        except Overloaded:
            self._observe_rejected("overloaded")
            raise
        except Unavailable:
            self._observe_rejected("unavailable")
            raise

    def _abort(self, request_id: str) -> None:
        try:
            self._core.abort(request_id)
        except Overloaded:
            asyncio.get_running_loop().call_later(_ABORT_AGAIN_S, self._abort, request_id)

    def _on_overflow(self, request_id: str) -> None:
        """Free the request at once. Its stream is stuck in a write that only the reader can release:
        it stays, with a window of bytes, until the reader comes back to read why, or leaves."""
        log.warning("slow_reader", request_id=request_id)
        self._observe_rejected("slow_reader")
        self._abort(request_id)


def _log_end(request_id: str, event: Event) -> None:
    """Counts and times only."""
    if isinstance(event, RequestFailed):
        log.warning("request_failed", request_id=request_id, kind=type(event.error).__name__)
    elif isinstance(event, RequestFinished):
        log.info(
            "request_finished",
            request_id=request_id,
            reason=event.reason.value,
            num_prompt_tokens=event.num_prompt_tokens,
            num_output_tokens=event.num_output_tokens,
            num_decode_steps=event.num_decode_steps,
            num_accepted_tokens=event.num_accepted_tokens,
            queue_s=round(event.queue_s, 6),
            prefill_s=round(event.prefill_s, 6),
            decode_s=round(event.decode_s, 6),
        )


def _encoded(event: Event) -> target_pb2.GenerateResponse:
    if isinstance(event, TokensCommitted):
        delta = target_pb2.Delta(token_ids=event.token_ids, from_draft=event.from_draft)
        return target_pb2.GenerateResponse(delta=delta)
    assert isinstance(event, RequestFinished)
    return target_pb2.GenerateResponse(
        finished=target_pb2.Finished(
            reason=_REASONS[event.reason],
            matched_token_id=event.matched_token_id,
            num_prompt_tokens=event.num_prompt_tokens,
            num_output_tokens=event.num_output_tokens,
            num_decode_steps=event.num_decode_steps,
            num_draft_tokens=event.num_draft_tokens,
            num_accepted_tokens=event.num_accepted_tokens,
            num_drafts=event.num_drafts,
            seed=event.seed,
            queue_s=event.queue_s,
            prefill_s=event.prefill_s,
            decode_s=event.decode_s,
        )
    )
