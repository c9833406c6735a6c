"""tandem.v1.TargetService over gRPC: each call in a few lines, and each stream's one ending.

Knows grpc and the core's few verbs; nothing of steps, tensors or drafts. Errors leave as exceptions
that common.rpc turns into status codes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from common import limits
from common.errors import InvalidRequest, Overloaded, TandemError, Unavailable
from common.log import get_log
from common.pb.tandem.v1 import target_pb2, target_pb2_grpc
from common.version import tandem_version
from services.target.core.report import CoreStats
from services.target.core.request import (
    Event,
    Request,
    RequestFailed,
    RequestFinished,
    RequestRefused,
    TokensCommitted,
)
from services.target.facts import DrafterFacts, ServedModel
from services.target.front.channel import EventChannel
from services.target.front.validation import checked_request_id, parse_generate
from services.target.joint.messages import drafter_state_number, encode_finished, encode_model

log = get_log("front")

SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetService"]

class RunsRequests(Protocol):
    """What the front needs of the core: services.target.core.core.Core in this process, or
    services.target.front.core_client.CoreClient.

    submit raises InvalidRequest, Overloaded or Unavailable, or has the request emit RequestRefused.
    """

    def submit(self, request: Request) -> None: ...

    def abort(self, request: Request) -> None: ...

    async def abort_named(self, request_id: str) -> bool: ...

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
        uptime_s: float = 0.0,
    ) -> None:
        """observe_rejected hears why a request was not admitted: invalid, overloaded, unavailable; or,
        for an admitted one, slow_reader. uptime_s is the service's age by now."""
        self._core = core
        self._model = model
        self._instance_id = instance_id
        self._drafter_facts = drafter_facts
        self._observe_rejected = observe_rejected
        self._backlog_tokens_max = backlog_tokens_max
        self._started_at = time.monotonic() - uptime_s

    async def Generate(
        self, message: target_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[target_pb2.GenerateResponse]:
        """Admit, then pass events on. Nothing is sent before admission, so that a refusal is a status
        and not the end of a stream that had begun."""
        channel = EventChannel(lambda: self._on_overflow(request), self._backlog_tokens_max)
        request = self._admit(message, channel.emit)
        ended = False
        try:
            while not ended:
                event = await channel.receive()
                ended = not isinstance(event, TokensCommitted)
                if ended:
                    _log_end(message.request_id, event)
                if isinstance(event, RequestRefused):
                    self._on_refusal(event.error)
                if isinstance(event, RequestFailed | RequestRefused):
                    raise event.error
                yield _encoded(event)
        finally:
            # The caller left, or its deadline passed: free what it holds within a step.
            if not channel.has_ended:
                log.info("caller_left", request_id=message.request_id)
                self._core.abort(request)

    async def Abort(self, message: target_pb2.AbortRequest, context: Any) -> target_pb2.AbortResponse:
        """End a request early; its stream still gets its Finished."""
        request_id = checked_request_id(message.request_id)
        return target_pb2.AbortResponse(found=await self._core.abort_named(request_id))

    async def GetModelInfo(
        self, message: target_pb2.GetModelInfoRequest, context: Any
    ) -> target_pb2.GetModelInfoResponse:
        """Constants."""
        return encode_model(self._model)

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
            drafter_state=drafter_state_number(drafter.state),
            block_size=drafter.block_size,
            contract_mismatches=drafter.mismatches,
            num_drafter_sessions=drafter.num_sessions,
        )

    def _admit(self, message: target_pb2.GenerateRequest, emit: Callable[[Event], None]) -> Request:
        try:
            request = parse_generate(
                message, self._model, fresh_seed=lambda: secrets.randbits(64), emit=emit
            )
            self._core.submit(request)
        except (InvalidRequest, Overloaded, Unavailable) as error:
            self._on_refusal(error)
            raise
        return request

    def _on_refusal(self, error: TandemError) -> None:
        if isinstance(error, InvalidRequest):
            # The field, never the value: it may be a token.
            log.info("request_rejected", reason="invalid", field=error.field.partition("[")[0])
            self._observe_rejected("invalid")
        else:
            self._observe_rejected("overloaded" if isinstance(error, Overloaded) else "unavailable")

    def _on_overflow(self, request: Request) -> None:
        """Free the request at once. Its stream is stuck in a write that only the reader can release:
        it stays, with a window of bytes, until the reader comes back to read why, or leaves."""
        log.warning("slow_reader", request_id=request.request_id)
        self._observe_rejected("slow_reader")
        self._core.abort(request)


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
    return target_pb2.GenerateResponse(finished=encode_finished(event))
