"""The draft by kernels, in Triton's interpreter; tests/gpu has a real width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.embedding import SharedWeights, load_shared_weights
from common.layers.kernel_greedy import GreedyHead
from services.drafter.model.dflash_weights import Draft
from tests.builders_drafter import build_draft_pair
from tests.kernel_checks import kernel_dflash as checks

SEED = 20261211
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "a window, causal inside the block": SLIDING,
    "a window, bidirectional inside the block": SLIDING | {"is_causal": False},
}


def load(directory: Path, **draft: Any) -> tuple[Draft, SharedWeights]:
    target_dir, draft_dir = build_draft_pair(directory, SEED, **draft)
    shared, contract = load_shared_weights(target_dir, torch.float32)
    return Draft.load(draft_dir, shared, contract), shared


@pytest.mark.parametrize("variant", VARIANTS)
def test_contexts_and_drafts_are_those_of_torch(variant: str, tmp_path: Path) -> None:
    draft, shared = load(tmp_path, **VARIANTS[variant])
    checks.check_contexts_and_drafts_equal_torch(draft, shared, SEED, contexts=(9, 4), page_size=4)


def test_a_captured_row_that_is_not_finite_is_flagged_alone(tmp_path: Path) -> None:
    checks.check_a_wild_row_is_flagged_alone(*load(tmp_path), SEED)


@pytest.mark.parametrize("row_independent", [False, True])
@pytest.mark.parametrize("num_rows", [1, 128, 129, 520])
def test_any_number_of_rows_gets_the_lowest_id_of_the_highest_logit(
    num_rows: int, row_independent: bool
) -> None:
    # Whole numbers: products are exact, and many logits are equal.
    generator = torch.Generator().manual_seed(SEED)
    x, lm_head = (torch.randint(-3, 4, (n, 16), generator=generator).float() for n in (num_rows, 20))
    head = GreedyHead(lm_head, num_rows_max=520, row_independent=row_independent, pdl=False)
    chosen = torch.full((num_rows,), -1, dtype=torch.int32)
    head(x, chosen)
    logits = x @ lm_head.T
    assert chosen.tolist() == [row.index(max(row)) for row in logits.tolist()]
