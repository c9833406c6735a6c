"""Shapes of models without their weights: for measurements at a real size, and for tests at a tiny one.

Each is the content of a config.json, as `LlamaWeights.random` and a draft's shape of the same name need it.
No torch.
"""

from __future__ import annotations

from typing import Any

NAMED_SHAPES: dict[str, dict[str, Any]] = {
    # As published with Qwen/Qwen3-8B.
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        "eos_token_id": 151645,
    },
    # Small enough for Triton's interpreter, and with everything that the large one has.
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_position_embeddings": 256,
        "vocab_size": 192,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    },
}
