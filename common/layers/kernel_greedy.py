"""The token of the highest logit for each row: without logits for few rows, from cuBLAS' logits above.

Imports Triton: whatever also runs without it must import this late. Knows rows and lm_head, not drafts.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from common.kernels.gemm_plans import plan_for
from common.kernels.greedy_head import greedy_head, greedy_head_scratch

# With Qwen3-8B's lm_head the kernel takes 299 us for 60 rows where logits and argmax take 328, and 525
# against 460 for 240.
_FEW_ROWS_MAX = 128
# Rows whose logits exist at once: 156 MB of bf16 for Qwen3's vocabulary. Arithmetic outweighs reading lm_head
# again for the next ones.
_LOGIT_ROWS = 512


class GreedyHead:
    """argmax of x · lm_headᵀ, ties to the lowest id. Used from one stream."""

    def __init__(
        self, lm_head: torch.Tensor, *, num_rows_max: int, row_independent: bool, pdl: bool
    ) -> None:
        """lm_head `[V, H]`, contiguous. row_independent, pdl: see KernelLinear."""
        self._lm_head = lm_head
        self._transposed = lm_head.t()
        self._pdl = pdl
        # The head keeps a tile's best only, so K is never split.
        self._plan = replace(plan_for(lm_head.shape[0], lm_head.shape[1], lm_head.element_size()), split=1)
        self._few_rows_max = num_rows_max if row_independent else min(num_rows_max, _FEW_ROWS_MAX)
        device, vocab_rows = lm_head.device, lm_head.shape[0]
        scratch = greedy_head_scratch(self._few_rows_max, vocab_rows, self._plan)
        self._best = torch.empty(scratch, dtype=torch.int64, device=device)
        self._finite = torch.empty(self._few_rows_max, dtype=torch.int32, device=device)
        logit_rows = min(_LOGIT_ROWS, num_rows_max) if num_rows_max > self._few_rows_max else 0
        self._logits = torch.empty(logit_rows, vocab_rows, dtype=lm_head.dtype, device=device)
        self._chosen = torch.empty(logit_rows, dtype=torch.int64, device=device)

    def __call__(self, x: torch.Tensor, out_ids: torch.Tensor) -> None:
        """x `[M, H]` normed rows, out_ids `[M]` int32: in [0, V), whatever x holds. Allocates nothing."""
        num_rows = x.shape[0]
        if num_rows <= self._few_rows_max:
            greedy_head(
                x, self._lm_head, self._best, out_ids, self._finite[:num_rows], self._plan, pdl=self._pdl
            )
            return
        for start in range(0, num_rows, self._logits.shape[0]):
            rows = slice(start, min(start + self._logits.shape[0], num_rows))
            logits, chosen = (t[: rows.stop - start] for t in (self._logits, self._chosen))
            torch.mm(x[rows], self._transposed, out=logits)
            torch.argmax(logits, dim=-1, out=chosen)
            out_ids[rows].copy_(chosen)
