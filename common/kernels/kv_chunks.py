"""Where a sequence's keys are cut into chunks, and how chunks' sums are added.

The cuts depend on positions alone, so a row's bits do not depend on what shares its launch. The length of
chunks doubles after every CHUNKS_PER_LEVEL: partial sums of a 40 k context stay below 50 a row, where equal
chunks of 128 would be 320, with half as many bytes of partial sums as of keys. (Equal chunks cost 8 sequences
of 2048 keys and 16 rows 58 us with 128 keys and 38 us with 256 on an H200; one sequence of 512 keys, whose
time is the walk over one chunk, 10 us with 128 and 13 us with 256.)
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNKS_PER_LEVEL: tl.constexpr = tl.constexpr(8)
# Enough for 2^20 keys when the first chunk has 128.
LEVELS_MAX: tl.constexpr = tl.constexpr(10)


def num_chunks(num_keys: int, first_chunk: int) -> int:
    """Chunks that num_keys keys are cut into; first_chunk: keys of a chunk of the first level."""
    per_level = CHUNKS_PER_LEVEL.value
    level = (max(num_keys - 1, 0) // (first_chunk * per_level) + 1).bit_length() - 1
    past = num_keys - first_chunk * per_level * ((1 << level) - 1)
    return per_level * level + -(-past // (first_chunk << level))


@triton.jit
def _level_start(level, FIRST_CHUNK: tl.constexpr):
    """First position of a level."""
    return FIRST_CHUNK * CHUNKS_PER_LEVEL * ((1 << level) - 1)


@triton.jit
def chunk_of(position, FIRST_CHUNK: tl.constexpr):
    """Number of the chunk that holds a position."""
    units = position // (FIRST_CHUNK * CHUNKS_PER_LEVEL) + 1
    level = 0
    for i in tl.static_range(1, LEVELS_MAX + 1):
        level += (units >= (1 << i)).to(tl.int32)
    past = position - _level_start(level, FIRST_CHUNK)
    # A shift: a division by what is known at run time only takes a hundred cycles.
    return CHUNKS_PER_LEVEL * level + (past // FIRST_CHUNK >> level)


@triton.jit
def chunk_start(chunk, FIRST_CHUNK: tl.constexpr):
    """First position of a chunk."""
    level = chunk // CHUNKS_PER_LEVEL
    return _level_start(level, FIRST_CHUNK) + (chunk % CHUNKS_PER_LEVEL) * (FIRST_CHUNK << level)


@triton.jit
def whole_power(exponent):
    """2^exponent for whole exponents ≤ 0, exactly; 0 below 2^-126 (and at -inf)."""
    biased = tl.maximum(exponent, -127.0).to(tl.int32) + 127
    return (biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def add_chunk(peak, total, mixed, chunk_peak, chunk_total, chunk_mixed):
    """The sums of all chunks so far, and the next chunk's: whole peaks `[rows]`, totals `[rows]`, weighted
    values `[rows, head_dim]`. Rescaling by whole powers is exact, so only the order of calls counts."""
    new_peak = tl.maximum(peak, chunk_peak)
    # A row that has seen no key yet: -inf minus -inf would be NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    fade, chunk_fade = whole_power(peak - base), whole_power(chunk_peak - base)
    total = total * fade + chunk_total * chunk_fade
    mixed = mixed * fade[:, None] + chunk_mixed * chunk_fade[:, None]
    return new_peak, total, mixed
