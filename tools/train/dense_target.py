"""The target's weights run over dense batches: whole sequences, or one more token of many rows at once.

Same weights and arithmetic as the served model, without pages: every row of a batch stands at the same
position, which is what makes writing training text cheap. Must not be used for serving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import embedding, linear, scaled_dot_product_attention, silu

from common.embedding import PREFIX, take_shared_weights, target_contract
from common.layers.norm import rms_norm
from common.layers.rope import apply_rope, build_rope_table
from common.weights import Checkpoint, read_config
from services.target.model.llama import LlamaConfig


@dataclass(frozen=True)
class DenseLayer:
    """Weights of a decoder layer; q, k, v and gate, up are stacked."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    o: torch.Tensor
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


class DenseTarget:
    """A target's weights on one device. Nothing is trained here and no gradient is kept."""

    def __init__(
        self, directory: Path, device: torch.device, dtype: torch.dtype, *, fused: bool = False
    ) -> None:
        """Read a checkpoint directory; CheckpointError when it does not fit.

        fused compiles the layer of `capture`: many times faster on a GPU after a minute's wait.
        """
        raw = read_config(directory)
        checkpoint = Checkpoint(directory, strip_prefix=PREFIX)
        shared = take_shared_weights(checkpoint, raw, dtype)
        self.config = LlamaConfig.from_json(raw)
        self.contract = target_contract(raw, shared, dtype)
        self.device = device
        self.dtype = dtype
        self.embedding = shared.embedding.to(device)
        tied = shared.lm_head is shared.embedding
        self.lm_head = self.embedding if tied else shared.lm_head.to(device)
        rope = build_rope_table(self.config.head_dim, self.config.max_len, raw)
        self.cos, self.sin = rope.cos.to(device), rope.sin.to(device)
        self._final_norm = checkpoint.take("norm.weight", (self.config.hidden_size,), dtype).to(device)
        self._layers = [
            _take_layer(checkpoint, self.config, i, device, dtype) for i in range(self.config.num_layers)
        ]
        checkpoint.finish()
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
        return linear(rms_norm(x, self._final_norm, self.config.rms_norm_eps), self.lm_head)

    def new_kv(self, num_rows: int, max_len: int) -> torch.Tensor:
        """Storage for `decode`, zeroed: 23 KiB a token for SmolLM2-135M in bf16."""
        c = self.config
        shape = (c.num_layers, 2, num_rows, c.num_kv_heads, max_len, c.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def _take_layer(
    checkpoint: Checkpoint, c: LlamaConfig, index: int, device: torch.device, dtype: torch.dtype
) -> DenseLayer:
    def take(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.take(f"layers.{index}.{name}.weight", shape, dtype).to(device)

    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    hidden, inner = c.hidden_size, c.intermediate_size
    q = take("self_attn.q_proj", q_size, hidden)
    k, v = (take(f"self_attn.{name}_proj", kv_size, hidden) for name in "kv")
    gate, up = (take(f"mlp.{name}_proj", inner, hidden) for name in ("gate", "up"))
    return DenseLayer(
        input_norm=take("input_layernorm", hidden),
        qkv=torch.cat([q, k, v]),
        o=take("self_attn.o_proj", hidden, q_size),
        post_norm=take("post_attention_layernorm", hidden),
        gate_up=torch.cat([gate, up]),
        down=take("mlp.down_proj", hidden, inner),
    )


def swiglu(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """down · (silu(gate · x) ⊙ (up · x)) over plain tensors, which can be compiled and trained."""
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(silu(gate) * up, down)


def _extend(
    x: torch.Tensor, layer: DenseLayer, c: LlamaConfig, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    q, k, v = _qkv(x, layer, c, cos, sin)
    mixed = scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    x = x + linear(mixed.transpose(1, 2).flatten(2), layer.o)
    return x + swiglu(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.gate_up, layer.down)


def _decode(
    x: torch.Tensor,
    layer: DenseLayer,
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
    x = x + linear(mixed, layer.o)
    return x + swiglu(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.gate_up, layer.down)


def _product_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched a · b in fp32, also of bf16 inputs: softmax of rounded scores would change the text."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a, b).float()


def _qkv(
    x: torch.Tensor, layer: DenseLayer, c: LlamaConfig, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated q and k, and v: each `[..., heads, head_dim]`. Rotation in fp32, then back to x's type."""
    heads = linear(rms_norm(x, layer.input_norm, c.rms_norm_eps), layer.qkv).unflatten(-1, (-1, c.head_dim))
    num_qk = c.num_heads + c.num_kv_heads
    rotated = apply_rope(heads[..., :num_qk, :], cos, sin).to(x.dtype)
    return rotated[..., : c.num_heads, :], rotated[..., c.num_heads :, :], heads[..., num_qk:, :]
