"""A scripted drafter: a real gRPC service that follows the protocol's rules and drafts by counting."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import torch

from common import rpc
from common.contract import PROTOCOL_VERSION, DraftContract, TargetContract
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.pb.tandem.v1 import drafter_pb2_grpc
from common.wire import encode_draft_contract, encode_target_contract, encode_tensor

Alter = Callable[[pb.DraftRequest, pb.DraftResponse], pb.DraftResponse | None]


class ScriptedDrafter(drafter_pb2_grpc.DrafterServiceServicer):
    """One life of a drafter. The draft of an anchor a is a+1, a+2, … modulo the vocabulary.

    alter may change each reply, or swallow it by returning None. delay_s passes before each reply.
    refusal is the text with which handshakes are refused.
    """

    def __init__(
        self,
        target: TargetContract,
        draft: DraftContract,
        *,
        instance_id: str = "drafter-1",
        num_sessions_max: int = 8,
        refusal: str | None = None,
    ) -> None:
        self.target, self.draft, self.instance_id = target, draft, instance_id
        self.num_sessions_max, self.refusal = num_sessions_max, refusal
        self.alter: Alter = lambda request, reply: reply
        self.delay_s = 0.0
        self.requests: list[pb.DraftRequest] = []
        self.closes: list[pb.CloseSessionsRequest] = []
        self.num_handshakes = 0
        # session id: (epoch, start, end)
        self.sessions: dict[int, tuple[int, int, int]] = {}

    async def Handshake(
        self, request: pb.HandshakeRequest, context: grpc.aio.ServicerContext
    ) -> pb.HandshakeResponse:
        self.num_handshakes += 1
        if self.refusal is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        return pb.HandshakeResponse(
            protocol_version=PROTOCOL_VERSION,
            drafter_instance_id=self.instance_id,
            target=encode_target_contract(self.target),
            draft=encode_draft_contract(self.draft),
            transport=pb.TRANSPORT_INLINE,
            num_sessions_max=self.num_sessions_max,
            lease_s=30.0,
        )

    async def Draft(
        self, requests: AsyncIterator[pb.DraftRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.DraftResponse]:
        async for request in requests:
            self.requests.append(request)
            reply = self.alter(request, self.answer(request))
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if reply is not None:
                yield reply

    async def CloseSessions(
        self, request: pb.CloseSessionsRequest, context: grpc.aio.ServicerContext
    ) -> pb.CloseSessionsResponse:
        self.closes.append(request)
        num_closed = len(self.sessions)
        self.sessions.clear()
        return pb.CloseSessionsResponse(num_closed=num_closed)

    def answer(self, request: pb.DraftRequest) -> pb.DraftResponse:
        """The reply of a drafter that keeps the protocol."""
        reply = pb.DraftResponse(step_id=request.step_id, drafter_instance_id=self.instance_id)
        outcomes: dict[tuple[int, int], int] = {}
        for close in request.closes:
            self.sessions.pop(close.session_id, None)
        for begin in request.opens:
            self.sessions[begin.session_id] = (begin.epoch, begin.start_position, begin.start_position)
            outcomes[begin.session_id, begin.epoch] = pb.OUTCOME_OK
        for extend in request.extends:
            outcomes[extend.session_id, extend.epoch] = self._extend(extend)
        drafts = []
        rows: dict[tuple[int, int], int] = {}
        for block in request.drafts:
            key = (block.session_id, block.epoch)
            epoch, _, end = self.sessions.get(block.session_id, (-1, 0, 0))
            if outcomes.get(key, pb.OUTCOME_OK) != pb.OUTCOME_OK:
                continue
            if epoch != block.epoch or end != block.position:
                outcomes[key] = pb.OUTCOME_UNKNOWN_SESSION if epoch < 0 else pb.OUTCOME_NEEDS_RESYNC
                continue
            outcomes[key] = pb.OUTCOME_OK
            rows[key] = len(drafts)
            drafts.append(self.draft_of(block.anchor))
        for (session_id, epoch), outcome in outcomes.items():
            end = self.sessions.get(session_id, (0, 0, 0))[2]
            reply.outcomes.add(
                session_id=session_id, epoch=epoch, outcome=pb.Outcome.ValueType(outcome), context_len=end,
                draft_row=rows.get((session_id, epoch)),
            )  # fmt: skip
        if drafts:
            reply.drafts.CopyFrom(encode_tensor(torch.tensor(drafts, dtype=torch.int32)))
        return reply

    def draft_of(self, anchor: int) -> list[int]:
        return [(anchor + k) % self.target.vocab_rows for k in range(1, self.draft.num_draft_tokens + 1)]

    def _extend(self, extend: pb.ExtendSession) -> int:
        epoch, start, end = self.sessions.get(extend.session_id, (-1, 0, 0))
        if epoch < 0:
            return pb.OUTCOME_UNKNOWN_SESSION
        if epoch != extend.epoch:
            return pb.OUTCOME_STALE_EPOCH
        if not start <= extend.position <= end:
            return pb.OUTCOME_NEEDS_RESYNC
        self.sessions[extend.session_id] = (epoch, start, extend.position + extend.num_rows)
        return pb.OUTCOME_OK

    @contextlib.contextmanager
    def serving(self, address: str) -> Iterator[None]:
        """Serve on a thread of its own; at the end everything is cut off at once, as by a kill."""
        started = threading.Event()
        stop: list[Callable[[], object]] = []

        async def serve() -> None:
            server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
            drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self, server)
            server.add_insecure_port(address)
            await server.start()
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            stop.append(lambda: loop.call_soon_threadsafe(ended.set))
            started.set()
            await ended.wait()
            await server.stop(None)

        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        assert started.wait(10)
        try:
            yield
        finally:
            stop[0]()
            thread.join(10)
            assert not thread.is_alive()
