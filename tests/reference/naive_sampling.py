"""Sampling written from its definition, one row and one token at a time, in Python's own numbers.

Must not import the code under test.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_MASK = 0xFFFFFFFF


def philox4x32(counter: Sequence[int], key: Sequence[int], rounds: int = 10) -> tuple[int, ...]:
    """Philox4x32 of four counter words and two key words. Source: Salmon et al. 2011, section 5.3."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        left, right = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & _MASK, (left >> 32) ^ c3 ^ k1, left & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, token_id: int) -> float:
    """The noise of one token: -log(-log(1 - u)) for the uniform number u of its Philox word; four
    neighbouring tokens have the four words of one counter."""
    word = philox4x32((token_id // 4, position, 0, 0), (seed & _MASK, seed >> 32))[token_id % 4]
    uniform = min((word + 0.5) / 2**32, 1 - 2**-24)
    return -math.log(-math.log1p(-uniform))


def survivors(
    logits: Sequence[float],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    slack: float = 0.0,
) -> list[int]:
    """Ids that may be sampled, best first. slack moves the two limits on probabilities, so that a test
    can tell a wrong filter from rounding: positive lets more through."""
    largest = max(logits)
    weight = {i: math.exp((x - largest) / temperature) for i, x in enumerate(logits) if x > -math.inf}
    kept = sorted(weight, key=lambda i: (-logits[i], i))
    if min_p > 0:
        kept = [i for i in kept if weight[i] >= min_p * (1 - slack)]
    if top_k > 0:
        kept = kept[:top_k]
    if top_p < 1:
        total = sum(weight[i] for i in kept)
        before, nucleus = 0.0, []
        for i in kept:
            if before / total >= top_p + slack:
                break
            nucleus.append(i)
            before += weight[i]
        kept = nucleus
    return kept
