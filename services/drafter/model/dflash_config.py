"""config.json of a draft in z-lab's format: what is needed, parsed and checked once. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common import limits
from common.errors import CheckpointError
from common.layers.attention import BIDIRECTIONAL, Mask
from common.weights import flag_field, int_field, number_field


@dataclass(frozen=True)
class DFlashConfig:
    """config.json of a draft in z-lab's format. `layer_masks[i]` is what layer i's block rows see."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_len: int
    block_size: int
    mask_token_id: int
    captured_layer_ids: tuple[int, ...]
    num_target_layers: int
    layer_masks: tuple[Mask, ...]

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> DFlashConfig:
        """Parse and check. Keys of `dflash_config` come before the top level; a key that stands in
        both with different values is an error, and taps and mask id are never guessed."""
        architecture = (config.get("architectures") or [None])[0]
        if architecture != "DFlashDraftModel":
            raise CheckpointError("architectures", "must be DFlashDraftModel", given=architecture)
        if flag_field(config, "attention_bias"):
            raise CheckpointError("attention_bias", "must be false", given=True)
        if config.get("hidden_act", "silu") != "silu":
            raise CheckpointError("hidden_act", "must be silu", given=config["hidden_act"])
        for key in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
            if config.get(key) is not None:
                raise CheckpointError(key, "is not served yet; must be absent", given=config[key])
        draft = _draft_keys(config)
        num_layers = int_field(config, "num_hidden_layers", 1, limits.LAYERS_MAX)
        num_heads = int_field(config, "num_attention_heads", 1, limits.HEADS_MAX)
        num_kv_heads = int_field(config, "num_key_value_heads", 1, num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError("num_key_value_heads", f"must divide {num_heads}", given=num_kv_heads)
        head_dim = int_field(config, "head_dim", 2, limits.HEAD_DIM_MAX)
        if head_dim % 2:
            raise CheckpointError("head_dim", "must be even (RoPE turns pairs)", given=head_dim)
        taps = draft["target_layer_ids"]
        if not isinstance(taps, list) or not taps or not all(type(i) is int for i in taps):
            raise CheckpointError("target_layer_ids", "must be a list of layer ids", given=taps)
        return cls(
            hidden_size=int_field(config, "hidden_size", 1, limits.HIDDEN_SIZE_MAX),
            intermediate_size=int_field(config, "intermediate_size", 1, limits.INTERMEDIATE_SIZE_MAX),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=number_field(config, "rms_norm_eps", 0, 1),
            vocab_size=int_field(config, "vocab_size", 1, limits.VOCAB_ROWS_MAX),
            max_len=int_field(config, "max_position_embeddings", 1, limits.CONTEXT_LEN_MAX),
            block_size=int_field(draft, "block_size", 2, limits.BLOCK_SIZE_MAX),
            mask_token_id=int_field(draft, "mask_token_id", 0, limits.VOCAB_ROWS_MAX),
            captured_layer_ids=tuple(taps),
            num_target_layers=int_field(config, "num_target_layers", 1, limits.LAYERS_MAX),
            layer_masks=_layer_masks(config, num_layers),
        )


def _draft_keys(config: dict[str, Any]) -> dict[str, Any]:
    """block_size, mask_token_id and target_layer_ids from wherever the checkpoint has them."""
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError("dflash_config", "must be an object", given=type(nested).__name__)
    found = {}
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        if key in nested and key in config and nested[key] != config[key]:
            raise CheckpointError(key, "differs between dflash_config and the top level",
                                  given=[nested[key], config[key]])  # fmt: skip
        value = nested.get(key, config.get(key))
        if value is None:
            raise CheckpointError(key, "must be given in dflash_config or at the top level", given=None)
        found[key] = value
    return found


def _layer_masks(config: dict[str, Any], num_layers: int) -> tuple[Mask, ...]:
    """full_attention is bidirectional; sliding_attention has a window, and is causal inside the
    block unless the checkpoint says `is_causal: false`."""
    kinds = config.get("layer_types") or ["full_attention"] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise CheckpointError("layer_types", f"must be a list of {num_layers}", given=kinds)
    known = {"full_attention": BIDIRECTIONAL}
    if "sliding_attention" in kinds:
        window = int_field(config, "sliding_window", 1, limits.CONTEXT_LEN_MAX)
        is_causal = config.get("is_causal", True)
        if not isinstance(is_causal, bool):
            raise CheckpointError("is_causal", "must be true or false", given=is_causal)
        known["sliding_attention"] = Mask(causal=is_causal, window=window)
    for kind in kinds:
        if kind not in known:
            raise CheckpointError("layer_types", "must be full_attention or sliding_attention", given=kind)
    return tuple(known[kind] for kind in kinds)
