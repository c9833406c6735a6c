"""A connection's flags on a GPU: waits and writes on the engine's stream, the release past it.

Implements device_link.RingFlags by stream memory operations. Knows addresses; nothing of rings or sessions.
"""

from __future__ import annotations

import torch

from common.handoff.flags import SideStream, wait_value, write_value
from common.handoff.ring import FlagPointers

# Flags are compared cyclically in 32 bits: a value this far ahead is past every wait of the connection, and
# no wait of it comes near to half the circle.
RELEASED_AHEAD = 1 << 30


class StreamFlags:
    """One connection's. `ready` and `done` start at 0."""

    def __init__(self, pointers: FlagPointers, stream: torch.cuda.Stream, side: SideStream) -> None:
        self._pointers = pointers
        self._stream = stream
        self._side = side
        self._latest = 0

    def await_ready(self, sequence: int) -> torch.cuda.Event:
        """See RingFlags. So are the next two."""
        self._latest = sequence
        wait_value(self._pointers.ready, sequence, self._stream)
        return self._mark()

    def write_done(self, sequence: int) -> torch.cuda.Event:
        write_value(self._pointers.done, sequence, self._stream)
        return self._mark()

    def release(self) -> None:
        self._side.write(self._pointers.ready, self._latest + RELEASED_AHEAD)

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event
