"""Choosing tokens from logits, with noise that depends on (seed, position, token id) alone.

Because the noise is keyed, a request gives the same tokens however its positions are cut into
steps: alone or in a batch, drafted or plain, before or after a preemption. Sampling is
argmax(logits / T + Gumbel) over the tokens that the filters keep, which draws from their softmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from services.target.core.request import SamplingParams

# Philox4x32-10, Salmon et al. 2011.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF

# Gumbel noise below is within (-2.9, 22.9): a token whose scaled logit is further than this under
# the largest one can never win, so it needs no noise.
_NOISE_SPAN = 26.0
# How far under the largest logit top-p looks, in turn, until what it sees holds the mass it wants: a
# chat model's 0.95 lies within the first, and sorting the whole vocabulary of 49,152 takes 15 ms.
_NUCLEUS_REACHES = (8.0, 16.0, 32.0, math.inf)


def choose_tokens(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> torch.Tensor:
    """One token for each row: logits `[R, V]` fp32, positions of the tokens to choose. Returns `[R]` int64.

    A row's highest logit must be finite; others may be -inf and are then never chosen.
    Greedy rows (temperature 0) take the highest logit, the lowest id among equals.
    """
    chosen = logits.argmax(dim=-1)
    for row, (p, position) in enumerate(zip(params, positions, strict=True)):
        if p.temperature > 0:
            chosen[row] = _sample(logits[row], p, position)
    return chosen


def _sample(logits: torch.Tensor, p: SamplingParams, position: int) -> torch.Tensor:
    ids, scaled = surviving_tokens(logits, p)
    return ids[(scaled + gumbel_noise(p.seed, position, ids, len(logits))).argmax()]


def surviving_tokens(logits: torch.Tensor, p: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids `[C]` that may be sampled and their logits / T `[C]`; order: min-p, top-k, top-p.

    min-p keeps tokens of at least min_p times the largest probability; top-p keeps a token while the
    mass before it, among those left, is below top_p. At least one token stays.
    """
    scaled = logits / p.temperature
    ids = torch.arange(len(scaled), device=scaled.device)
    unsorted = p.top_k == 0 and p.top_p >= 1
    reach = _NOISE_SPAN if unsorted else math.inf
    if p.min_p > 0:
        reach = min(reach, -math.log(p.min_p))
    if reach < math.inf:
        ids = (scaled >= scaled.max() - reach).nonzero().squeeze(-1)
        scaled = scaled[ids]
    if p.top_k > 0:
        places = _highest(scaled, p.top_k)
        ids, scaled = ids[places], scaled[places]
    if p.top_p < 1:
        places = _nucleus(scaled, p.top_p)
        ids, scaled = ids[places], scaled[places]
    return ids, scaled


def _nucleus(scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    """Places `[C]` in scaled `[N]` of the fewest highest values that have together a mass of top_p."""
    total, largest = torch.logsumexp(scaled, dim=-1), scaled.max()
    for reach in _NUCLEUS_REACHES:
        places = _sorted(scaled, largest - reach)
        mass = torch.exp(scaled[places] - total).double().cumsum(-1)
        if mass[-1] >= top_p:
            break
    before = torch.cat((mass.new_zeros(1), mass[:-1]))
    return places[before < top_p]


def _highest(scaled: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the `count` highest values, as `_sorted` orders them."""
    # Everything equal to the last one is sorted, so that which of them stay is decided by place.
    return _sorted(scaled, torch.topk(scaled, min(count, len(scaled))).values[-1])[:count]


def _sorted(scaled: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    """Places of the values from `least` up in falling order, lower places first among equals; none at
    -inf."""
    places = ((scaled >= least) & (scaled > float("-inf"))).nonzero().squeeze(-1)
    return places[torch.sort(scaled[places], descending=True, stable=True).indices]


def gumbel_noise(seed: int, position: int, ids: torch.Tensor, vocab_rows: int) -> torch.Tensor:
    """Standard Gumbel noise `[C]` fp32 for token ids `[C]` below vocab_rows, a pure function of seed,
    position and id.

    Four neighbouring ids share a hash: each has a word of it.
    """
    if len(ids) * 4 > vocab_rows:
        # Most of the vocabulary: 1.4 ms for 49,152 rows, where a hash an id takes 4.
        every = torch.arange(-(-vocab_rows // 4), device=ids.device)
        words = torch.stack(philox(seed, every, position), dim=1).flatten()[ids]
    else:
        words = torch.stack(philox(seed, ids >> 2, position)).gather(0, (ids & 3).unsqueeze(0)).squeeze(0)
    # In (0, 1): never 0, and at most 1 - 2^-24, the last fp32 before 1.
    uniform = ((words.double() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).float()
    return -torch.log(-torch.log1p(-uniform))


def philox(seed: int, counter_0: torch.Tensor, counter_1: int) -> tuple[torch.Tensor, ...]:
    """The four words of Philox4x32-10 for counters (counter_0, counter_1, 0, 0): each `[C]` int64, below
    2^32.

    seed is 64 bits; counter_0 `[C]` int64 and counter_1 must be below 2^32.
    """
    key_0, key_1 = seed & _WORD, seed >> 32 & _WORD
    c0, c1 = counter_0, torch.full_like(counter_0, counter_1)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        # int64 products wrap, but their low 64 bits are right, and so are both halves.
        product_0, product_1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high_0, high_1 = product_0 >> 32 & _WORD, product_1 >> 32 & _WORD
        c0, c1, c2, c3 = high_1 ^ c1 ^ key_0, product_1 & _WORD, high_0 ^ c3 ^ key_1, product_0 & _WORD
        key_0, key_1 = key_0 + _WEYL[0] & _WORD, key_1 + _WEYL[1] & _WORD
    return c0, c1, c2, c3
