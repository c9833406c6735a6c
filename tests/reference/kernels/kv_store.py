"""Norm, rotation and storing of K/V, written head by head in fp64.

Must not import the code under test.
"""

from __future__ import annotations

import torch


def norm_and_rotate(
    heads: torch.Tensor, weight: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """heads `[N, heads, dim]`, cos and sin `[N, dim]` of the rows' positions. Returns fp64."""
    x = heads.double()
    if weight is not None:
        x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.double()[:, None] + turned * sin.double()[:, None]


def split_qkv(
    qkv: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q `[N, num_heads, head_dim]`, k and v `[N, num_kv_heads, head_dim]` of a fused projection."""
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    return (
        heads[:, :num_heads],
        heads[:, num_heads : num_heads + num_kv_heads],
        heads[:, num_heads + num_kv_heads :],
    )
