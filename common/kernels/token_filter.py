"""Which tokens of a row top-k and top-p keep, found by halving: no sort, whatever the order of the tokens.

Tokens come from a row of logits or from a list of (logit, id). They are ordered by logit, lower id first
among equals. Masses are integers, so sums are exact and the same in any order. min-p is a bound on how far
a token lies under the best, and is applied wherever tokens are read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.kernels.choice import NO_CHOICE, order_key, pack_choice
from common.kernels.gumbel import gumbel_noise

# The best token's mass. 2^40 of them fit an int64 for 2^23 tokens.
_MASS_ONE = tl.constexpr(float(1 << 40))


@triton.jit
def mass(below):
    """int64 mass of a token that lies `below` under the best in logits / T."""
    return (tl.exp(-below) * _MASS_ONE).to(tl.int64)


@triton.jit
def read_tokens(
    source, source_ids, begin, count, largest, inverse_t, reach,
    FROM_ROW: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """TILE tokens: keys (int32, ordered as logits), logits, how far under the best, ids, kept by min-p.

    SHIFT: low bits of an fp32 logit that its type leaves empty: the keys are that much denser.
    """
    place = begin + tl.arange(0, TILE)
    logits = tl.load(source + place, mask=place < count, other=float("-inf")).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("-inf"))
    if FROM_ROW:
        ids = place
    else:
        ids = tl.load(source_ids + place, mask=place < count, other=0)
    below = (largest - logits) * inverse_t
    kept = (below <= reach) & (logits > float("-inf"))
    return order_key(logits) >> SHIFT, logits, below, ids, kept


@triton.jit
def count_from(
    source, source_ids, count, largest, inverse_t, reach, key,
    FROM_ROW: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Number of tokens of this key or a higher one."""
    number = tl.zeros([TILE], tl.int32)
    for begin in range(0, count, TILE):
        keys, logits, below, ids, kept = read_tokens(
            source, source_ids, begin, count, largest, inverse_t, reach, FROM_ROW, SHIFT, TILE
        )
        number += (kept & (keys >= key)).to(tl.int32)
    return tl.sum(number, axis=0)


@triton.jit
def count_ties(
    source, source_ids, count, largest, inverse_t, reach, key, last_id,
    FROM_ROW: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Number of tokens of this very key and an id up to last_id."""
    number = tl.zeros([TILE], tl.int32)
    for begin in range(0, count, TILE):
        keys, logits, below, ids, kept = read_tokens(
            source, source_ids, begin, count, largest, inverse_t, reach, FROM_ROW, SHIFT, TILE
        )
        number += (kept & (keys == key) & (ids <= last_id)).to(tl.int32)
    return tl.sum(number, axis=0)


@triton.jit
def mass_from(
    source, source_ids, count, largest, inverse_t, reach, key, cut_key, cut_id,
    FROM_ROW: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Mass of the tokens of this key or a higher one, less those cut: of a key under cut_key, or of cut_key
    and an id above cut_id."""
    total = tl.zeros([TILE], tl.int64)
    for begin in range(0, count, TILE):
        keys, logits, below, ids, kept = read_tokens(
            source, source_ids, begin, count, largest, inverse_t, reach, FROM_ROW, SHIFT, TILE
        )
        kept = kept & (keys >= key) & ((keys > cut_key) | ((keys == cut_key) & (ids <= cut_id)))
        total += tl.where(kept, mass(below), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _last_tie(
    source, source_ids, count, largest, inverse_t, reach, key, num_wanted, vocab_rows,
    FROM_ROW: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The lowest id up to which num_wanted tokens have this key."""
    low = tl.zeros([], tl.int32) - 1
    high = tl.zeros([], tl.int32) + vocab_rows - 1
    while high - low > 1:
        middle = (low + high) // 2
        number = count_ties(
            source, source_ids, count, largest, inverse_t, reach, key, middle, FROM_ROW, SHIFT, TILE
        )
        if number >= num_wanted:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def filter_and_choose(
    source, source_ids, count, largest, temperature, reach, total_mass, top_k, top_p, seed, position,
    vocab_rows, FROM_ROW: tl.constexpr, SHIFT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Packed choice of the highest logit / T + noise among what top-k, then top-p keep of count tokens.

    total_mass: of all that min-p keeps, for when the tokens are only the best of them and top-k is off.
    """
    inverse_t = 1.0 / temperature
    highest = (order_key(largest) >> SHIFT).to(tl.int64)
    # Nothing is cut below the lowest key there is.
    lowest_keys = tl.zeros([TILE], tl.int32) + highest.to(tl.int32)
    number = tl.zeros([TILE], tl.int32)
    for begin in range(0, count, TILE):
        keys, logits, below, ids, kept = read_tokens(
            source, source_ids, begin, count, largest, inverse_t, reach, FROM_ROW, SHIFT, TILE
        )
        lowest_keys = tl.minimum(lowest_keys, tl.where(kept, keys, highest.to(tl.int32)))
        number += kept.to(tl.int32)
    lowest = tl.min(lowest_keys, axis=0).to(tl.int64)
    cut_key = lowest.to(tl.int32)
    cut_id = tl.zeros([], tl.int32) + vocab_rows

    num_kept = tl.sum(number, axis=0)
    if (top_k > 0) & (num_kept > top_k):
        # The highest key that top_k tokens reach; [low, high) are left.
        low, high = lowest, highest + 1
        num_low, num_above = num_kept, tl.zeros([], tl.int32)
        while high - low > 1:
            middle = (low + high) // 2
            num_from = count_from(
                source, source_ids, count, largest, inverse_t, reach, middle.to(tl.int32),
                FROM_ROW, SHIFT, TILE,
            )  # fmt: skip
            if num_from >= top_k:
                low, num_low = middle, num_from
            else:
                high, num_above = middle, num_from
        cut_key = low.to(tl.int32)
        if num_low > top_k:
            cut_id = _last_tie(
                source, source_ids, count, largest, inverse_t, reach, cut_key, top_k - num_above, vocab_rows,
                FROM_ROW, SHIFT, TILE,
            )  # fmt: skip

    if top_p < 1.0:
        mass_low = mass_from(
            source, source_ids, count, largest, inverse_t, reach, cut_key, cut_key, cut_id,
            FROM_ROW, SHIFT, TILE,
        )  # fmt: skip
        exact = tl.where(top_k > 0, mass_low, total_mass).to(tl.float64) * top_p.to(tl.float64)
        wanted = exact.to(tl.int64)
        wanted = tl.maximum(wanted + (wanted.to(tl.float64) < exact).to(tl.int64), 1)
        # The highest key from which on there is the wanted mass.
        low, high = cut_key.to(tl.int64), highest + 1
        mass_above = tl.zeros([], tl.int64)
        while high - low > 1:
            middle = (low + high) // 2
            found = mass_from(
                source, source_ids, count, largest, inverse_t, reach, middle.to(tl.int32), cut_key, cut_id,
                FROM_ROW, SHIFT, TILE,
            )  # fmt: skip
            if found >= wanted:
                low, mass_low = middle, found
            else:
                high, mass_above = middle, found
        last_key = low.to(tl.int32)
        # Tokens of one key have one mass; as many stay as begin before the wanted mass is there.
        last_id = tl.where(last_key == cut_key, cut_id, vocab_rows)
        num_ties = count_ties(
            source, source_ids, count, largest, inverse_t, reach, last_key, last_id, FROM_ROW, SHIFT, TILE
        )
        each = tl.maximum((mass_low - mass_above) // tl.maximum(num_ties, 1), 1)
        num_wanted = (wanted - mass_above + each - 1) // each
        if num_wanted < num_ties:
            last_id = _last_tie(
                source, source_ids, count, largest, inverse_t, reach, last_key, num_wanted.to(tl.int32),
                vocab_rows, FROM_ROW, SHIFT, TILE,
            )  # fmt: skip
        cut_key, cut_id = last_key, last_id

    winner = tl.full([TILE], NO_CHOICE, tl.int64)
    for begin in range(0, count, TILE):
        keys, logits, below, ids, kept = read_tokens(
            source, source_ids, begin, count, largest, inverse_t, reach, FROM_ROW, SHIFT, TILE
        )
        kept = kept & ((keys > cut_key) | ((keys == cut_key) & (ids <= cut_id)))
        noisy = scale(logits, temperature) + gumbel_noise(seed, position, ids)
        winner = tl.maximum(winner, tl.where(kept, pack_choice(order_key(noisy), ids), NO_CHOICE))
    return tl.max(winner, axis=0)


@triton.jit
def scale(logits, temperature):
    """logits / T, rounded as division is."""
    return tl.div_rn(logits, tl.zeros_like(logits) + temperature)
