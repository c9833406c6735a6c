"""What must hold for the gate kernel, on any device and element type."""

from __future__ import annotations

import torch

from common.kernels.swiglu import swiglu
from tests.kernel_checks.closeness import assert_close
from tests.reference.kernels.swiglu import swiglu as reference


def check_swiglu(device: str, dtype: torch.dtype, seed: int, num_rows: int, inner: int) -> None:
    """Also far from zero, where exp overflows: silu(-200) is 0 and silu(200) is 200."""
    rng = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(num_rows, 2 * inner, generator=rng).to(device, dtype)
    gate_up[0, 0], gate_up[0, 1] = -200.0, 200.0
    out = torch.full((num_rows, inner), 77.0, dtype=dtype, device=device)
    swiglu(gate_up, out)
    assert_close(out, reference(gate_up), dtype)
    for row in range(num_rows):
        alone = torch.full((1, inner), 77.0, dtype=dtype, device=device)
        swiglu(gate_up[row : row + 1], alone)
        assert torch.equal(alone, out[row : row + 1]), f"row {row} alone"
