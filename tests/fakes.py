"""Fakes: real implementations of an interface, small and scripted, for the edge of what is tested."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from common.errors import InvalidRequest, TandemError
from common.pb.tandem.v1 import target_pb2, target_pb2_grpc
from services.target.core.report import CoreStats
from services.target.core.request import (
    FinishReason,
    Request,
    RequestFailed,
    TokensCommitted,
)
from tools.target_client import TargetClient


class ScriptedTarget(target_pb2_grpc.TargetServiceServicer):
    """A TargetService whose answer to a prompt is a function of the prompt.

    answer(prompt, drafting) gives token ids; with drafting, tokens come in messages of
    `tokens_a_message`, all but the last of each marked as drafted. pause_s passes before each message.
    """

    def __init__(
        self,
        answer: Callable[[list[int], bool], list[int]],
        *,
        tokens_a_message: int = 3,
        pause_s: float = 0.001,
    ) -> None:
        self._answer, self._tokens_a_message, self._pause_s = answer, tokens_a_message, pause_s
        self.requests: list[target_pb2.GenerateRequest] = []
        self.left_early = threading.Event()

    def Generate(
        self, request: target_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[target_pb2.GenerateResponse]:
        self.requests.append(request)
        if not request.input_ids:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "input_ids: must be at least 1 id, got 0")
        drafting = not request.disable_drafting
        tokens = self._answer(list(request.input_ids), drafting)[: request.max_new_tokens]
        width = self._tokens_a_message if drafting else 1
        ended = threading.Event()
        context.add_callback(lambda: None if ended.is_set() else self.left_early.set())
        pieces = [tokens[i : i + width] for i in range(0, len(tokens), width)]
        for piece in pieces:
            time.sleep(self._pause_s)
            marks = [True] * (len(piece) - 1) + [False]
            yield target_pb2.GenerateResponse(delta=target_pb2.Delta(token_ids=piece, from_draft=marks))
        ended.set()
        yield target_pb2.GenerateResponse(
            finished=target_pb2.Finished(
                reason=target_pb2.FINISH_REASON_LENGTH,
                num_prompt_tokens=len(request.input_ids),
                num_output_tokens=len(tokens),
                num_decode_steps=len(pieces),
                num_drafts=len(pieces) if drafting else 0,
                num_draft_tokens=7 * len(pieces) if drafting else 0,
                num_accepted_tokens=len(tokens) - len(pieces) if drafting else 0,
                seed=request.sampling.seed,
            )
        )

    def GetServerInfo(
        self, request: target_pb2.GetServerInfoRequest, context: grpc.ServicerContext
    ) -> target_pb2.GetServerInfoResponse:
        return target_pb2.GetServerInfoResponse(drafter_state=target_pb2.DRAFTER_STATE_UP, block_size=8)

    @contextlib.contextmanager
    def serving(self, address: str) -> Iterator[TargetClient]:
        """Serve at the address for the time of the block; gives a client."""
        server = grpc.server(ThreadPoolExecutor(max_workers=8))
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)
        server.add_insecure_port(address)
        server.start()
        try:
            with TargetClient(address) as client:
                yield client
        finally:
            server.stop(grace=None)


class ScriptedCore:
    """The core as the front sees it: keeps what it is given; the test says what becomes of it.

    `refusal`, when set, is raised by submit. commit, finish and fail play the core's part for a request,
    each as one step, from whichever thread calls them.
    """

    def __init__(self) -> None:
        self.announce: Callable[[], None] = lambda: None
        self.refusal: TandemError | None = None
        self.requests: dict[str, Request] = {}
        self.aborted: list[str] = []
        self._known: set[str] = set()

    def submit(self, request: Request) -> None:
        if self.refusal is not None:
            raise self.refusal
        if request.request_id in self._known:
            raise InvalidRequest(
                "request_id", limit="unique among running requests", given=request.request_id
            )
        self.requests[request.request_id] = request
        self._known.add(request.request_id)

    def abort(self, request: Request) -> None:
        self.aborted.append(request.request_id)
        if request.request_id in self._known:
            self.finish(request.request_id, FinishReason.ABORT)

    async def abort_named(self, request_id: str) -> bool:
        found = self.is_known(request_id)
        if found:
            self.abort(self.requests[request_id])
        return found

    def is_known(self, request_id: str) -> bool:
        """Whether the request has not ended."""
        return request_id in self._known

    def stats(self) -> CoreStats:
        return CoreStats(len(self._known), 3, num_pages=64, num_pages_free=60, pages_unaccounted=0)

    def commit(self, request_id: str, token_ids: list[int]) -> None:
        """Commit tokens; every second one counts as drafted."""
        request = self.requests[request_id]
        request.tokens += token_ids
        request.emit(TokensCommitted(list(token_ids), [i % 2 == 1 for i in range(len(token_ids))]))
        self.announce()

    def finish(self, request_id: str, reason: FinishReason, matched_token_id: int | None = None) -> None:
        """End a request as it should end."""
        self._known.discard(request_id)
        request = self.requests[request_id]
        request.emit(request.finish(reason, matched_token_id))
        self.announce()

    def fail(self, request_id: str, error: TandemError) -> None:
        """End a request with an error."""
        self._known.discard(request_id)
        self.requests[request_id].emit(RequestFailed(error))
        self.announce()
