"""The fused RMS norm in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_checks import norm as checks

SEED = 20261203
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [576, 64, 1000])
def test_the_residual_is_added_normed_and_captured(dtype: torch.dtype, hidden: int) -> None:
    checks.check_norm_with_residual_and_capture("cpu", dtype, SEED, 3, hidden)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_residual_the_input_stays_as_it_is(dtype: torch.dtype) -> None:
    checks.check_norm_without_residual("cpu", dtype, SEED)
