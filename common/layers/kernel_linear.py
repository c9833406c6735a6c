"""x · Wᵀ on a GPU: our kernel for few rows, where reading the weight is all that costs, cuBLAS above.

Imports Triton: whatever also runs without it must import this late. Knows weights and rows, not layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.kernels.gemm_plans import GemmPlan, plan_for
from common.kernels.small_gemm import GemmWorkspace, small_gemm

# Up to here our kernel is faster than cuBLAS or within 4 %; at 128 rows it needs 1.5 times as long.
FEW_ROWS_MAX = 64


def launches_may_overlap(device: torch.device) -> bool:
    """Whether kernels on this device take `pdl` (common.kernels.overlap): CUDA from Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


@dataclass(frozen=True)
class GemmScratch:
    """Partial sums of GEMMs whose K is split; one serves all linears of a stream, run one after another."""

    workspace: GemmWorkspace

    @classmethod
    def allocate(
        cls, weights: Sequence[torch.Tensor], *, num_rows_max: int, row_independent: bool
    ) -> GemmScratch:
        """Enough for a KernelLinear over each of the weights `[N, K]`, which lie on one device."""
        num_rows = num_rows_max if row_independent else min(num_rows_max, FEW_ROWS_MAX)
        needs = [_plan(weight).scratch_for(num_rows, weight.shape[0]) for weight in weights]
        num_partials, num_tiles = (max(need) for need in zip(*needs, strict=True))
        return cls(GemmWorkspace.allocate(num_partials, num_tiles, weights[0].device))

    @property
    def num_bytes(self) -> int:
        return self.workspace.partials.nbytes + self.workspace.arrivals.nbytes


class KernelLinear:
    """A weight `[N, K]`, contiguous, that is multiplied with rows of its own type."""

    def __init__(
        self, weight: torch.Tensor, scratch: GemmScratch, *, row_independent: bool, pdl: bool
    ) -> None:
        """row_independent: a row's bits never depend on how many rows share the call; costs up to half as
        much again above 64 rows. pdl: see common.kernels.overlap."""
        assert weight.is_contiguous()
        self._weight = weight
        self._transposed = weight.t()
        self._plan = _plan(weight)
        self._workspace = scratch.workspace
        self._row_independent = row_independent
        self._pdl = pdl

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out = x · weightᵀ: x `[M, K]`, out `[M, N]`, rows may lie apart. Allocates nothing."""
        if self._row_independent or x.shape[0] <= FEW_ROWS_MAX:
            small_gemm(x, self._weight, out, self._workspace, self._plan, pdl=self._pdl)
        else:
            torch.mm(x, self._transposed, out=out)


def _plan(weight: torch.Tensor) -> GemmPlan:
    return plan_for(weight.shape[0], weight.shape[1], weight.element_size())
