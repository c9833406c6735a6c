"""The connection to the drafter: handshake, stream, probing, on an asyncio thread of its own.

The core's thread meets it in a DrafterStream and never waits for the network otherwise. Knows grpc;
knows nothing of sessions, drafts or requests.

While there is no connection, a handshake is tried whenever the breaker says that one is due. Each
try has a channel of its own: a drafter that was replaced behind the same socket is then found at
once, also while its stopped predecessor still holds the old connection.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import AsyncIterable, Callable
from typing import Any, Protocol

import grpc

from common import limits
from common.address import Address
from common.contract import Mismatch, TargetContract
from common.handoff.transport import PeerFault
from common.log import get_log
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.pb.tandem.v1 import drafter_pb2_grpc
from common.rpc import open_channel
from services.target.core.breaker import Breaker, BreakerState
from services.target.core.drafter_handshake import Agreement, ContractsDiffer, agree, hello, refusal
from services.target.core.drafter_stream import DrafterStream

log = get_log("drafter_link")


class LinkState(enum.Enum):
    """UP has a connection; MISMATCH reached a drafter that does not fit; DOWN is all else."""

    DOWN = "down"
    UP = "up"
    MISMATCH = "mismatch"


class LinkObserver(Protocol):
    """Told of changes, on either thread, under the link's lock: must be quick and not call back."""

    def drafter_state(self, up: bool, breaker: str) -> None: ...

    def contract_mismatches(self, fields: list[str]) -> None:
        """The fields that differ; none when the contracts fit (again)."""


class DrafterLink:
    """One drafter's address, and whatever life of a drafter answers there.

    A part that fails is logged and started anew after a probe's interval: the link is never silently
    dead. The breaker is guarded by the lock, since both threads report to it.
    """

    def __init__(
        self,
        address: Address,
        target: TargetContract,
        instance_id: str,
        observer: LinkObserver,
        clock: Callable[[], float],
    ) -> None:
        self._address = address
        self._target = target
        self._instance_id = instance_id
        self._observer = observer
        self._lock = threading.Lock()
        self._breaker = Breaker(clock)
        self._state = LinkState.DOWN
        self._mismatches: list[Mismatch] = []
        self._stream: DrafterStream | None = None
        self._was_connected = False
        self._is_closing = threading.Event()
        self._cancel: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="drafter-link", daemon=True)

    # --- any thread --------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Give the sessions back and stop; takes CLOSE_DEADLINE_S or little more."""
        with self._lock:
            self._is_closing.set()
            self._cancel()
        # Twice: one deadline for the call, one for whatever the loop still unwinds.
        self._thread.join(2 * limits.CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            log.warning("drafter_link_hangs")

    @property
    def stream(self) -> DrafterStream | None:
        """The connection in use."""
        with self._lock:
            return self._stream

    @property
    def state(self) -> LinkState:
        with self._lock:
            return self._state

    @property
    def mismatches(self) -> list[Mismatch]:
        """What does not fit, while the state is MISMATCH."""
        with self._lock:
            return list(self._mismatches)

    @property
    def breaker_is_open(self) -> bool:
        """Whether a drafter that was there is not asked any more."""
        with self._lock:
            return self._was_connected and self._breaker.state is BreakerState.OPEN

    def answered(self, stream: DrafterStream) -> None:
        """The drafter replied in time on this stream."""
        self._report(stream, self._breaker.answered, "answered")

    def missed(self, stream: DrafterStream) -> None:
        """The drafter did not reply in time on this stream."""
        self._report(stream, self._breaker.missed, "deadlines missed")

    def drop(self, stream: DrafterStream, why: str) -> None:
        """What comes on this stream cannot be trusted any more."""
        self._report(stream, self._breaker.lost, why)

    def _report(self, stream: DrafterStream, to_breaker: Callable[[], None], why: str) -> None:
        with self._lock:
            # A report on a connection that is gone says nothing of the one that is there.
            if self._stream is not stream:
                return
            before = self._breaker.state
            to_breaker()
            if self._breaker.state is before:
                return
            if self._breaker.state is BreakerState.OPEN:
                self._withdraw()
            log.info("drafter_breaker", state=self._breaker.state.value, reason=why)
            self._tell_state()

    def _withdraw(self) -> None:
        """Under the lock: the connection is not used any more."""
        if self._stream is not None:
            self._stream.shut()
            self._stream = None
        self._state = LinkState.DOWN

    def _tell_state(self) -> None:
        self._observer.drafter_state(self._state is LinkState.UP, self._breaker.state.value)

    # --- the link's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing.is_set():
            try:
                asyncio.run(self._work_until_closed())
            except (Exception, asyncio.CancelledError):
                log.exception("drafter_link_failed")
                self._end(LinkState.DOWN, [], "failed")
                self._is_closing.wait(limits.PROBE_INTERVAL_S)

    async def _work_until_closed(self) -> None:
        loop = asyncio.get_running_loop()
        work = loop.create_task(self._work())
        with self._lock:
            self._cancel = lambda: loop.call_soon_threadsafe(work.cancel)
            if self._is_closing.is_set():
                work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            if not self._is_closing.is_set():
                raise
        finally:
            with self._lock:
                self._cancel = lambda: None
                # Before the loop closes, since the stream wakes it.
                self._withdraw()

    async def _work(self) -> None:
        while True:
            with self._lock:
                wait_s = self._breaker.probe_in_s
                if wait_s == 0:
                    self._breaker.probing()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            async with open_channel(self._address) as channel:
                await self._use(drafter_pb2_grpc.DrafterServiceStub(channel))

    async def _use(self, stub: Any) -> None:
        """Shake hands, and stream until something ends it."""
        try:
            response = await stub.Handshake(
                hello(self._target, self._instance_id), timeout=limits.HANDSHAKE_DEADLINE_S
            )
            agreement = agree(self._target, response)
            # What an earlier stream left is not trusted, and must not wait for its leases.
            await self._close_sessions(stub, limits.HANDSHAKE_DEADLINE_S)
            await self._stream_until_lost(stub, agreement)
        except ContractsDiffer as error:
            self._end(LinkState.MISMATCH, error.differences, "contracts differ")
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                self._end(LinkState.MISMATCH, refusal(error.details() or ""), "refused")
            else:
                self._end(LinkState.DOWN, [], error.code().name)
        except PeerFault as error:
            self._end(LinkState.DOWN, [], str(error))

    async def _stream_until_lost(self, stub: Any, agreement: Agreement) -> None:
        """Returns when the stream was shut by the core; raises when the drafter ended it."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        stream = DrafterStream(agreement, lambda: loop.call_soon_threadsafe(woken.set))
        call = stub.Draft()
        reader = loop.create_task(_read(stream, call))
        writer = loop.create_task(_write(stream, call, woken, self._instance_id))
        self._publish(stream)
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            # Only the reader's error says with which status the stream ended.
            for task in (reader, writer):
                if task.cancelled():
                    raise PeerFault("the stream was cancelled")
                if task.done():
                    task.result()
        finally:
            stream.shut()
            call.cancel()
            reader.cancel()
            writer.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
            if self._is_closing.is_set():
                await self._give_back(stub)

    async def _give_back(self, stub: Any) -> None:
        try:
            await self._close_sessions(stub, limits.CLOSE_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.info("drafter_sessions_left_to_leases", status=error.code().name)

    async def _close_sessions(self, stub: Any, deadline_s: float) -> None:
        request = pb.CloseSessionsRequest(target_instance_id=self._instance_id)
        await stub.CloseSessions(request, timeout=deadline_s)

    def _publish(self, stream: DrafterStream) -> None:
        with self._lock:
            self._breaker.connected()
            self._stream, self._state, self._was_connected = stream, LinkState.UP, True
            self._set_mismatches([])
            self._tell_state()
        log.info(
            "drafter_connected",
            drafter_instance_id=stream.agreement.drafter_instance_id,
            block_size=stream.agreement.draft.block_size,
        )

    def _end(self, state: LinkState, mismatches: list[Mismatch], why: str) -> None:
        """A try or a connection ended."""
        with self._lock:
            before = (self._state, [m.field for m in self._mismatches])
            self._withdraw()
            self._state = state
            self._breaker.lost()
            self._set_mismatches(mismatches)
            self._tell_state()
            after = (state, [m.field for m in mismatches])
        # Each second the same would be noise.
        if before != after:
            differences = [str(mismatch) for mismatch in mismatches]
            log.warning("drafter_unusable", state=state.value, reason=why, mismatches=differences)

    def _set_mismatches(self, mismatches: list[Mismatch]) -> None:
        if [m.field for m in mismatches] != [m.field for m in self._mismatches]:
            self._observer.contract_mismatches([m.field for m in mismatches])
        self._mismatches = mismatches


async def _write(stream: DrafterStream, call: Any, woken: asyncio.Event, instance_id: str) -> None:
    """Until the stream is shut. Each message names the target's life, which is the connection's."""
    while not stream.is_shut:
        await woken.wait()
        woken.clear()
        for request in stream.take_outgoing():
            request.target_instance_id = instance_id
            try:
                await call.write(request)
            except asyncio.InvalidStateError:
                raise PeerFault("the stream ended while a message was written") from None


async def _read(stream: DrafterStream, call: AsyncIterable[pb.DraftResponse]) -> None:
    """Until the drafter ends the stream, which it never should."""
    async for reply in call:
        stream.deliver(reply)
    raise PeerFault("the drafter ended the stream")
