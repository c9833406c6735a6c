"""Attention written as its formula: one head and one row at a time, fp64, no paging and no batch.

Must not import the code under test.
"""

from __future__ import annotations

import torch


def naive_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    *,
    causal: bool = True,
    window: int | None = None,
) -> torch.Tensor:
    """The last rows of a sequence over all of its keys.

    q `[rows, heads, dim]`, k and v `[keys, kv_heads, dim]`; the rows are the last of the keys. A head
    reads the K/V head `head * kv_heads // heads`. Returns `[rows, heads * dim]` fp64.
    """
    num_rows, num_heads, _ = q.shape
    num_keys, num_kv_heads, _ = k.shape
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row in range(num_rows):
        position = num_keys - num_rows + row
        first = 0 if window is None else max(0, position - window + 1)
        last = position if causal else num_keys - 1
        for head in range(num_heads):
            source = head * num_kv_heads // num_heads
            keys = k[first : last + 1, source].double()
            weights = torch.softmax(keys @ q[row, head].double() * scale, dim=0)
            out[row, head] = weights @ v[first : last + 1, source].double()
    return out.flatten(1)
