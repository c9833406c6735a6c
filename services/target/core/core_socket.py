"""The core's end of the joint with one front: its requests come in, one frame a step goes out.

Writes never wait. They happen on the core's thread after a step's events, while the device computes the
next one: a thread for them would take the interpreter's lock from the core just then. What the socket does
not take stays in the outbox, merged, until the event loop says that it can be written to; so a front that
does not read costs the core's thread one failed `send` a step.
Knows frames and messages, and the core's verbs; nothing of processes or gRPC.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from google.protobuf.message import DecodeError

from common.errors import InvalidRequest, Overloaded, Unavailable
from common.pb.tandem.v1 import core_pb2
from services.target.core.front_outbox import FrontOutbox, FrontStream
from services.target.core.report import CoreStats
from services.target.core.request import Request
from services.target.facts import DrafterFacts
from services.target.joint.frames import BrokenJoint, FrameReader, framed
from services.target.joint.messages import decode_request, encode_facts

# A front's largest frame comes in a few dozen of these.
_READ_BYTES = 256 * 1024


class RunsRequests(Protocol):
    """What the joint needs of services.target.core.core.Core."""

    def submit(self, request: Request) -> None: ...

    def abort(self, request: Request) -> None: ...

    async def abort_named(self, request_id: str) -> bool: ...


TakeFacts = Callable[[], tuple[CoreStats, DrafterFacts]]
"""The core and its drafter as they are now; from any thread."""


class FrontObserver(Protocol):
    """Hears what a front measured, and when one did not read."""

    def observe_report(self, report: core_pb2.FrontReport) -> None: ...

    def observe_slow_front(self) -> None:
        """A request was dropped because its front did not read."""


class FrontSocket:
    """Made and read on the event loop; writes from any thread."""

    def __init__(
        self,
        sock: socket.socket,
        core: RunsRequests,
        take_facts: TakeFacts,
        observer: FrontObserver,
        outbox: FrontOutbox | None = None,
    ) -> None:
        """The socket becomes this object's own."""
        sock.setblocking(False)
        self.num_heard = 0
        """Pieces read so far: grows while the front lives."""
        self._sock = sock
        self._core = core
        self._take_facts = take_facts
        self._observer = observer
        self._outbox = outbox or FrontOutbox()
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, FrontStream] = {}
        self._sent_facts: tuple[CoreStats, DrafterFacts] | None = None
        self._frames = FrameReader()
        self._unsent = memoryview(b"")
        self._awaits_room = False
        self._lost = False
        # Whoever holds it sends; whoever does not get it has left what it had in the outbox.
        self._sending = threading.Lock()

    @property
    def num_requests(self) -> int:
        """Requests of this front that have not ended."""
        return len(self._streams)

    # --- out -------------------------------------------------------------------------------------------

    def welcome(self, welcome: core_pb2.Welcome) -> None:
        """Say the first words. Before anything else, and little enough for an empty socket."""
        self._unsent = memoryview(framed(core_pb2.FromCore(welcome=welcome).SerializeToString()))
        self.flush()

    def say_serving(self, serving: bool) -> None:
        """Tell the front what health says from now on."""
        self._outbox.say_serving(serving)
        self.flush()

    def say_leave(self) -> None:
        """Ask the front to end once it has passed on all that waits."""
        self._outbox.say_leave()
        self.flush()

    def announce(self) -> None:
        """Send what the core has emitted since the last call. On its thread; never blocks."""
        ended, overflowed = self._outbox.collect()
        for stream in ended:
            self._streams.pop(stream.handle, None)
        for stream in overflowed:
            self._loop.call_soon_threadsafe(self._drop, stream)
        self.flush()

    def flush(self) -> None:
        """Send what waits, as far as the socket takes it now. Never blocks."""
        while self._has_something() and self._sending.acquire(blocking=False):
            try:
                if not self._send():
                    return
            finally:
                self._sending.release()

    def _has_something(self) -> bool:
        if self._lost:
            return False
        return bool(self._unsent) or self._outbox.has_waiting or self._take_facts() != self._sent_facts

    def _send(self) -> bool:
        """Send one frame, or the rest of one; False when the socket is full or broken."""
        if not self._unsent:
            content = self._next_frame().SerializeToString()
            if not content:
                # Somebody else has sent it since it was looked for.
                return True
            self._unsent = memoryview(framed(content))
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            self._await_room()
            return False
        except OSError:
            # The front is gone; whoever reads learns of it at the same moment.
            self._lost = True
            return False
        return True

    def _next_frame(self) -> core_pb2.FromCore:
        frame = self._outbox.take()
        # After the events, so that they are never newer.
        facts = self._take_facts()
        if facts != self._sent_facts:
            frame.facts.CopyFrom(encode_facts(*facts))
            self._sent_facts = facts
        return frame

    def _await_room(self) -> None:
        if not self._awaits_room:
            self._awaits_room = True
            self._loop.call_soon_threadsafe(self._watch_for_room)

    def _watch_for_room(self) -> None:
        if not self._lost:
            self._loop.add_writer(self._sock, self._on_room)

    def _on_room(self) -> None:
        self._loop.remove_writer(self._sock)
        with self._sending:
            self._awaits_room = False
        self.flush()

    # --- in --------------------------------------------------------------------------------------------

    async def hear(self) -> core_pb2.FromFront:
        """The front's next message. Raises BrokenJoint when it ends instead, or sends what is wrong."""
        while (content := self._frames.take()) is None:
            chunk = await self._read()
            if not chunk:
                raise BrokenJoint("the front ended")
            self._frames.feed(chunk)
        try:
            return core_pb2.FromFront.FromString(content)
        except DecodeError:
            raise BrokenJoint("frame: must hold a message") from None

    async def run(self) -> None:
        """Serve the front's requests for as long as it lives; ends with BrokenJoint."""
        while True:
            await self._take(await self.hear())

    def close(self) -> None:
        """The front is gone: end its requests."""
        if self._sock.fileno() < 0:
            return
        self._outbox.close()
        self._loop.remove_writer(self._sock)
        # Not in the middle of somebody's `send`: the number of a closed file may be another's at once.
        with self._sending:
            self._lost = True
            self._sock.close()
        for stream in list(self._streams.values()):
            self._core.abort(stream.request)

    async def _read(self) -> bytes:
        try:
            chunk = await self._loop.sock_recv(self._sock, _READ_BYTES)
        except OSError:
            return b""
        self.num_heard += 1
        return chunk

    async def _take(self, message: core_pb2.FromFront) -> None:
        kind = message.WhichOneof("message")
        if kind == "submit":
            self._submit(message.submit)
        elif kind == "abort":
            stream = self._streams.get(message.abort)
            if stream is not None:
                self._core.abort(stream.request)
        elif kind == "abort_named":
            found = await self._core.abort_named(message.abort_named.request_id)
            self._outbox.answer(message.abort_named.question, found)
            self.flush()
        elif kind == "report":
            self._observer.observe_report(message.report)
        else:
            raise BrokenJoint(f"message: must be one of a front that serves, got {kind}")

    def _submit(self, message: core_pb2.Submit) -> None:
        try:
            request = decode_request(message)
        except ValueError:
            raise BrokenJoint("prompt: must be 32-bit numbers") from None
        stream = FrontStream(message.handle, request)
        request.emit = functools.partial(self._outbox.emit, stream)
        self._streams[message.handle] = stream
        try:
            self._core.submit(request)
        except (InvalidRequest, Overloaded, Unavailable) as error:
            del self._streams[message.handle]
            self._outbox.refuse(stream, error)
            self.flush()

    def _drop(self, stream: FrontStream) -> None:
        self._observer.observe_slow_front()
        self._core.abort(stream.request)
