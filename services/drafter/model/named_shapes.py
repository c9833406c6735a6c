"""Shapes of drafts without their weights, each for the target shape of the same name.

Each is the content of a config.json, as `Draft.random` needs it. No torch.
"""

from __future__ import annotations

from typing import Any

NAMED_DRAFT_SHAPES: dict[str, dict[str, Any]] = {
    # As published with z-lab/Qwen3-8B-DFlash-b16.
    "qwen3-8b": {
        "architectures": ["DFlashDraftModel"],
        "block_size": 16,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        "num_target_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
    },
    # A layer of each kind; other heads than the target's.
    "tiny": {
        "architectures": ["DFlashDraftModel"],
        "block_size": 4,
        "dflash_config": {"mask_token_id": 191, "target_layer_ids": [0, 2]},
        "num_target_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5e3,
        "max_position_embeddings": 256,
        "vocab_size": 192,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 24,
    },
}
