"""Where the core's thread and the link's thread meet: messages one way, replies the other, bounded.

A Pipe (see common/handoff/pipe.py) for one connection. Knows threads; no grpc and no asyncio.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from common import limits
from common.handoff.transport import PeerFault, PeerLost
from common.pb.tandem.v1 import drafter_pb2 as pb
from services.target.core.drafter_handshake import Agreement


class DrafterStream:
    """Messages and replies of one connection.

    What is sent and not yet delivered is bounded by MESSAGES_IN_FLIGHT_MAX, or by one step where that
    alone takes more (a limit that it could never pass would end drafting for good); and each message
    has one reply, so both queues are bounded by it too.
    """

    def __init__(self, agreement: Agreement, wake: Callable[[], object]) -> None:
        """wake is called, on any thread, when there is something to send or the stream was shut."""
        self.agreement = agreement
        self._wake = wake
        self._changed = threading.Condition()
        self._outgoing: deque[pb.DraftRequest] = deque()
        self._replies: deque[pb.DraftResponse] = deque()
        self._num_in_flight = 0
        self._is_shut = False
        self._on_shut: Callable[[], object] = lambda: None

    # --- the core's thread -------------------------------------------------------------------------

    def send(self, requests: list[pb.DraftRequest]) -> bool:
        """See Pipe.send."""
        with self._changed:
            if self._is_shut:
                raise PeerLost
            num_in_flight = self._num_in_flight + len(requests)
            if self._num_in_flight and num_in_flight > limits.MESSAGES_IN_FLIGHT_MAX:
                return False
            self._num_in_flight = num_in_flight
            self._outgoing.extend(requests)
            self._wake()
        return True

    def receive(self, deadline: float) -> pb.DraftResponse | None:
        """See Pipe.receive. Replies that came before the stream was shut are still given out."""
        with self._changed:
            while not self._replies:
                if self._is_shut:
                    raise PeerLost
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
            return self._replies.popleft()

    # --- the link's thread -------------------------------------------------------------------------

    def take_outgoing(self) -> list[pb.DraftRequest]:
        """Messages to write, in order."""
        with self._changed:
            taken = list(self._outgoing)
            self._outgoing.clear()
        return taken

    def deliver(self, reply: pb.DraftResponse) -> None:
        """A reply arrived. Raises PeerFault when nothing waits for one."""
        with self._changed:
            if self._num_in_flight == 0:
                raise PeerFault("a reply to nothing")
            self._num_in_flight -= 1
            self._replies.append(reply)
            self._changed.notify()

    # --- either ------------------------------------------------------------------------------------

    @property
    def is_shut(self) -> bool:
        with self._changed:
            return self._is_shut

    def when_shut(self, call: Callable[[], object]) -> None:
        """Have `call` called when the stream is shut, on the thread that does it; at once if it is."""
        with self._changed:
            self._on_shut = call
            if not self._is_shut:
                return
        call()

    def shut(self) -> None:
        """Nothing is sent or delivered any more; who waits for a reply stops waiting."""
        with self._changed:
            if self._is_shut:
                return
            self._is_shut = True
            self._outgoing.clear()
            self._changed.notify_all()
            self._wake()
            on_shut = self._on_shut
        on_shut()
