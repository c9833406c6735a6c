"""Attention over paged K/V as its formula, one sequence and one K/V head at a time, in fp64.

Must not import the code under test.
"""

from __future__ import annotations

import torch


def slots_of(pages: torch.Tensor, page_size: int, num_keys: int) -> torch.Tensor:
    """Slots of the first num_keys positions of a sequence with these pages."""
    keys = torch.arange(num_keys, device=pages.device)
    return pages[keys // page_size].long() * page_size + keys % page_size


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: list[int],
    num_rows: list[int],
    *,
    page_size: int,
    scale: float,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """q `[sum of num_rows, heads, dim]`; rows of sequences without keys come out as NaN. Returns fp64."""
    out = torch.full(q.shape, float("nan"), dtype=torch.float64, device=q.device)
    num_heads, num_kv_heads = q.shape[1], k_cache.shape[1]
    group = num_heads // num_kv_heads
    row_start = 0
    for sequence, (kv_len, rows) in enumerate(zip(kv_lens, num_rows, strict=True)):
        mine = slice(row_start, row_start + rows)
        row_start += rows
        if kv_len == 0:
            continue
        slots = slots_of(page_table[sequence], page_size, kv_len)
        positions = torch.arange(kv_len - rows, kv_len, device=q.device)[:, None]
        keys = torch.arange(kv_len, device=q.device)[None, :]
        hidden = (keys > positions) if causal else torch.zeros_like(keys > positions)
        if window is not None:
            hidden = hidden | (positions - keys >= window)
        for head in range(num_kv_heads):
            k, v = k_cache[slots, head].double(), v_cache[slots, head].double()
            heads = slice(head * group, (head + 1) * group)
            scores = torch.einsum("rgd,kd->grk", q[mine, heads].double(), k) * scale
            weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
            out[mine, heads] = torch.einsum("grk,kd->rgd", weights, v)
    return out
