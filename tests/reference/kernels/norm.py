"""RMS norm after an addition, as its formula in fp64. Must not import the code under test."""

from __future__ import annotations

import torch


def add_rms_norm(
    x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual stream, rounded to x's type, and its norm in fp64."""
    total = x if added is None else (x.double() + added.double()).to(x.dtype)
    wide = total.double()
    return total, wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
