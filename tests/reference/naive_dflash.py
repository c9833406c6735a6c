"""DFlash's forward as the paper's formulas say it: one block, no cache, no paging, plain loops.

Written from the algorithm's description alone; shares no layer code with what it checks. Slow on
purpose: each row, head and key is its own line of arithmetic. fp64, so that it is the exact side of a
comparison.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


class NaiveDFlash:
    """A draft from its directory and its target's: `logits` of a block after a whole context."""

    def __init__(self, draft_dir: Path, target_dir: Path) -> None:
        self.config: dict[str, Any] = json.loads((draft_dir / "config.json").read_text(encoding="utf-8"))
        stored = load_file(draft_dir / "model.safetensors")
        self.w = {name.removeprefix("model."): tensor.double() for name, tensor in stored.items()}
        target = load_file(target_dir / "model.safetensors")
        self.embedding = target["model.embed_tokens.weight"].double()
        self.lm_head = target.get("lm_head.weight", target["model.embed_tokens.weight"]).double()
        nested = self.config.get("dflash_config", {})
        self.block_size: int = nested.get("block_size", self.config.get("block_size"))
        self.mask_id: int = nested["mask_token_id"]

    def draft(self, captured: torch.Tensor, start_position: int, anchor: int) -> list[int]:
        """Greedy draft tokens after a context of rows `[n, T*H]` at start_position …, lowest id on ties."""
        logits = self.logits(captured, start_position, anchor)
        tokens = []
        for row in range(1, self.block_size):
            best = 0
            for token in range(logits.shape[1]):
                if logits[row, token] > logits[row, best]:
                    best = token
            tokens.append(best)
        return tokens

    def logits(self, captured: torch.Tensor, start_position: int, anchor: int) -> torch.Tensor:
        """`[block_size, vocab_rows]` of the block whose anchor stands right after the context."""
        features = [
            self._rms(self.w["fc.weight"] @ row, self.w["hidden_norm.weight"]) for row in captured.double()
        ]
        context_positions = [start_position + i for i in range(len(features))]
        first = start_position + len(features)
        block_positions = [first + i for i in range(self.block_size)]
        ids = [anchor] + [self.mask_id] * (self.block_size - 1)
        x = [self.embedding[token].clone() for token in ids]
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(layer, x, features, context_positions, block_positions)
        return torch.stack([self.lm_head @ self._rms(row, self.w["norm.weight"]) for row in x])

    def _layer(
        self, layer: int, x: list[torch.Tensor], features: list[torch.Tensor],
        context_positions: list[int], block_positions: list[int],
    ) -> list[torch.Tensor]:  # fmt: skip
        def weight(name: str) -> torch.Tensor:
            return self.w[f"layers.{layer}.{name}.weight"]

        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        normed = [self._rms(row, weight("input_layernorm")) for row in x]
        # Context features come as they are; block rows come through the input norm.
        sources = features + normed
        positions = context_positions + block_positions
        keys = [
            self._heads(weight("self_attn.k_proj") @ s, kv_heads, weight("self_attn.k_norm"), p)
            for s, p in zip(sources, positions, strict=True)
        ]
        values = [(weight("self_attn.v_proj") @ s).view(kv_heads, -1) for s in sources]
        out = []
        for row, position in enumerate(block_positions):
            queries = self._heads(
                weight("self_attn.q_proj") @ normed[row], heads, weight("self_attn.q_norm"), position
            )
            mixed = []
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = {
                    j: float(queries[head] @ keys[j][shared]) / math.sqrt(self.config["head_dim"])
                    for j in range(len(sources))
                    if self._sees(layer, position, positions[j], in_block=j >= len(features))
                }
                top = max(scores.values())
                total = sum(math.exp(score - top) for score in scores.values())
                mixed.append(sum(math.exp(s - top) / total * values[j][shared] for j, s in scores.items()))
            after = x[row] + weight("self_attn.o_proj") @ torch.cat(mixed)
            h = self._rms(after, weight("post_attention_layernorm"))
            gate, up = weight("mlp.gate_proj") @ h, weight("mlp.up_proj") @ h
            out.append(after + weight("mlp.down_proj") @ (gate / (1 + torch.exp(-gate)) * up))
        return out

    def _sees(self, layer: int, query: int, key: int, *, in_block: bool) -> bool:
        kinds = self.config.get("layer_types")
        if not kinds or kinds[layer] == "full_attention":
            return True
        if query - key >= self.config["sliding_window"]:
            return False
        return not in_block or key <= query or self.config.get("is_causal") is False

    def _heads(self, flat: torch.Tensor, count: int, norm: torch.Tensor, position: int) -> torch.Tensor:
        """Split into heads, norm each, rotate each by its position: `[count, head_dim]`."""
        return torch.stack([self._rope(self._rms(head, norm), position) for head in flat.view(count, -1)])

    def _rope(self, v: torch.Tensor, position: int) -> torch.Tensor:
        size = len(v)
        out = torch.empty_like(v)
        for i in range(size // 2):
            angle = position * self.config["rope_theta"] ** (-2 * i / size)
            c, s = math.cos(angle), math.sin(angle)
            out[i] = v[i] * c - v[i + size // 2] * s
            out[i + size // 2] = v[i + size // 2] * c + v[i] * s
        return out

    def _rms(self, v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return v / torch.sqrt((v * v).mean() + self.config["rms_norm_eps"]) * weight
