"""The gate kernel in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_checks import swiglu as checks

SEED = 20261204


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inner", [1536, 100])
def test_the_gate_opens_for_the_other_half(dtype: torch.dtype, inner: int) -> None:
    checks.check_swiglu("cpu", dtype, SEED, 3, inner)
