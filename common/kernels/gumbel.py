"""Standard Gumbel noise keyed by (seed, position, token id): the words of Philox4x32-10, in registers.

Four neighbouring ids share a hash, each has a word of it; the words are those of
services/target/core/sampling.py bit for bit, the noise is equal up to the rounding of the logarithm.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hash_words(seed, position, fours):
    """The four words, uint32, of counters (fours, position, 0, 0). seed: 64 bits as an int64."""
    zero = fours.to(tl.uint32) * 0
    return tl.philox(seed, fours.to(tl.uint32), zero + position.to(tl.uint32), zero, zero)


@triton.jit
def noise_of_words(words):
    """-log(-log(1 - u)) in fp32 for u = (word + 1/2) / 2^32, at most 1 - 2^-24."""
    # The odd 33-bit integer is rounded once, as the reference's double is.
    uniform = ((words.to(tl.int64) << 1) + 1).to(tl.float32) * (0.5 / 4294967296.0)
    uniform = tl.minimum(uniform, 1.0 - 1.0 / 16777216.0)
    # -log(1 - u): where u is small (the noise is large: these win) 1 - u has lost its digits, and the
    # series to u^8 / 8 is exact to 2^-28.
    series = 1.0 / 7 + uniform * (1.0 / 8)
    series = 1.0 / 6 + uniform * series
    series = 1.0 / 5 + uniform * series
    series = 1.0 / 4 + uniform * series
    series = 1.0 / 3 + uniform * series
    series = 1.0 / 2 + uniform * series
    series = uniform * (1.0 + uniform * series)
    exponential = tl.where(uniform < 0.0625, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def gumbel_noise(seed, position, ids):
    """Noise of single ids, in any order: one hash each."""
    word_0, word_1, word_2, word_3 = hash_words(seed, position, ids >> 2)
    low = tl.where((ids & 1) == 0, word_0, word_1)
    high = tl.where((ids & 1) == 0, word_2, word_3)
    return noise_of_words(tl.where((ids & 2) == 0, low, high))
