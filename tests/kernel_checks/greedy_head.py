"""What `greedy_head` must do, on whichever device it is run."""

from __future__ import annotations

import torch

from common.kernels.gemm_plans import GemmPlan
from common.kernels.greedy_head import greedy_head, greedy_head_scratch
from common.kernels.small_gemm import small_gemm
from tests.kernel_checks.small_gemm import gaussian, guarded, tiles, workspace
from tests.reference.kernels import greedy_head as reference


def check_chooses_as_argmax_over_the_logits(
    device: str, dtype: torch.dtype, seed: int, *, pdl: bool = False
) -> None:
    """Also among equal logits, of which coarse inputs make many."""
    rng = torch.Generator().manual_seed(seed)
    plan = GemmPlan(1, tiles(device, dtype))
    for num_rows in (1, 3, 9) if device == "cpu" else (1, 15, 60, 240):
        for vocab_rows, hidden in ((150, 64), (96, 48)) if device == "cpu" else ((5000, 576), (49152, 576)):
            for coarse in (False, True):
                x = gaussian(rng, device, dtype, num_rows, hidden)
                head = gaussian(rng, device, dtype, vocab_rows, hidden)
                if coarse:
                    x, head = x.round(), head.round().clamp(-1, 1)
                logits = torch.empty(num_rows, vocab_rows, dtype=dtype, device=device)
                small_gemm(x, head, logits, workspace(device), plan, pdl=pdl)
                chosen, finite = _greedy(guarded(x), head, plan, pdl)
                assert chosen.tolist() == reference.greedy_head(logits)
                assert finite.all()


def check_a_row_of_nan_gives_a_valid_id_and_says_so(device: str, dtype: torch.dtype, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = gaussian(rng, device, dtype, 3, 64)
    x[1, 5] = float("nan")
    head = gaussian(rng, device, dtype, 70, 64)
    chosen, finite = _greedy(x, head, GemmPlan(1, tiles(device, dtype)), False)
    assert finite.tolist() == [1, 0, 1]
    assert all(0 <= token < 70 for token in chosen.tolist())


def _greedy(
    x: torch.Tensor, head: torch.Tensor, plan: GemmPlan, pdl: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows = x.shape[0]
    scratch = greedy_head_scratch(num_rows, head.shape[0], plan)
    best = torch.full((scratch,), 1 << 62, dtype=torch.int64, device=x.device)
    chosen = torch.full((num_rows,), -7, dtype=torch.int64, device=x.device)
    finite = torch.full((num_rows,), -7, dtype=torch.int32, device=x.device)
    greedy_head(x, head, best, chosen, finite, plan, pdl=pdl)
    return chosen, finite
