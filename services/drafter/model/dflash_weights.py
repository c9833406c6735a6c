"""A DFlash draft in memory: its weights, and the facts that its file and its target fix.

Knows names and shapes of tensors, not the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common.contract import DraftContract, TargetContract, unfit
from common.embedding import SharedWeights
from common.errors import CheckpointError
from common.layers.rope import POSITIONS_BEYOND_CONTEXT, RopeTable, build_rope_table
from common.weights import Checkpoint, fingerprint, random_normal, read_config
from services.drafter.model.dflash_config import DFlashConfig


@dataclass(frozen=True)
class DFlashLayer:
    """Weights of a draft layer."""

    input_norm: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class DFlashWeights:
    """All weights of a draft; embedding and lm_head stay with the target."""

    fc: torch.Tensor
    hidden_norm: torch.Tensor
    norm: torch.Tensor
    layers: list[DFlashLayer]

    @classmethod
    def random(
        cls, config: DFlashConfig, dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> DFlashWeights:
        """Untrained weights drawn on the device, norms 1, for measurements and tests of large shapes."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(name: str, *shape: int) -> torch.Tensor:
            if name.endswith("norm.weight"):
                return torch.ones(shape, dtype=dtype, device=device)
            return random_normal(shape, dtype, generator)

        return _assemble(draw, config)


@dataclass(frozen=True)
class Draft:
    """A draft that fits its target. rope covers the context and `POSITIONS_BEYOND_CONTEXT` more."""

    config: DFlashConfig
    contract: DraftContract
    weights: DFlashWeights
    rope: RopeTable

    @classmethod
    def load(cls, directory: Path, shared: SharedWeights, target: TargetContract) -> Draft:
        """Read a draft for this target, in the type and onto the device of what they share.

        CheckpointError when file or fit is wrong.
        """
        raw = read_config(directory)
        config = DFlashConfig.from_json(raw)
        _refuse_other_widths(config, target)
        embedding = shared.embedding
        checkpoint = Checkpoint(directory, strip_prefix="model.", device=embedding.device)
        weights, name = take_weights(checkpoint, config, embedding.dtype)
        checkpoint.finish()
        return cls._fitted(raw, config, weights, name, target)

    @classmethod
    def random(
        cls, config: dict[str, Any], shared: SharedWeights, target: TargetContract, seed: int
    ) -> Draft:
        """An untrained draft for this target. config: the content of a config.json, for instance one of
        `named_shapes`. Equal for equal arguments."""
        parsed = DFlashConfig.from_json(config)
        _refuse_other_widths(parsed, target)
        weights = DFlashWeights.random(parsed, shared.embedding.dtype, shared.embedding.device, seed)
        return cls._fitted(config, parsed, weights, fingerprint({"fc": weights.fc}), target)

    @classmethod
    def _fitted(
        cls, raw: dict[str, Any], config: DFlashConfig, weights: DFlashWeights, name: str,
        target: TargetContract,
    ) -> Draft:  # fmt: skip
        contract = DraftContract(
            captured_layer_ids=config.captured_layer_ids,
            block_size=config.block_size,
            num_draft_tokens=config.block_size - 1,
            mask_token_id=config.mask_token_id,
            context_len_max=config.max_len,
            weights_fingerprint=name,
        )
        wrong = unfit(target, contract)
        if wrong:
            raise CheckpointError(wrong[0].field, f"must be {wrong[0].ours}", given=wrong[0].theirs)
        max_positions = config.max_len + POSITIONS_BEYOND_CONTEXT
        rope = build_rope_table(config.head_dim, max_positions, raw, weights.fc.device)
        return cls(config, contract, weights, rope)


def take_weights(checkpoint: Checkpoint, c: DFlashConfig, dtype: torch.dtype) -> tuple[DFlashWeights, str]:
    """All tensors of a draft cast to dtype, and the fingerprint of what the file holds."""
    stored: dict[str, torch.Tensor] = {}

    def take(name: str, *shape: int) -> torch.Tensor:
        stored[name] = checkpoint.take(name, shape)
        return stored[name].to(dtype)

    weights = _assemble(take, c)
    return weights, fingerprint(stored)


def _refuse_other_widths(config: DFlashConfig, target: TargetContract) -> None:
    for key, ours, theirs in (
        ("hidden_size", target.hidden_size, config.hidden_size),
        ("num_target_layers", target.num_layers, config.num_target_layers),
        ("vocab_size", target.vocab_rows, config.vocab_size),
    ):
        if ours != theirs:
            raise CheckpointError(key, f"must equal the target's {ours}", given=theirs)


def _assemble(take: Callable[..., torch.Tensor], c: DFlashConfig) -> DFlashWeights:
    """take gives the tensor of a name and shape."""
    hidden, inner = c.hidden_size, c.intermediate_size
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layers = []
    for i in range(c.num_layers):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        layers.append(DFlashLayer(
            input_norm=take(f"layers.{i}.input_layernorm.weight", hidden),
            q=take(f"{attention}.q_proj.weight", q_size, hidden),
            k=take(f"{attention}.k_proj.weight", kv_size, hidden),
            v=take(f"{attention}.v_proj.weight", kv_size, hidden),
            o=take(f"{attention}.o_proj.weight", hidden, q_size),
            q_norm=take(f"{attention}.q_norm.weight", c.head_dim),
            k_norm=take(f"{attention}.k_norm.weight", c.head_dim),
            post_norm=take(f"layers.{i}.post_attention_layernorm.weight", hidden),
            gate_up=torch.cat([
                take(f"{mlp}.gate_proj.weight", inner, hidden), take(f"{mlp}.up_proj.weight", inner, hidden),
            ]),
            down=take(f"{mlp}.down_proj.weight", hidden, inner),
        ))  # fmt: skip
    fc = take("fc.weight", hidden, len(c.captured_layer_ids) * hidden)
    return DFlashWeights(fc, take("hidden_norm.weight", hidden), take("norm.weight", hidden), layers)
