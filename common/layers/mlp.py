"""Gated feed-forward block."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, silu


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down · (silu(gate · x) ⊙ (up · x)). x `[N, H]`, gate_up `[2I, H]` (gate first), down `[H, I]`."""
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(silu(gate) * up, down)
