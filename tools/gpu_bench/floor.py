"""The least that a step must read, and how long that takes at the speed of a pure read.

Weights once each; single rows of an embedding that is not also the head do not count. K/V is counted apart:
it grows with the load.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from tools.gpu_bench.plan import Mode

if TYPE_CHECKING:
    from services.drafter.model.dflash_weights import DFlashWeights
    from services.target.model.llama import LlamaWeights


@dataclass(frozen=True)
class Floor:
    """Bytes of a step, and the speed at which memory is read.

    kv bytes are those of one position, keys and values of all layers.
    """

    bandwidth_bytes_s: float
    target_bytes: int
    draft_bytes: int
    target_kv_bytes: int
    draft_kv_bytes: int

    def weights_ms(self, mode: Mode) -> float:
        """Of a step that only reads weights: the target's, with drafts also the draft's."""
        num_bytes = self.target_bytes + (0 if mode is Mode.PLAIN else self.draft_bytes)
        return 1000 * num_bytes / self.bandwidth_bytes_s

    def kv_ms(self, mode: Mode, num_positions: float) -> float:
        """Of reading the K/V of so many positions, all requests together."""
        each = self.target_kv_bytes + (0 if mode is Mode.PLAIN else self.draft_kv_bytes)
        return 1000 * num_positions * each / self.bandwidth_bytes_s


def target_bytes(weights: LlamaWeights) -> int:
    """All of the target's weights, the head among them, that a step reads."""
    layers = (tensor for layer in weights.layers for tensor in _tensors(layer))
    return _bytes((*layers, weights.final_norm, weights.shared.lm_head))


def draft_bytes(weights: DFlashWeights, lm_head: torch.Tensor) -> int:
    """All of the draft's weights, and the head once more."""
    layers = (tensor for layer in weights.layers for tensor in _tensors(layer))
    return _bytes((*layers, weights.fc, weights.hidden_norm, weights.norm, lm_head))


def kv_bytes(kv_shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Of one position: num_layers, num_kv_heads, head_dim, keys and values."""
    num_layers, num_kv_heads, head_dim = kv_shape
    return num_layers * 2 * num_kv_heads * head_dim * dtype.itemsize


def _tensors(layer: Any) -> Iterable[torch.Tensor]:
    values = (getattr(layer, field.name) for field in fields(layer))
    return (value for value in values if isinstance(value, torch.Tensor))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
