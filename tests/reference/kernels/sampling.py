"""Sampling over whole rows, sorted, in double precision; the noise from its definition."""

from __future__ import annotations

import torch

_WORD = 0xFFFFFFFF


def hash_words(seed: int, position: int, num_counters: int) -> torch.Tensor:
    """Words `[num_counters, 4]` int64 of Philox4x32-10 (Salmon et al. 2011), counters (i, position, 0, 0)."""
    c0 = torch.arange(num_counters)
    c1 = torch.full_like(c0, position)
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        # The low 64 bits of a wrapped int64 product are right.
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (right >> 32 & _WORD) ^ c1 ^ k0, right & _WORD
        c2, c3 = (left >> 32 & _WORD) ^ c3 ^ k1, left & _WORD
        k0, k1 = k0 + 0x9E3779B9 & _WORD, k1 + 0xBB67AE85 & _WORD
    return torch.stack((c0, c1, c2, c3), dim=1)


def gumbel(seed: int, position: int, vocab_rows: int) -> torch.Tensor:
    """Noise `[vocab_rows]` fp64."""
    words = hash_words(seed, position, -(-vocab_rows // 4)).flatten()[:vocab_rows]
    uniform = ((words.double() + 0.5) / 2**32).float().double().clamp(max=1 - 2**-24)
    return -torch.log(-torch.log1p(-uniform))


def noisy_scores(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int,
    position: int, slack: float,
) -> torch.Tensor:  # fmt: skip
    """logits / T + noise `[V]` fp64 of a row, -inf where a filter drops the token. slack moves the limits on
    probabilities, so that rounding can be told from error: positive keeps more."""
    scaled = (logits.float().cpu() / temperature).double()
    order = torch.sort(scaled, descending=True, stable=True).indices
    order = order[scaled[order] > float("-inf")]
    if min_p > 0:
        order = order[torch.exp(scaled[order] - scaled.max()) >= min_p * (1 - slack)]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        share = torch.softmax(scaled[order], dim=0)
        order = order[share.cumsum(0) - share < top_p + slack]
    scores = torch.full_like(scaled, float("-inf"))
    scores[order] = (scaled + gumbel(seed, position, len(scaled)))[order]
    return scores
