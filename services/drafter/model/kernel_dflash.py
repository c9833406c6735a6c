"""DFlash version 1 on a GPU: what dflash.DFlash spells out in torch, by kernels and without an allocation.

Imports Triton: whatever also runs without it must import this late. Knows tensors and slots; nothing of
sessions.
"""

from __future__ import annotations

import torch

from common.embedding import SharedWeights
from common.kernels.kv_store import store_context
from common.kernels.norm import add_rms_norm
from common.layers.attention import Mask
from common.layers.kernel_decoder import DecoderShape, KernelDecoder, KernelLayer, PagedRows
from common.layers.kernel_greedy import GreedyHead
from common.layers.kernel_linear import GemmScratch, KernelLinear, launches_may_overlap
from services.drafter.model.dflash_weights import DFlashLayer, Draft


class KernelDFlash:
    """A loaded draft. Weights are read-only; the KV cache belongs to the caller.

    On a CPU its kernels are interpreted (TRITON_INTERPRET=1): for tests. Used from one stream.
    """

    def __init__(
        self,
        draft: Draft,
        shared: SharedWeights,
        *,
        page_size: int,
        num_rows_max: int,
        num_keys_max: int,
        max_positions: int,
        row_independent: bool = False,
    ) -> None:
        """Runs where the weights lie. num_rows_max: rows of a call, captured ones or those of blocks.
        num_keys_max: keys of a block's attention. max_positions: positions that rows may have, at most
        `POSITIONS_BEYOND_CONTEXT` more than the draft's context. row_independent: see KernelLinear.
        CheckpointError where the kernels do not fit the draft."""
        c, weights = draft.config, draft.weights
        self.config = c
        self.contract = draft.contract
        self.dtype = shared.embedding.dtype
        self.device = shared.embedding.device
        self._pdl = launches_may_overlap(self.device)
        rope = draft.rope.cut(max_positions)
        self._cos, self._sin = rope.cos, rope.sin
        self._embedding = shared.embedding
        self._hidden_norm, self._norm = weights.hidden_norm, weights.norm
        self._k_norms = torch.stack([layer.k_norm for layer in weights.layers])
        self._decoder = KernelDecoder(
            DecoderShape(
                hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
            ),
            [_kernel_layer(layer, mask) for layer, mask in zip(weights.layers, c.layer_masks, strict=True)],
            rope.cos, rope.sin,
            page_size=page_size, num_rows_max=num_rows_max, num_keys_max=num_keys_max,
            row_independent=row_independent, pdl=self._pdl,
        )  # fmt: skip
        # One GEMM gives all layers' context K and V: [L * 2 * kv_heads * head_dim, H].
        context_kv = torch.cat([w for layer in weights.layers for w in (layer.k, layer.v)])
        scratch = GemmScratch.allocate(
            [weights.fc, context_kv], num_rows_max=num_rows_max, row_independent=row_independent
        )
        self._fc, self._context_kv = (
            KernelLinear(weight, scratch, row_independent=row_independent, pdl=self._pdl)
            for weight in (weights.fc, context_kv)
        )
        num_blocks_max = num_rows_max // c.block_size
        self._head = GreedyHead(
            shared.lm_head, num_rows_max=num_blocks_max * (c.block_size - 1),
            row_independent=row_independent, pdl=self._pdl,
        )  # fmt: skip
        # Rows 1 … K of each block: row 0 stands at the anchor's own position, nothing to predict there.
        rows = torch.arange(num_blocks_max * c.block_size, device=self.device, dtype=torch.int32)
        self._draft_rows = rows.view(-1, c.block_size)[:, 1:].flatten()
        self._residual, self._hidden, self._chosen_from = (
            torch.zeros(num_rows_max, c.hidden_size, dtype=self.dtype, device=self.device) for _ in range(3)
        )

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """num_layers, num_kv_heads, head_dim of the KV storage."""
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim

    @property
    def context_kv_width(self) -> int:
        """What `project_context` gives for a row: num_layers * 2 * num_kv_heads * head_dim."""
        num_layers, num_kv_heads, head_dim = self.kv_shape
        return num_layers * 2 * num_kv_heads * head_dim

    @torch.inference_mode()
    def project_context(self, captured: torch.Tensor, out_context_kv: torch.Tensor) -> None:
        """All layers' context K and V of captured rows, not yet normed or rotated.

        captured `[N, T * H]`, out_context_kv `[N, context_kv_width]`.
        """
        num_rows = captured.shape[0]
        features, normed = self._residual[:num_rows], self._hidden[:num_rows]
        self._fc(captured, features)
        add_rms_norm(
            features, None, self._hidden_norm, normed, eps=self.config.rms_norm_eps, pdl=self._pdl
        )
        self._context_kv(normed, out_context_kv)

    @torch.inference_mode()
    def store(
        self,
        context_kv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        kv: torch.Tensor,
        finite: torch.Tensor,
    ) -> None:
        """Store what `project_context` gave, keys normed and rotated.

        positions, slots `[N]` int32; kv `[num_layers, 2, num_slots, num_kv_heads, head_dim]`. finite
        `[N, num_layers]` uint8 becomes 1 where all that a row stores in a layer is finite. Captured rows that
        hold NaN or infinity, or overflow here, are not finite in any layer.
        """
        store_context(
            context_kv, positions, slots, self._cos, self._sin, self._k_norms, kv, finite,
            eps=self.config.rms_norm_eps, pdl=self._pdl,
        )  # fmt: skip

    @torch.inference_mode()
    def draft(self, ids: torch.Tensor, kv: torch.Tensor, rows: PagedRows, out_ids: torch.Tensor) -> None:
        """Draft blocks `[anchor, mask × K]`, greedy, ties to the lowest id.

        ids `[S * block_size]` int32, each of the vocabulary; rows.rows is block_size. The blocks' K/V goes to
        rows.slots and is overwritten by the next context. out_ids `[S, K]` int32, contiguous, each of the
        vocabulary, also where the logits are not finite or the sequence is padding.
        """
        num_rows, num_drafts = ids.shape[0], out_ids.numel()
        assert num_rows == out_ids.shape[0] * self.config.block_size == rows.positions.shape[0]
        x, hidden, chosen_from = (
            self._residual[:num_rows], self._hidden[:num_rows], self._chosen_from[:num_drafts],
        )  # fmt: skip
        torch.index_select(self._embedding, 0, ids, out=x)
        self._decoder.forward(x, kv, rows, self._norm, hidden)
        torch.index_select(hidden, 0, self._draft_rows[:num_drafts], out=chosen_from)
        self._head(chosen_from, out_ids.view(-1))


def _kernel_layer(layer: DFlashLayer, mask: Mask) -> KernelLayer:
    return KernelLayer(
        input_norm=layer.input_norm, qkv=torch.cat([layer.q, layer.k, layer.v]), q_norm=layer.q_norm,
        k_norm=layer.k_norm, o=layer.o, post_norm=layer.post_norm, gate_up=layer.gate_up, down=layer.down,
        mask=mask,
    )  # fmt: skip
