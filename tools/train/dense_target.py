"""The target's weights run over dense batches: whole sequences, or one more token of many rows at once.

Same weights and arithmetic as the served model, without pages: every row of a batch stands at the same
position, which is what makes writing training text cheap. Must not be used for serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import embedding, scaled_dot_product_attention

from common.layers.linear import project
from common.layers.mlp import swiglu
from common.layers.norm import rms_norm
from common.layers.rope import apply_rope
from services.target.model.llama import LlamaConfig, LlamaLayer, LlamaWeights


class DenseTarget:
    """A target's weights on one device. Nothing is trained here and no gradient is kept."""

    def __init__(
        self, directory: Path, device: torch.device, dtype: torch.dtype, *, fused: bool = False
    ) -> None:
        """Read a checkpoint directory; CheckpointError when it does not fit.

        fused compiles the layer of `capture`: many times faster on a GPU after a minute's wait.
        """
        weights = LlamaWeights.load(directory, dtype)
        shared = weights.shared
        self.config = weights.config
        self.contract = weights.contract
        self.device = device
        self.dtype = dtype
        self.embedding = shared.embedding.to(device)
        tied = shared.lm_head is shared.embedding
        self.lm_head = self.embedding if tied else shared.lm_head.to(device)
        self.cos, self.sin = weights.rope.cos.to(device), weights.rope.sin.to(device)
        self._final_norm = weights.final_norm.to(device)
        self._layers = [_layer_to(layer, device) for layer in weights.layers]
        # One layer, not the stack: as many fused kernels for a thirtieth of the compile time.
        self._extend: Callable[..., torch.Tensor] = _extend
        if fused:
            self._extend = torch.compile(_extend, dynamic=False)

    @torch.no_grad()
    def capture(self, tokens: torch.Tensor, captured_layer_ids: Sequence[int]) -> torch.Tensor:
        """Causal forward of whole sequences: tokens `[b, L]` to captured hidden states `[b, L, T*H]`.

        Layers above the last captured one are not run. Padding at the end of a row disturbs nothing
        before it.
        """
        length = tokens.shape[1]
        cos, sin = self.cos[:length].unsqueeze(1), self.sin[:length].unsqueeze(1)
        x = embedding(tokens, self.embedding)
        captured: dict[int, torch.Tensor] = {}
        for i, layer in enumerate(self._layers[: max(captured_layer_ids) + 1]):
            x = self._extend(x, layer, self.config, cos, sin)
            if i in captured_layer_ids:
                captured[i] = x
        return torch.cat([captured[i] for i in captured_layer_ids], dim=-1)

    @torch.no_grad()
    def decode(
        self,
        tokens: torch.Tensor,
        position: torch.Tensor,
        kv: torch.Tensor,
        num_keys: int,
        bias: torch.Tensor,
    ) -> torch.Tensor:
        """One token of every row, all at the same position: logits `[B, vocab_rows]`, model type.

        tokens `[B]`; position `[1]` on the device, so that a CUDA graph can replay this for any
        position below num_keys; kv `[num_layers, 2, B, num_kv_heads, max_len, head_dim]`; bias
        `[max_len]` fp32 is 0 up to the position and -inf after it.
        """
        cos, sin = self.cos[position].unsqueeze(1), self.sin[position].unsqueeze(1)
        x = embedding(tokens, self.embedding)
        seen = bias[:num_keys]
        for i, layer in enumerate(self._layers):
            x = _decode(x, layer, self.config, cos, sin, kv[i], position, seen)
        return project(rms_norm(x, self._final_norm, self.config.rms_norm_eps), self.lm_head)

    def new_kv(self, num_rows: int, max_len: int) -> torch.Tensor:
        """Storage for `decode`, zeroed: 23 KiB a token for SmolLM2-135M in bf16."""
        c = self.config
        shape = (c.num_layers, 2, num_rows, c.num_kv_heads, max_len, c.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def _layer_to(layer: LlamaLayer, device: torch.device) -> LlamaLayer:
    tensors = {f.name: getattr(layer, f.name) for f in fields(layer)}
    moved: dict[str, Any] = {name: None if t is None else t.to(device) for name, t in tensors.items()}
    return LlamaLayer(**moved)


def _extend(
    x: torch.Tensor, layer: LlamaLayer, c: LlamaConfig, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    q, k, v = _qkv(x, layer, c, cos, sin)
    mixed = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    x = x + project(mixed.transpose(1, 2).flatten(2), layer.o)
    return x + swiglu(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.gate_up, layer.down)


def _decode(
    x: torch.Tensor,
    layer: LlamaLayer,
    c: LlamaConfig,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    position: torch.Tensor,
    bias: torch.Tensor,
) -> torch.Tensor:
    q, k, v = _qkv(x, layer, c, cos, sin)
    kv[0].index_copy_(2, position, k.unsqueeze(2))
    kv[1].index_copy_(2, position, v.unsqueeze(2))
    num_keys = bias.shape[-1]
    # Query heads of a group are rows of one product, so that each K/V head is read once. Two products
    # take 0.27 ms for 2048 rows of 512 keys on an H200 where fused attention takes 0.40.
    keys, values = (kv[i, :, :, :num_keys].flatten(0, 1) for i in (0, 1))
    grouped = (q * c.head_dim**-0.5).reshape(keys.shape[0], -1, c.head_dim)
    weights = torch.softmax(_product_fp32(grouped, keys.transpose(1, 2)) + bias, dim=-1).to(x.dtype)
    mixed = torch.bmm(weights, values).view(x.shape[0], -1)
    x = x + project(mixed, layer.o)
    return x + swiglu(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.gate_up, layer.down)


def _product_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched a · b in fp32, also of bf16 inputs: softmax of rounded scores would change the text."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a, b).float()


def _qkv(
    x: torch.Tensor, layer: LlamaLayer, c: LlamaConfig, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated q and k, and v: each `[..., heads, head_dim]`. Rotation in fp32, then back to x's type."""
    heads = project(rms_norm(x, layer.input_norm, c.rms_norm_eps), layer.qkv).unflatten(-1, (-1, c.head_dim))
    q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=-2)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, c.rms_norm_eps), rms_norm(k, layer.k_norm, c.rms_norm_eps)
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v
