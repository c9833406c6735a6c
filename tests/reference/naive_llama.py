"""A Llama forward from its definition: the whole sequence at once, dense, fp64, nothing cached.

Reads config.json and model.safetensors by itself. Must not import the code under test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.reference.naive_attention import naive_attention


class NaiveLlama:
    """Default RoPE only; the other kinds are compared with transformers."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        self.weights = {k: v.double() for k, v in load_file(directory / "model.safetensors").items()}

    def forward(self, ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits `[N, V]` and, for each decoder layer, the residual stream after it `[N, H]`."""
        c, w = self.config, self.weights
        heads, kv_heads, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        x = w["model.embed_tokens.weight"][ids]
        states = []
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            h = self._norm(x, w[p + "input_layernorm.weight"])
            q = self._rope((h @ w[p + "self_attn.q_proj.weight"].T).view(len(ids), heads, dim))
            k = self._rope((h @ w[p + "self_attn.k_proj.weight"].T).view(len(ids), kv_heads, dim))
            v = (h @ w[p + "self_attn.v_proj.weight"].T).view(len(ids), kv_heads, dim)
            x = x + naive_attention(q, k, v, dim**-0.5) @ w[p + "self_attn.o_proj.weight"].T
            h = self._norm(x, w[p + "post_attention_layernorm.weight"])
            gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + torch.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
            states.append(x)
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return self._norm(x, w["model.norm.weight"]) @ head.T, states

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight

    def _rope(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        out = x.clone()
        for position in range(x.shape[0]):
            for i in range(half):
                angle = torch.tensor(position * self.config["rope_theta"] ** (-i / half), dtype=torch.float64)
                first, second = x[position, :, i], x[position, :, half + i]
                out[position, :, i] = first * angle.cos() - second * angle.sin()
                out[position, :, half + i] = second * angle.cos() + first * angle.sin()
        return out
