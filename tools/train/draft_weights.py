"""A draft's weights as the trainer holds them: fresh, by name, and as a z-lab directory.

Only names and tensors; the forward is in draft_forward.py. What is exported is what the drafter loads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.drafter.model.dflash_config import DFlashConfig
from services.drafter.model.dflash_weights import DFlashLayer, DFlashWeights


def draft_config_json(
    target: dict[str, Any],
    *,
    num_layers: int,
    block_size: int,
    mask_token_id: int,
    captured_layer_ids: tuple[int, ...],
) -> dict[str, Any]:
    """config.json of a draft for a target, in z-lab's format. target: the target's own config.json.

    Widths, heads and rotary base are the target's: nothing forces that, and it is a good default.
    """
    hidden_size, num_heads = target["hidden_size"], target["num_attention_heads"]
    rope = target.get("rope_parameters") or {}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": block_size,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(captured_layer_ids)},
        "num_target_layers": target["num_hidden_layers"],
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": target["intermediate_size"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": target.get("num_key_value_heads", num_heads),
        "head_dim": target.get("head_dim") or hidden_size // num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": target.get("rope_theta", rope.get("rope_theta")),
        "rope_scaling": None,
        "max_position_embeddings": target["max_position_embeddings"],
        "layer_types": ["full_attention"] * num_layers,
        "sliding_window": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "vocab_size": target["vocab_size"],
        "dtype": "bfloat16",
    }


def spread_layers(num_target_layers: int, num_captured: int) -> tuple[int, ...]:
    """Evenly spaced layers to capture, from the second to the third last: 1, 7, 14, 20, 27 of 30."""
    last = num_target_layers - 3
    if num_captured == 1:
        return (last,)
    return tuple(1 + (last - 1) * i // (num_captured - 1) for i in range(num_captured))


def new_weights(c: DFlashConfig, generator: torch.Generator) -> DFlashWeights:
    """Random fp32 weights on the CPU: normal with 1/sqrt(inputs), norms 1.

    Projections back into the residual stream are smaller by sqrt(2 · layers), so that depth does not
    raise its variance.
    """

    def normal(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)

    hidden, inner, depth = c.hidden_size, c.intermediate_size, (2 * c.num_layers) ** -0.5
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layers = [
        DFlashLayer(
            input_norm=torch.ones(hidden),
            q=normal(q_size, hidden),
            k=normal(kv_size, hidden),
            v=normal(kv_size, hidden),
            o=normal(hidden, q_size, depth),
            q_norm=torch.ones(c.head_dim),
            k_norm=torch.ones(c.head_dim),
            post_norm=torch.ones(hidden),
            gate_up=normal(2 * inner, hidden),
            down=normal(hidden, inner, depth),
        )
        for _ in range(c.num_layers)
    ]
    fc = normal(hidden, len(c.captured_layer_ids) * hidden)
    return DFlashWeights(fc, torch.ones(hidden), torch.ones(hidden), layers)


def map_weights(weights: DFlashWeights, change: Callable[[torch.Tensor], torch.Tensor]) -> DFlashWeights:
    """The same structure with every tensor changed."""
    layers = [
        DFlashLayer(**{f.name: change(getattr(layer, f.name)) for f in fields(DFlashLayer)})
        for layer in weights.layers
    ]
    return DFlashWeights(change(weights.fc), change(weights.hidden_norm), change(weights.norm), layers)


def named_weights(weights: DFlashWeights) -> dict[str, torch.Tensor]:
    """Every tensor under the name of its place, in a fixed order."""
    named = {"fc": weights.fc, "hidden_norm": weights.hidden_norm, "norm": weights.norm}
    for i, layer in enumerate(weights.layers):
        named |= {f"layers.{i}.{f.name}": getattr(layer, f.name) for f in fields(DFlashLayer)}
    return named


def export_draft(weights: DFlashWeights, config: dict[str, Any], directory: Path) -> None:
    """Write config.json and model.safetensors (bf16), as the drafter loads them."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        "fc.weight": weights.fc,
        "hidden_norm.weight": weights.hidden_norm,
        "norm.weight": weights.norm,
    }
    for i, layer in enumerate(weights.layers):
        attention, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        gate, up = layer.gate_up.chunk(2)
        tensors |= {
            f"layers.{i}.input_layernorm.weight": layer.input_norm,
            f"layers.{i}.post_attention_layernorm.weight": layer.post_norm,
            **{f"{attention}.{name}_proj.weight": getattr(layer, name) for name in "qkvo"},
            f"{attention}.q_norm.weight": layer.q_norm,
            f"{attention}.k_norm.weight": layer.k_norm,
            f"{mlp}.gate_proj.weight": gate,
            f"{mlp}.up_proj.weight": up,
            f"{mlp}.down_proj.weight": layer.down,
        }
    stored = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()
    }
    path = directory / "model.safetensors"
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)  # the writer makes it private to its user
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
