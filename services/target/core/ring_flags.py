"""The two flags of one connection, as the target's device uses them: says ready, waits for done.

Knows no ring and no session. The pipelined drafter needs `RingFlags` alone; tests on a CPU have their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

import torch

from common.handoff.flags import FlagPair

# A step's event is asked about until the step after the next has been read.
_EVENTS = 4


class RingFlags(Protocol):
    """One connection's flags; sequences count up."""

    def write_ready(self, sequence: int) -> Callable[[], bool]:
        """Enqueue on the current stream that the states of `sequence` are in the ring. Returns what tells,
        without waiting, whether the stream has come to that point; good for the next 3 calls."""

    def await_done(self, sequence: int) -> Callable[[], bool]:
        """Have the current stream wait for the drafts of `sequence`. Returns what tells, without waiting,
        whether the stream is past that; good for the next 3 calls."""

    def release(self, sequence: int) -> None:
        """Let that wait end although the drafter did not write. From any thread; does not wait."""


class StreamFlags:
    """RingFlags of a device's current stream."""

    def __init__(self, pair: FlagPair, device: torch.device) -> None:
        self._pair = pair
        self._device = device
        self._ready = itertools.cycle([torch.cuda.Event() for _ in range(_EVENTS)])
        self._done = itertools.cycle([torch.cuda.Event() for _ in range(_EVENTS)])

    def write_ready(self, sequence: int) -> Callable[[], bool]:
        """See RingFlags.write_ready."""
        stream = torch.cuda.current_stream(self._device)
        self._pair.ready.enqueue_write(sequence, stream)
        return _mark(next(self._ready), stream)

    def await_done(self, sequence: int) -> Callable[[], bool]:
        """See RingFlags.await_done."""
        stream = torch.cuda.current_stream(self._device)
        self._pair.done.enqueue_wait(sequence, stream)
        return _mark(next(self._done), stream)

    def release(self, sequence: int) -> None:
        """See RingFlags.release."""
        self._pair.done.store(sequence)


def _mark(event: torch.cuda.Event, stream: torch.cuda.Stream) -> Callable[[], bool]:
    event.record(stream)
    return event.query
