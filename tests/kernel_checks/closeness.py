"""How near a kernel must come to its fp64 reference."""

from __future__ import annotations

import torch

# Of the norm: fp32 arithmetic stays far under its bound; a 16-bit result is rounded once or twice.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}


def assert_close(got: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """‖got − wanted‖ ≤ tolerance · ‖wanted‖; NaN never passes."""
    wanted = wanted.double()
    error = float((got.double() - wanted).norm() / wanted.norm())
    assert error <= TOLERANCES[dtype], f"relative error {error:.2e}, allowed {TOLERANCES[dtype]:.0e}"
