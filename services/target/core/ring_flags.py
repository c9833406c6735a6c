"""The two flags of one connection, as the target's device uses them: says ready, waits for done.

Knows no ring and no session. The pipelined drafter needs `RingFlags` alone; tests on a CPU have their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import torch

from common.handoff.flags import SideStream, wait_value, write_value
from common.handoff.ring import FlagPointers

# A step's event is asked about until the step after the next has been read.
_EVENTS = 4


class RingFlags(Protocol):
    """One connection's flags; sequences count up."""

    def write_ready(self, sequence: int) -> Callable[[], bool]:
        """Enqueue on the current stream that the states of `sequence` are in the ring. Returns what tells,
        without waiting, whether the stream has come to that point; good for the next 3 calls."""

    def await_done(self, sequence: int) -> None:
        """Have the current stream wait for the drafts of `sequence`."""

    def release(self, sequence: int) -> None:
        """Let that wait end although the drafter did not write. From any thread; does not wait."""


class StreamFlags:
    """RingFlags in GPU memory."""

    def __init__(self, pointers: FlagPointers, device: torch.device, side: SideStream) -> None:
        self._pointers = pointers
        self._device = device
        self._side = side
        self._events = itertools.cycle([torch.cuda.Event() for _ in range(_EVENTS)])

    def write_ready(self, sequence: int) -> Callable[[], bool]:
        """See RingFlags.write_ready."""
        stream = torch.cuda.current_stream(self._device)
        write_value(self._pointers.ready, sequence, stream)
        event = next(self._events)
        event.record(stream)
        return event.query

    def await_done(self, sequence: int) -> None:
        """See RingFlags.await_done."""
        wait_value(self._pointers.done, sequence, torch.cuda.current_stream(self._device))

    def release(self, sequence: int) -> None:
        """See RingFlags.release."""
        self._side.write(self._pointers.done, sequence)
