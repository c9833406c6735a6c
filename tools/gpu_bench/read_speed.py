"""How fast a GPU reads memory when it does nothing else: the denominator of every floor fraction.

A kernel sums what it reads and writes next to nothing. Knows nothing of models.
"""

from __future__ import annotations

import math
import statistics

import torch
import triton
import triton.language as tl

# 66 times an H200's L2, so that caches play no part.
PROBE_BYTES = 4 << 30
_PASSES = 10
# int32 elements that a program sums up in each of its loads, and its warps: 16 bytes a thread and load, or
# several of them. Which is fastest differs by chip, so all are tried.
_SHAPES = ((4096, 4), (4096, 8), (8192, 8), (16384, 16))
_LOADS = 8


@triton.jit
def _sum_chunk(source, sums, BLOCK: tl.constexpr, LOADS: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * (BLOCK * LOADS)
    total = tl.zeros([BLOCK], tl.int32)
    for i in tl.static_range(LOADS):
        total += tl.load(source + first + i * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


def chunk_sums(source: torch.Tensor, block: int, num_warps: int) -> torch.Tensor:
    """Wrapping sums of equal chunks of `source` `[n]` int32: `[n / (8 * block)]` int32; 8 * block divides n.
    """
    num_chunks, left = divmod(source.numel(), block * _LOADS)
    assert left == 0 and num_chunks > 0, f"{source.numel()} elements in blocks of {block}"
    sums = torch.empty(num_chunks, dtype=torch.int32, device=source.device)
    _sum_chunk[(num_chunks,)](source, sums, BLOCK=block, LOADS=_LOADS, num_warps=num_warps)
    return sums


def read_bandwidth_to_host(device: torch.device) -> float:
    """Bytes a second of the fastest pure read found here: the median pass of the best shape. Waits for the
    device; takes some 0.1 s and PROBE_BYTES of its memory for that time."""
    source = torch.zeros(PROBE_BYTES // 4, dtype=torch.int32, device=device)
    best_s = math.inf
    for block, num_warps in _SHAPES:
        chunk_sums(source, block, num_warps)
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(_PASSES + 1)]
        marks[0].record()
        for mark in marks[1:]:
            chunk_sums(source, block, num_warps)
            mark.record()
        torch.cuda.synchronize(device)
        passes_ms = [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]
        best_s = min(best_s, statistics.median(passes_ms) / 1000)
    del source
    torch.cuda.empty_cache()
    return PROBE_BYTES / best_s
