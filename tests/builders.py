"""Builders of what tests need: tiny checkpoints in the formats of the real ones, with random weights.

A tiny checkpoint goes through the same readers and checks as a real one. The generators are seeded,
so that a failing test can be run again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def build_tiny_llama_dir(
    path: Path,
    seed: int = 0,
    *,
    vocab_size: int = 192,
    hidden_size: int = 48,
    intermediate_size: int = 96,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_len: int = 256,
    rope_theta: float = 10000.0,
    tied: bool = True,
    eos_token_id: int | None = 2,
    favourite_token: int | None = None,
    favourite_bias: float = 8.0,
    qwen3: bool = False,
    dtype: torch.dtype = torch.float32,
    **config_changes: Any,
) -> Path:
    """Write a Llama checkpoint with random weights into `path` (made if need be); returns path.

    qwen3 makes it one of Qwen3, whose heads of q and k are normed.

    With `favourite_token` both this model and any draft that shares its embedding and lm_head lean
    towards that token (the lm_head is untied then): a random draft gets some of its tokens accepted,
    the more the higher `favourite_bias` (6: about half; 8: most; 20: all). config_changes overwrite keys
    of config.json.
    """
    g = torch.Generator().manual_seed(seed)
    tied = tied and favourite_token is None
    config = {
        "architectures": ["Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLM"],
        "model_type": "qwen3" if qwen3 else "llama",
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_theta": rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": [] if eos_token_id is None else eos_token_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | config_changes
    tensors = {
        # A tied head sees the input token in the residual stream; half size keeps that from deciding.
        "model.embed_tokens.weight": torch.randn(vocab_size, hidden_size, generator=g) * (0.5 if tied else 1),
        "model.norm.weight": _norm(g, hidden_size),
    }
    if not tied:
        tensors["lm_head.weight"] = _matrix(g, vocab_size, hidden_size) * 3
    if favourite_token is not None:
        # A constant direction of the residual stream that only the favourite's head row reads.
        tensors["model.embed_tokens.weight"][:, 0] = 4.0
        tensors["lm_head.weight"][:, 0] = 0.0
        tensors["lm_head.weight"][favourite_token, 0] = favourite_bias
        tensors["model.norm.weight"][0] = 1.0
    for i in range(num_layers):
        layer = f"model.layers.{i}."
        tensors |= _attention_and_mlp(
            g, layer, hidden_size, intermediate_size, num_heads * head_dim, num_kv_heads * head_dim
        )
        if qwen3:
            tensors[layer + "self_attn.q_norm.weight"] = 2 * _norm(g, head_dim)
            tensors[layer + "self_attn.k_norm.weight"] = 2 * _norm(g, head_dim)
        if favourite_token is not None:
            tensors[layer + "self_attn.o_proj.weight"][0] = 0.0
            tensors[layer + "mlp.down_proj.weight"][0] = 0.0
    return _write(path, config, tensors, dtype)


def build_tiny_draft_dir(
    path: Path,
    target_dir: Path,
    seed: int = 1,
    *,
    block_size: int = 4,
    num_layers: int = 2,
    target_layer_ids: tuple[int, ...] = (0, 2),
    mask_token_id: int = 3,
    intermediate_size: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    max_len: int | None = None,
    rope_theta: float = 5000.0,
    dtype: torch.dtype = torch.float32,
    **config_changes: Any,
) -> Path:
    """Write a DFlash draft with random weights for the target in target_dir; returns path.

    max_len None takes the target's. config_changes overwrite keys of config.json (for instance
    layer_types, sliding_window, is_causal).
    """
    g = torch.Generator().manual_seed(seed)
    target = json.loads((target_dir / "config.json").read_text(encoding="utf-8"))
    hidden_size = target["hidden_size"]
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target["vocab_size"],
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_len or target["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_theta": rope_theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": target["num_hidden_layers"],
        "block_size": block_size,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(target_layer_ids)},
        "dtype": str(dtype).removeprefix("torch."),
    } | config_changes
    tensors = {
        "fc.weight": _matrix(g, hidden_size, len(target_layer_ids) * hidden_size),
        "hidden_norm.weight": _norm(g, hidden_size),
        "norm.weight": _norm(g, hidden_size),
    }
    for i in range(num_layers):
        layer = f"layers.{i}."
        tensors |= _attention_and_mlp(
            g, layer, hidden_size, intermediate_size, num_heads * head_dim, num_kv_heads * head_dim
        )
        # Twice 1, for the same reason as the larger q and k of a model without these norms.
        tensors[layer + "self_attn.q_norm.weight"] = 2 * _norm(g, head_dim)
        tensors[layer + "self_attn.k_norm.weight"] = 2 * _norm(g, head_dim)
    return _write(path, config, tensors, dtype)


def _matrix(g: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    """Keeps the variance of what it multiplies, so that every layer has a say in the output."""
    return torch.randn(rows, columns, generator=g) * columns**-0.5


def _norm(g: torch.Generator, size: int) -> torch.Tensor:
    """Unlike 1, so that a forgotten norm weight shows."""
    return 1 + 0.2 * torch.randn(size, generator=g)


def _attention_and_mlp(
    g: torch.Generator, prefix: str, hidden: int, inner: int, q_size: int, kv_size: int
) -> dict[str, torch.Tensor]:
    return {
        prefix + "input_layernorm.weight": _norm(g, hidden),
        prefix + "post_attention_layernorm.weight": _norm(g, hidden),
        # Large, so that attention picks keys: averaged over many they would all look alike.
        prefix + "self_attn.q_proj.weight": _matrix(g, q_size, hidden) * 2,
        prefix + "self_attn.k_proj.weight": _matrix(g, kv_size, hidden) * 2,
        prefix + "self_attn.v_proj.weight": _matrix(g, kv_size, hidden),
        prefix + "self_attn.o_proj.weight": _matrix(g, hidden, q_size),
        prefix + "mlp.gate_proj.weight": _matrix(g, inner, hidden),
        prefix + "mlp.up_proj.weight": _matrix(g, inner, hidden),
        prefix + "mlp.down_proj.weight": _matrix(g, hidden, inner),
    }


def _write(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, path / "model.safetensors")
    return path
