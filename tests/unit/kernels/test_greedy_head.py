"""The greedy head, in Triton's interpreter; tests/gpu runs the same checks compiled."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_checks import greedy_head as checks

SEED = 20261202


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ids_are_those_of_argmax_over_the_logits_also_among_equals(dtype: torch.dtype) -> None:
    checks.check_chooses_as_argmax_over_the_logits("cpu", dtype, SEED)


def test_a_row_of_nan_gives_an_id_of_the_vocabulary_and_is_named() -> None:
    checks.check_a_row_of_nan_gives_a_valid_id_and_says_so("cpu", torch.float32, SEED)
