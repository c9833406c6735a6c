"""The draft network over many blocks of a sequence at once, as training needs it.

The same network as the drafter's (dflash.py there), with the block mask in place of pages; a test holds
the two equal. Knows tensors; nothing of losses or files.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, linear, scaled_dot_product_attention

from common.layers.mlp import swiglu
from common.layers.norm import rms_norm
from common.layers.rope import RopeTable, apply_rope
from services.drafter.model.dflash_config import DFlashConfig
from services.drafter.model.dflash_weights import DFlashWeights


def draft_hidden(
    w: DFlashWeights,
    c: DFlashConfig,
    captured: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    bias: torch.Tensor,
    embeddings: torch.Tensor,
    rope: RopeTable,
) -> torch.Tensor:
    """Normed output of all block rows: `[b, A, B, H]`.

    captured `[b, L, T*H]` of positions 0 … L-1; ids, positions `[b, A, B]` int64; bias as
    `blocks.attention_bias` builds it. Weights and captured states have the type to compute in.
    """
    length = captured.shape[1]
    context = rms_norm(linear(captured, w.fc), w.hidden_norm, c.rms_norm_eps)
    context_rope = rope.cos[:length].unsqueeze(1), rope.sin[:length].unsqueeze(1)
    flat = positions.flatten(1)
    block_rope = rope.cos[flat].unsqueeze(2), rope.sin[flat].unsqueeze(2)
    x = embedding(ids.flatten(1), embeddings)
    for layer in w.layers:
        h = rms_norm(x, layer.input_norm, c.rms_norm_eps)
        q = _rotated_heads(h, layer.q, layer.q_norm, block_rope, c)
        k = torch.cat(
            [
                _rotated_heads(context, layer.k, layer.k_norm, context_rope, c),
                _rotated_heads(h, layer.k, layer.k_norm, block_rope, c),
            ],
            dim=1,
        )
        v = torch.cat([linear(context, layer.v), linear(h, layer.v)], dim=1).unflatten(-1, (-1, c.head_dim))
        x = x + linear(_attend(q, k, v, bias, c), layer.o)
        x = x + swiglu(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.gate_up, layer.down)
    return rms_norm(x, w.norm, c.rms_norm_eps).view(*ids.shape, -1)


def _rotated_heads(
    x: torch.Tensor,
    projection: torch.Tensor,
    norm: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    c: DFlashConfig,
) -> torch.Tensor:
    heads = rms_norm(linear(x, projection).unflatten(-1, (-1, c.head_dim)), norm, c.rms_norm_eps)
    return apply_rope(heads, *rope)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, c: DFlashConfig
) -> torch.Tensor:
    # Repeated K/V rather than enable_gqa: only so do the fused kernels that take a bias apply.
    group = c.num_heads // c.num_kv_heads
    k, v = (heads.repeat_interleave(group, dim=2).transpose(1, 2) for heads in (k, v))
    return scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=bias).transpose(1, 2).flatten(2)
