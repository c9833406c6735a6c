"""x · Wᵀ in double precision."""

from __future__ import annotations

import torch


def small_gemm(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    product = x.double() @ weight.double().T
    return product if residual is None else product + residual.double()


def swiglu_gemm(x: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = small_gemm(x, gate_up).chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
