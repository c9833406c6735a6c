"""What must hold for the fused RMS norm, on any device and element type."""

from __future__ import annotations

import torch

from common.kernels.norm import add_rms_norm
from tests.kernel_checks.closeness import assert_close
from tests.reference.kernels.norm import add_rms_norm as reference

EPS = 1e-6


def check_norm_with_residual_and_capture(
    device: str, dtype: torch.dtype, seed: int, num_rows: int, hidden: int
) -> None:
    """The sum is exact, is captured, and leaves the captured tensor's other columns alone."""
    rng = torch.Generator().manual_seed(seed)
    x, added = (torch.randn(num_rows, hidden, generator=rng).to(device, dtype) for _ in range(2))
    weight = (torch.rand(hidden, generator=rng) + 0.5).to(device, dtype)
    total, wanted = reference(x, added, weight, EPS)
    captured = torch.full((num_rows, 3 * hidden), 77.0, dtype=dtype, device=device)
    out, stream = torch.full_like(x, 77.0), x.clone()
    add_rms_norm(stream, added, weight, out, eps=EPS, captured=captured[:, hidden : 2 * hidden])
    assert torch.equal(stream, total)
    assert_close(out, wanted, dtype)
    assert torch.equal(captured[:, hidden : 2 * hidden], total)
    assert (captured[:, :hidden] == 77.0).all() and (captured[:, 2 * hidden :] == 77.0).all()
    for row in range(num_rows):
        one, alone = slice(row, row + 1), out[row : row + 1].clone().zero_()
        add_rms_norm(x[one].clone(), added[one], weight, alone, eps=EPS)
        assert torch.equal(alone, out[one]), f"row {row} alone"


def check_norm_without_residual(device: str, dtype: torch.dtype, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 100, generator=rng).to(device, dtype)
    weight = torch.rand(100, generator=rng).to(device, dtype)
    out, before = torch.full_like(x, 77.0), x.clone()
    add_rms_norm(x, None, weight, out, eps=EPS)
    assert torch.equal(x, before)
    assert_close(out, reference(x, None, weight, EPS)[1], dtype)
