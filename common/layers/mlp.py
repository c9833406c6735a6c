"""Gated feed-forward block."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from common.layers.linear import Weight, project


def swiglu(x: torch.Tensor, gate_up: Weight, down: Weight) -> torch.Tensor:
    """down · (silu(gate · x) ⊙ (up · x)). x `[N, H]`, gate_up `[2I, H]` (gate first), down `[H, I]`."""
    gate, up = project(x, gate_up).chunk(2, dim=-1)
    return project(silu(gate) * up, down)
