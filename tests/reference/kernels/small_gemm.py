"""x · Wᵀ in double precision."""

from __future__ import annotations

import torch


def small_gemm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return product if residual is None else product + residual.double()
