"""Rotary position embedding, half-split (neox) style, at absolute positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from common.errors import CheckpointError


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines `[max_positions, head_dim]` (each half repeated), fp32 or the model's type."""

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows for positions `[N]`, shaped `[N, 1, head_dim]` to broadcast over heads."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x `[N, heads, head_dim]` by cos, sin `[N, 1, head_dim]`. Source: Su et al. 2021."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def build_rope_table(
    head_dim: int, max_positions: int, config: dict[str, Any], device: torch.device | str = "cpu"
) -> RopeTable:
    """The table that a checkpoint's config.json asks for.

    Reads `rope_theta` and `rope_scaling`, or `rope_parameters` that holds both. Known scalings:
    default, linear, llama3. Anything else, or no theta at all, is a CheckpointError: guessing costs
    acceptance silently.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        raise CheckpointError("rope_theta", "must be given (top level or in rope_parameters)", given=None)
    kind = parameters.get("rope_type", parameters.get("type", "default"))

    # fp32 from the start: transformers computes the frequencies so, and parity is tested bit for bit
    # at short range.
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if kind == "linear":
        frequencies = frequencies / parameters["factor"]
    elif kind == "llama3":
        frequencies = _llama3_frequencies(frequencies, parameters)
    elif kind != "default":
        raise CheckpointError("rope_scaling.rope_type", "must be one of default, linear, llama3", given=kind)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return RopeTable(angles.cos().to(device), angles.sin().to(device))


def _llama3_frequencies(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths divided by factor, short ones kept, a ramp between."""
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    original_len = parameters["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    keep = ((original_len / wavelengths - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * (1 - keep) + frequencies * keep
