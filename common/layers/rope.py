"""Rotary position embedding, half-split (neox) style, at absolute positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from common import limits
from common.errors import CheckpointError
from common.weights import int_field, number_field

# Rows that a table needs beyond the longest context: blocks of the steps in flight reach past the last token
# that counts, and at most three of them lie there.
POSITIONS_BEYOND_CONTEXT = 3 * limits.BLOCK_SIZE_MAX
# No published model is outside; the point is that zero, negative and NaN are.
_THETA_MAX = 1e12
_FACTOR_MAX = 1e6


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines `[max_positions, head_dim]` (each half repeated), fp32."""

    cos: torch.Tensor
    sin: torch.Tensor

    def cut(self, max_positions: int) -> RopeTable:
        """The first max_positions rows; there must be so many."""
        assert max_positions <= self.cos.shape[0], f"{max_positions} positions of {self.cos.shape[0]}"
        return RopeTable(self.cos[:max_positions], self.sin[:max_positions])

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows for positions `[N]`, shaped `[N, 1, head_dim]` to broadcast over heads."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x `[N, heads, head_dim]` by cos, sin `[N, 1, head_dim]`; computed in their type, which is
    fp32, and given back in x's. Source: Su et al. 2021."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + rotated * sin).to(x.dtype)


def build_rope_table(
    head_dim: int, max_positions: int, config: dict[str, Any], device: torch.device | str = "cpu"
) -> RopeTable:
    """The table that a checkpoint's config.json asks for.

    Reads `rope_theta` and `rope_scaling`, or `rope_parameters` that holds both. Known scalings:
    default, linear, llama3. Anything else, or no theta at all, is a CheckpointError: guessing costs
    acceptance silently.
    """
    if head_dim % 2:
        raise CheckpointError("head_dim", "must be even, for its halves are rotated", given=head_dim)
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError("rope_parameters/rope_scaling", "must be an object", given=parameters)
    theta = number_field(parameters if "rope_theta" in parameters else config, "rope_theta", 1, _THETA_MAX)
    kind = parameters.get("rope_type", parameters.get("type", "default"))

    # fp32 from the start: transformers computes the frequencies so, and parity is tested bit for bit
    # at short range.
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if kind == "linear":
        frequencies = frequencies / number_field(parameters, "factor", 1, _FACTOR_MAX)
    elif kind == "llama3":
        frequencies = _llama3_frequencies(frequencies, parameters)
    elif kind != "default":
        raise CheckpointError("rope_scaling.rope_type", "must be one of default, linear, llama3", given=kind)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return RopeTable(angles.cos().to(device), angles.sin().to(device))


def _llama3_frequencies(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths divided by factor, short ones kept, a ramp between."""
    factor = number_field(parameters, "factor", 1, _FACTOR_MAX)
    low = number_field(parameters, "low_freq_factor", 0, _FACTOR_MAX)
    high = number_field(parameters, "high_freq_factor", 0, _FACTOR_MAX)
    if high <= low:
        raise CheckpointError("high_freq_factor", f"must be above low_freq_factor {low:g}", given=high)
    original_len = int_field(parameters, "original_max_position_embeddings", 1, limits.CONTEXT_LEN_MAX)
    wavelengths = 2 * math.pi / frequencies
    keep = ((original_len / wavelengths - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * (1 - keep) + frequencies * keep
