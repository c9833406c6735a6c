"""The front's end of the joint: the core of another process as the servicer sees it.

Sends requests, passes events on to their streams. Knows frames and messages; nothing of gRPC or of processes.
Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import cast

from google.protobuf.message import DecodeError

from common import limits
from common.errors import ConfigError, Overloaded, Unavailable
from common.log import get_log
from common.pb.tandem.v1 import core_pb2
from services.target.core.report import CoreStats
from services.target.core.request import Event, Request, RequestFailed, RequestRefused, TokensCommitted
from services.target.facts import DrafterFacts
from services.target.joint.frames import BrokenJoint, FrameReader, framed
from services.target.joint.messages import U32, decode_error, decode_facts, decode_finished, encode_request

log = get_log("front")

class CoreClient(asyncio.Protocol):
    """A RunsRequests over a socket."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.welcome: asyncio.Future[core_pb2.Welcome] = loop.create_future()
        """The core's first words; BrokenJoint when it is gone before."""
        self.serving = False
        """What health says."""
        self.is_lost = False
        """The core is gone; all streams have been told."""
        self.is_over = False
        """Nothing comes any more: the core is gone, or has asked the front to leave."""
        self.news = asyncio.Event()
        """Set when one of these has changed."""
        self._transport: asyncio.Transport | None = None
        self._frames = FrameReader()
        self._number = 0
        self._live: dict[int, Request] = {}
        self._handle_of: dict[Request, int] = {}
        self._questions: dict[int, asyncio.Future[bool]] = {}
        self._stats = CoreStats(0, 0, 0, 0, 0)
        self._drafter = DrafterFacts()

    # --- services.target.front.servicer.RunsRequests -----------------------------------------------------

    def submit(self, request: Request) -> None:
        """Send a request; it emits what comes of it, RequestRefused when it is not admitted. Raises
        Overloaded or Unavailable when it cannot be sent."""
        transport = self._connected()
        num_waiting = transport.get_write_buffer_size()
        if num_waiting > limits.JOINT_BACKLOG_BYTES_MAX:
            raise Overloaded(
                "bytes not yet read by the core", limit=limits.JOINT_BACKLOG_BYTES_MAX, given=num_waiting
            )
        handle = self._next_number()
        self._live[handle] = request
        self._handle_of[request] = handle
        self._send(core_pb2.FromFront(submit=encode_request(handle, request)))

    def abort(self, request: Request) -> None:
        """Ask for a request's early end; one that has ended is ignored."""
        handle = self._handle_of.get(request)
        if handle is not None:
            self._send(core_pb2.FromFront(abort=handle))

    async def abort_named(self, request_id: str) -> bool:
        """The same for a request of any front; whether it was waiting or running. Raises Unavailable."""
        self._connected()
        number = self._next_number()
        question = core_pb2.AbortNamed(question=number, request_id=request_id)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(core_pb2.FromFront(abort_named=question))
            return await answer
        finally:
            del self._questions[number]

    def stats(self) -> CoreStats:
        """Never older than the last event that a stream got."""
        return self._stats

    def drafter_facts(self) -> DrafterFacts:
        """As stats."""
        return self._drafter

    # --- what the front says -----------------------------------------------------------------------------

    def tell_listening(self, address: str) -> None:
        self._send(core_pb2.FromFront(listening=address))

    def tell_start_failure(self, error: ConfigError) -> None:
        problem = core_pb2.StartFailure(field=error.field, problem=error.problem, given=str(error.given))
        self._send(core_pb2.FromFront(start_failure=problem))

    def tell_report(self, report: core_pb2.FrontReport) -> None:
        self._send(core_pb2.FromFront(report=report))

    async def close(self) -> None:
        """End the connection once all that was said is sent."""
        if self._transport is not None:
            self._transport.close()
            while self._transport is not None:
                await self.news.wait()
                self.news.clear()

    # --- asyncio.Protocol --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        try:
            while (content := self._frames.take()) is not None:
                self._take(core_pb2.FromCore.FromString(content))
        except (BrokenJoint, DecodeError) as error:
            log.error("joint_broken", reason=str(error))
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """The core is gone: say so to each stream, once."""
        self._transport = None
        self.is_lost = self.is_over = True
        self.news.set()
        if not self.welcome.done():
            self.welcome.set_exception(BrokenJoint("the core is gone"))
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(Unavailable("the service's core is gone"))
        for handle in list(self._live):
            self._end(handle, RequestFailed(Unavailable("the service's core is gone")))

    # --- what the core says ------------------------------------------------------------------------------

    def _take(self, frame: core_pb2.FromCore) -> None:
        if frame.HasField("welcome"):
            self.welcome.set_result(frame.welcome)
        if frame.HasField("facts"):
            # Before the events: whoever hears of an event sees facts that are as new.
            self._stats, self._drafter = decode_facts(frame.facts)
        if frame.HasField("deltas"):
            self._commit(frame.deltas)
        for ending in frame.endings:
            self._end(ending.handle, _outcome(ending))
        for answer in frame.abort_answers:
            waiting = self._questions.get(answer.question)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer.found)
        if frame.HasField("serving"):
            self.serving = frame.serving
            self.news.set()
        if frame.leave:
            self.is_over = True
            self.news.set()

    def _commit(self, deltas: core_pb2.Deltas) -> None:
        token_ids = array(U32, deltas.token_ids).tolist()
        from_draft = list(map(bool, deltas.from_draft))
        start = 0
        for handle, count in zip(array(U32, deltas.handles), array(U32, deltas.counts), strict=True):
            stop = start + count
            event = TokensCommitted(token_ids[start:stop], from_draft[start:stop])
            self._live[handle].emit(event)
            start = stop

    def _end(self, handle: int, event: Event) -> None:
        request = self._live.pop(handle)
        del self._handle_of[request]
        request.emit(event)

    def _next_number(self) -> int:
        """A handle; used again when 4 billion others were."""
        self._number = self._number % 0xFFFF_FFFF + 1
        return self._number

    def _connected(self) -> asyncio.Transport:
        if self._transport is None:
            raise Unavailable("the service's core is gone")
        return self._transport

    def _send(self, message: core_pb2.FromFront) -> None:
        if self._transport is not None:
            self._transport.write(framed(message.SerializeToString()))


def _outcome(ending: core_pb2.Ending) -> Event:
    if ending.HasField("finished"):
        return decode_finished(ending.finished)
    if ending.HasField("refused"):
        return RequestRefused(decode_error(ending.refused))
    return RequestFailed(decode_error(ending.failed))
