"""The Llama family on a GPU: the forward of llama.Llama by kernels, without an allocation.

Imports Triton: whatever also runs without it must import this late. Knows tensors and slots; nothing of
requests, sampling or drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.graphs import MemoryReport
from common.layers.attention import CAUSAL
from common.layers.kernel_decoder import DecoderShape, KernelDecoder, KernelLayer, PagedRows
from common.layers.kernel_linear import GemmScratch, KernelLinear, launches_may_overlap
from common.layers.linear import Weight
from services.target.model.llama import LlamaLayer, LlamaWeights


class KernelLlama:
    """A served target. Weights are read-only and not copied; the KV cache is the caller's.

    On a CPU its kernels are interpreted (TRITON_INTERPRET=1): for tests. Used from one stream.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        *,
        page_size: int,
        num_rows_max: int,
        num_keys_max: int,
        max_positions: int,
        row_independent: bool = False,
    ) -> None:
        """Runs where the weights lie. num_rows_max: rows of a forward. num_keys_max: keys of a sequence.
        max_positions: positions that rows may have, at most `POSITIONS_BEYOND_CONTEXT` more than the model's
        context. row_independent: see KernelLinear. CheckpointError where the kernels do not fit the model."""
        c = weights.config
        self.config = c
        self.contract = weights.contract
        self.dtype = weights.shared.embedding.dtype
        self.device = weights.shared.embedding.device
        pdl = launches_may_overlap(self.device)
        rope = weights.rope.cut(max_positions)
        self._embedding = weights.shared.embedding
        self._final_norm = weights.final_norm
        self._decoder = KernelDecoder(
            DecoderShape(
                hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps,
            ),
            [_kernel_layer(layer) for layer in weights.layers],
            rope.cos, rope.sin,
            page_size=page_size, num_rows_max=num_rows_max, num_keys_max=num_keys_max,
            row_independent=row_independent, pdl=pdl,
        )  # fmt: skip
        lm_head = weights.shared.lm_head
        scratch = GemmScratch.allocate([lm_head], num_rows_max=num_rows_max, row_independent=row_independent)
        self._lm_head = KernelLinear(lm_head, scratch, row_independent=row_independent, pdl=pdl)
        self._residual = torch.zeros(num_rows_max, c.hidden_size, dtype=self.dtype, device=self.device)
        self._weight_bytes = _num_bytes(weights)
        self._activation_bytes = self._decoder.num_bytes + scratch.num_bytes + self._residual.nbytes

    def memory_report(self) -> MemoryReport:
        """Bytes on the device: the weights, and what forwards need beside them."""
        return [("weights", self._weight_bytes), ("activations", self._activation_bytes)]

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """num_layers, num_kv_heads, head_dim of the KV storage."""
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim

    @property
    def vocab_rows(self) -> int:
        """Width of the logits."""
        return self._embedding.shape[0]

    @torch.inference_mode()
    def forward(
        self,
        ids: torch.Tensor,
        kv: torch.Tensor,
        rows: PagedRows,
        hidden_out: torch.Tensor,
        captured: torch.Tensor | None = None,
        captured_layer_ids: Sequence[int] = (),
    ) -> None:
        """Run rows through all layers, storing their K/V.

        ids `[N]` int32, each of the vocabulary; kv `[num_layers, 2, num_slots, num_kv_heads, head_dim]`.
        hidden_out `[N, H]`: the final norm's output, what `logits` takes. captured `[N, T · H]`: the residual
        stream after each captured layer, in the order of the ids.
        """
        x = self._residual[: ids.shape[0]]
        torch.index_select(self._embedding, 0, ids, out=x)
        self._decoder.forward(
            x, kv, rows, self._final_norm, hidden_out,
            captured=captured, captured_layer_ids=captured_layer_ids,
        )  # fmt: skip

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """lm_head over normed rows: hidden `[M, H]` to out `[M, vocab_rows]`, of the model's type."""
        self._lm_head(hidden, out)


def _kernel_layer(layer: LlamaLayer) -> KernelLayer:
    return KernelLayer(
        input_norm=layer.input_norm, qkv=_plain(layer.qkv), q_norm=layer.q_norm, k_norm=layer.k_norm,
        o=_plain(layer.o), post_norm=layer.post_norm, gate_up=_plain(layer.gate_up), down=_plain(layer.down),
        mask=CAUSAL,
    )  # fmt: skip


def _num_bytes(weights: LlamaWeights) -> int:
    """Each tensor once, also where embedding and lm_head are the same."""
    values = [weights.final_norm, *vars(weights.shared).values(), *vars(weights.rope).values()]
    for layer in weights.layers:
        values += vars(layer).values()
    tensors = {value.data_ptr(): value for value in values if isinstance(value, torch.Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values())


def _plain(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor), "only a served CPU model packs its weights"
    return weight
