"""The connection to the drafter: handshake, stream, probing, on an asyncio thread of its own.

The core's thread meets it in a DrafterStream and never waits for the network otherwise. Knows grpc;
knows nothing of sessions, drafts or requests.

While there is no connection, a handshake is tried whenever the breaker says that one is due. Each
try has a channel of its own: a drafter that was replaced behind the same socket is then found at
once, also while its stopped predecessor still holds the old connection.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterable, Callable
from typing import Any

import grpc

from common import limits
from common.address import Address
from common.handoff.transport import PeerFault
from common.log import get_log
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.pb.tandem.v1 import drafter_pb2_grpc
from common.rpc import open_channel
from services.target.core.drafter_handshake import Agreement, ContractsDiffer, refusal
from services.target.core.drafter_negotiation import Negotiation
from services.target.core.drafter_status import DrafterStatus
from services.target.core.drafter_stream import DrafterStream

log = get_log("drafter_link")

OpenChannel = Callable[[Address], grpc.aio.Channel]


class DrafterLink:
    """One drafter's address, and whatever life of a drafter answers there.

    A failure in here is logged and everything started anew after a probe's interval: the link is
    never silently dead.
    """

    def __init__(
        self,
        address: Address,
        negotiation: Negotiation,
        instance_id: str,
        status: DrafterStatus,
        open_channel: OpenChannel = open_channel,
    ) -> None:
        self.status = status
        self._open_channel = open_channel
        self._address = address
        self._negotiation = negotiation
        self._instance_id = instance_id
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        self._cancel: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="drafter-link", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Give the sessions back and stop; takes CLOSE_DEADLINE_S or little more. From any thread."""
        self._is_closing.set()
        with self._lock:
            self._cancel()
        # Twice: one deadline for the call, one for whatever the loop still unwinds.
        self._thread.join(2 * limits.CLOSE_DEADLINE_S)
        if self._thread.is_alive():
            log.warning("drafter_link_hangs")

    # --- the link's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_closing.is_set():
            try:
                asyncio.run(self._work_until_closed())
            except (Exception, asyncio.CancelledError):
                log.exception("drafter_link_failed")
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
            # Before the loop closes, since a stream wakes it.
            if self._is_closing.is_set():
                self.status.closed()
            else:
                self.status.ended("failed")

    async def _work(self) -> None:
        while True:
            wait_s = self.status.probe_in_s()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
                continue
            async with self._open_channel(self._address) as channel:
                await self._use(drafter_pb2_grpc.DrafterServiceStub(channel))

    async def _use(self, stub: Any) -> None:
        """Shake hands, and stream until something ends it."""
        try:
            agreement = await self._negotiation.agree(stub)
            # What an earlier stream left is not trusted, and must not wait for its leases.
            await self._close_sessions(stub, limits.HANDSHAKE_DEADLINE_S)
            await self._stream_until_shut(stub, agreement)
        except ContractsDiffer as error:
            self.status.ended("contracts differ", error.differences)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                self.status.ended("refused", refusal(error.details() or ""))
            else:
                self.status.ended(error.code().name)
        except PeerFault as error:
            self.status.ended(str(error))

    async def _stream_until_shut(self, stub: Any, agreement: Agreement) -> None:
        """Returns when the core shut the stream; raises when the drafter ended it."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        stream = DrafterStream(agreement, lambda: loop.call_soon_threadsafe(woken.set))
        call = stub.Draft()
        reader = loop.create_task(_read(stream, call))
        writer = loop.create_task(_write(stream, call, woken))
        self.status.connected(stream)
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


async def _write(stream: DrafterStream, call: Any, woken: asyncio.Event) -> None:
    """Until the stream is shut."""
    while not stream.is_shut:
        await woken.wait()
        woken.clear()
        for request in stream.take_outgoing():
            try:
                await call.write(request)
            except asyncio.InvalidStateError:
                raise PeerFault("the stream ended while a message was written") from None


async def _read(stream: DrafterStream, call: AsyncIterable[pb.DraftResponse]) -> None:
    """Until the drafter ends the stream, which it never should."""
    async for reply in call:
        stream.deliver(reply)
    raise PeerFault("the drafter ended the stream")
