"""When launches are done, and how long the GPU took: three events a launch. On a CPU nothing is timed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from services.target.core.control_buffer import LAUNCHES_IN_FLIGHT_MAX


class GpuTimes(NamedTuple):
    """Seconds on the GPU: of the prompt rows; of the rest, with the download; of both. The uploads and the
    wait for drafts come before."""

    extend_s: float
    verify_s: float
    total_s: float


class LaunchClock:
    """`begin`, `split` and `end` enqueue on the current stream; `wait` is the host's."""

    def __init__(self, cuda: bool) -> None:
        self._events = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(3))
            for _ in range(LAUNCHES_IN_FLIGHT_MAX if cuda else 0)
        ]

    def begin(self, number: int) -> None:
        self._record(number, 0)

    def split(self, number: int) -> None:
        self._record(number, 1)

    def end(self, number: int) -> None:
        self._record(number, 2)

    def wait(self, number: int) -> GpuTimes:
        """Until the launch is done. CUDA's own wait spins without the interpreter lock: a query loop would
        take the lock at each look, and a wait that sleeps wakes some 50 us late, which a step that reads
        its results at once (an inline hand-off) would pay each time."""
        if not self._events:
            return GpuTimes(0.0, 0.0, 0.0)
        begun, split, ended = self._events[number % LAUNCHES_IN_FLIGHT_MAX]
        ended.synchronize()
        extend_ms, verify_ms = begun.elapsed_time(split), split.elapsed_time(ended)
        return GpuTimes(extend_ms / 1e3, verify_ms / 1e3, (extend_ms + verify_ms) / 1e3)

    def _record(self, number: int, which: int) -> None:
        if self._events:
            self._events[number % LAUNCHES_IN_FLIGHT_MAX][which].record()
