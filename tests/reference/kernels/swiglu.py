"""The gate of a feed-forward block, as its formula in fp64. Must not import the code under test."""

from __future__ import annotations

import torch


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up
