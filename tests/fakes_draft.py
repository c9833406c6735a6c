"""A fake of the drafter's kernels, in plain torch."""

from __future__ import annotations

import torch

from common.embedding import SharedWeights
from common.layers.attention import RaggedBatch, Span
from common.layers.kernel_decoder import PagedRows
from common.layers.linear import project
from common.layers.norm import rms_norm
from common.layers.rope import apply_rope
from services.drafter.model.dflash import DFlash
from services.drafter.model.dflash_weights import Draft


class PagedDFlash:
    """KernelDFlash's interface over the CPU's forward."""

    def __init__(self, draft: Draft, shared: SharedWeights, page_size: int) -> None:
        self._dflash = DFlash(draft.config, draft.weights, shared, draft.rope, draft.contract)
        self._rope = draft.rope
        self._page_size = page_size
        self.config, self.contract, self.dtype = draft.config, draft.contract, self._dflash.dtype
        self.device = torch.device("cpu")
        c = draft.config
        self.kv_shape = (c.num_layers, c.num_kv_heads, c.head_dim)
        self.context_kv_width = 2 * c.num_layers * c.num_kv_heads * c.head_dim

    @torch.inference_mode()
    def project_context(self, captured: torch.Tensor, out_context_kv: torch.Tensor) -> None:
        d = self._dflash
        features = rms_norm(project(captured, d._fc), d._hidden_norm, self.config.rms_norm_eps)
        out_context_kv.copy_(project(features, d._context_kv))

    @torch.inference_mode()
    def store(
        self,
        context_kv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: torch.Tensor,
        finite: torch.Tensor,
    ) -> None:
        c = self.config
        both = context_kv.view(-1, c.num_layers, 2, c.num_kv_heads, c.head_dim)
        cos, sin = self._rope.at(positions.long())
        for i in range(c.num_layers):
            keys = rms_norm(both[:, i, 0], self._dflash._k_norms[i], c.rms_norm_eps)
            kv[i, 0][slots.long()] = apply_rope(keys, cos, sin)
            kv[i, 1][slots.long()] = both[:, i, 1]
        finite.copy_(torch.isfinite(context_kv).all(dim=1, keepdim=True).expand_as(finite))

    @torch.inference_mode()
    def draft(self, ids: torch.Tensor, kv: torch.Tensor, rows: PagedRows, out_ids: torch.Tensor) -> None:
        size = self.config.block_size
        out_ids.zero_()
        spans, kept = [], []
        for sequence, kv_len in enumerate(rows.kv_lens.tolist()):
            if kv_len:
                keys = torch.arange(kv_len)
                pages = rows.page_table[sequence, keys // self._page_size].long()
                slots, first = pages * self._page_size + keys % self._page_size, sequence * size
                spans.append(Span(first, first + size, slots, kv_len))
                kept.append(sequence)
        if kept:
            batch = RaggedBatch(rows.positions.long(), rows.slots.long(), spans)
            hidden = self._dflash.block_hidden(ids.long(), kv, batch).view(-1, size, self.config.hidden_size)
            out_ids[kept] = self._dflash.logits(hidden[kept, 1:]).argmax(dim=-1).to(torch.int32)

