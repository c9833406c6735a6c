"""CUDA graphs by key: warm up, capture, replay. On a CPU a body simply runs.

Knows bodies and keys, nothing of what a body computes. A body works on buffers that were allocated, at
their largest size, before the first capture: a buffer that grows later would leave earlier graphs with
memory that is somebody else's by then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence

import torch

# Name of a region and its bytes.
MemoryReport = list[tuple[str, int]]


class Graphs:
    """The graphs of one engine; they share a memory pool, since they are replayed one after another."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        """stream: where bodies are warmed up, captured and replayed; None on a CPU."""
        assert (stream is None) == (device.type != "cuda"), f"{device} with stream {stream}"
        self._stream = stream
        self._pool = None if stream is None else torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._bodies: dict[Hashable, Callable[[], None]] = {}

    def capture(self, key: Hashable, body: Callable[[], None]) -> None:
        """Run `body` once, which compiles its kernels, and record it. It must be safe on the inputs that lie
        in its buffers now. Waits for the device. On a CPU there is nothing to prepare."""
        assert key not in self, f"{key} was captured before"
        if self._stream is None:
            self._bodies[key] = body
            return
        with torch.cuda.stream(self._stream):
            body()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use CUDA meanwhile: only this one's calls are checked.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            body()
        self._graphs[key] = graph

    def capture_all(
        self,
        bodies: Iterable[tuple[Hashable, Callable[[], None]]],
        on_captured: Callable[[int, int], None],
    ) -> None:
        """Capture in the order given, which should be from the largest down: what a body allocates for
        itself then fits what the pool has already. on_captured hears (done, total) after each."""
        listed = list(bodies)
        for done, (key, body) in enumerate(listed, 1):
            self.capture(key, body)
            on_captured(done, len(listed))

    def replay(self, key: Hashable) -> None:
        """Enqueue the graph on the current stream, which must be the one it was captured on; on a CPU, run
        the body."""
        if self._stream is None:
            self._bodies[key]()
        else:
            self._graphs[key].replay()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs or key in self._bodies


def buckets_up_to(maximum: int) -> list[int]:
    """Sizes that are captured: 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96 … ending with maximum.

    Two a doubling from 8 on: less than a third of the rows is padding above 8, and 256 needs 14 graphs.
    """
    assert maximum >= 1, f"{maximum} rows"
    sizes, power = [1, 2, 4], 8
    while power < maximum:
        sizes += [power, power * 3 // 2]
        power *= 2
    return [size for size in sizes if size < maximum] + [maximum]


def bucket_for(buckets: Sequence[int], n: int) -> int:
    """The smallest bucket that holds n; buckets rise."""
    assert n <= buckets[-1], f"{n} is above the largest bucket {buckets[-1]}"
    return buckets[bisect_left(buckets, n)]
