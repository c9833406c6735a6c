"""Storing K/V in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_checks import kv_store as checks

SEED = 20261202
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_a_fused_projection_is_split_normed_rotated_and_stored(dtype: torch.dtype, normed: bool) -> None:
    for heads in ((9, 3, 64), (4, 4, 16), (8, 1, 32)):
        checks.check_qkv_is_normed_rotated_and_stored("cpu", dtype, SEED, heads, normed=normed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_move_into_the_key(dtype: torch.dtype) -> None:
    checks.check_values_that_are_not_finite_move_into_the_key("cpu", dtype, SEED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_context_of_all_draft_layers_is_stored_by_one_launch(dtype: torch.dtype) -> None:
    checks.check_context_of_all_layers_is_stored_by_one_launch("cpu", dtype, SEED, 3, 3, 32)
    checks.check_context_of_all_layers_is_stored_by_one_launch("cpu", dtype, SEED, 1, 2, 16)
