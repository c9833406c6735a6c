"""DFlash version 1: a draft network over the target's captured hidden states (arXiv 2602.06036v2).

Context enters as K/V only: `f = RMSNorm(fc · captured)`, then each layer's k and v of f. A block
[anchor, mask …] attends to the context and to itself, in both directions. Knows tensors and slots;
nothing of sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import embedding

from common.contract import DraftContract, TargetContract
from common.embedding import SharedWeights
from common.layers.attention import Mask, RaggedBatch, paged_attention
from common.layers.linear import Weight, pack, project
from common.layers.mlp import swiglu
from common.layers.norm import rms_norm
from common.layers.rope import RopeTable, apply_rope
from services.drafter.model.dflash_config import DFlashConfig
from services.drafter.model.dflash_weights import DFlashLayer, DFlashWeights, Draft


class DFlash:
    """A loaded draft. Weights are read-only; the KV cache belongs to the caller."""

    def __init__(
        self, config: DFlashConfig, weights: DFlashWeights, shared: SharedWeights, rope: RopeTable,
        contract: DraftContract,
    ) -> None:  # fmt: skip
        self.config = config
        self.contract = contract
        self.dtype = shared.embedding.dtype
        self._embedding = shared.embedding
        self._lm_head = pack(shared.lm_head)
        self._fc = pack(weights.fc)
        self._hidden_norm = weights.hidden_norm
        self._layers = [
            _ServedLayer.of(layer, config, mask)
            for layer, mask in zip(weights.layers, config.layer_masks, strict=True)
        ]
        self._norm = weights.norm
        self._rope = rope
        # One GEMM gives all layers' context K and V: [L * 2 * kv_heads * head_dim, H].
        self._context_kv = pack(torch.cat([w for layer in weights.layers for w in (layer.k, layer.v)]))
        self._k_norms = torch.stack([layer.k_norm for layer in weights.layers])
        self._ones = torch.ones(config.head_dim, dtype=self.dtype, device=weights.fc.device)

    @classmethod
    def load(cls, directory: Path, shared: SharedWeights, target: TargetContract) -> DFlash:
        """Read a draft for this target; CheckpointError when file or fit is wrong."""
        draft = Draft.load(directory, shared, target)
        return cls(draft.config, draft.weights, shared, draft.rope, draft.contract)

    def append_context(
        self, captured: torch.Tensor, positions: torch.Tensor, slots: slice | torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        """Project captured rows into every layer's K/V and store them, once and for good.

        captured `[N, T*H]`; positions `[N]` int64; slots `[N]` int64 or a slice of N;
        kv `[num_layers, 2, num_slots, num_kv_heads, head_dim]`. Returns `[N]` bool: whether all that
        a row stored is finite. Hidden states that hold NaN or infinity, or overflow here, are not.
        """
        c = self.config
        context = rms_norm(project(captured, self._fc), self._hidden_norm, c.rms_norm_eps)
        both = project(context, self._context_kv)
        both = both.view(-1, c.num_layers, 2, c.num_kv_heads, c.head_dim)
        cos, sin = self._rope.at(positions)
        for i in range(c.num_layers):
            kv[i, 0][slots] = apply_rope(rms_norm(both[:, i, 0], self._k_norms[i], c.rms_norm_eps), cos, sin)
            kv[i, 1][slots] = both[:, i, 1]
        # NaN and infinity survive the product with any weights, and normalised keys are finite when
        # `both` is: so this one look covers the hidden states too.
        return torch.isfinite(both).flatten(1).all(dim=1)

    def draft(self, anchors: torch.Tensor, kv: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """Draft a block after each anchor: `[S]` int64 to draft tokens `[S, block_size - 1]` int64.

        batch has block_size rows a span, at positions p … p+K, whose K/V goes to the slots after the
        context and is overwritten by the next append. Greedy; ties go to the lowest id.
        """
        block = anchors.new_full((anchors.shape[0], self.config.block_size), self.config.mask_token_id)
        block[:, 0] = anchors
        hidden = self.block_hidden(block.flatten(), kv, batch).view(*block.shape, -1)
        # Row 0 stands at the anchor's own position: nothing to predict there.
        return self.logits(hidden[:, 1:]).argmax(dim=-1)

    def block_hidden(self, block_ids: torch.Tensor, kv: torch.Tensor, batch: RaggedBatch) -> torch.Tensor:
        """Run block rows `[N]` through the layers: the normed output `[N, H]`."""
        c = self.config
        rope = self._rope.at(batch.positions)
        x = embedding(block_ids, self._embedding)
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            h = rms_norm(x, layer.input_norm, c.rms_norm_eps)
            x = x + self._attention(h, layer, layer_kv, batch, rope)
            x = x + swiglu(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.gate_up, layer.down)
        return rms_norm(x, self._norm, c.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's lm_head over normed rows `[..., H]`: `[..., vocab_rows]`."""
        return project(hidden, self._lm_head)

    def _attention(
        self, h: torch.Tensor, layer: _ServedLayer, kv: torch.Tensor, batch: RaggedBatch,
        rope: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        c = self.config
        heads = project(h, layer.qkv).view(h.shape[0], -1, c.head_dim)
        num_qk = c.num_heads + c.num_kv_heads
        # q and k normed by one call; their weights differ, so they are multiplied in afterwards.
        normed = rms_norm(heads[:, :num_qk], self._ones, c.rms_norm_eps) * layer.qk_norm
        q, k = apply_rope(normed, *rope).split([c.num_heads, c.num_kv_heads], dim=1)
        kv[0][batch.slots] = k
        kv[1][batch.slots] = heads[:, num_qk:]
        mixed = paged_attention(q, kv[0], kv[1], batch, layer.mask, c.head_dim**-0.5)
        return project(mixed, layer.o)


@dataclass(frozen=True)
class _ServedLayer:
    """A draft layer as the block forward reads it: q, k, v as one GEMM, their norms as one product.

    qk_norm `[num_heads + num_kv_heads, head_dim]`.
    """

    input_norm: torch.Tensor
    qkv: Weight
    qk_norm: torch.Tensor
    o: Weight
    post_norm: torch.Tensor
    gate_up: Weight
    down: Weight
    mask: Mask

    @classmethod
    def of(cls, layer: DFlashLayer, c: DFlashConfig, mask: Mask) -> _ServedLayer:
        norms = (layer.q_norm.expand(c.num_heads, -1), layer.k_norm.expand(c.num_kv_heads, -1))
        return cls(
            input_norm=layer.input_norm,
            qkv=pack(torch.cat([layer.q, layer.k, layer.v])),
            qk_norm=torch.cat(norms),
            o=pack(layer.o),
            post_norm=layer.post_norm,
            gate_up=pack(layer.gate_up),
            down=pack(layer.down),
            mask=mask,
        )
