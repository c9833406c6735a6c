"""Fakes of what runs on a GPU, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.layers.attention import RaggedBatch, Span
from common.layers.kernel_decoder import PagedRows
from services.target.model.llama import Llama, LlamaWeights


class PagedLlama:
    """KernelLlama's interface over the CPU's forward: a launch takes milliseconds where the interpreter
    takes seconds. Rows of padding sequences come out as NaN, which the kernels may do too."""

    def __init__(self, weights: LlamaWeights, page_size: int) -> None:
        self._llama = Llama(weights)
        self._page_size = page_size
        self.config, self.contract, self.dtype = weights.config, weights.contract, self._llama.dtype
        self.device = torch.device("cpu")
        self.kv_shape = self._llama.kv_shape
        self.vocab_rows = weights.shared.embedding.shape[0]

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
        spans = []
        for sequence, kv_len in enumerate(rows.kv_lens.tolist()):
            if isinstance(rows.rows, int):
                first, stop = sequence * rows.rows, (sequence + 1) * rows.rows
            else:
                first, stop = rows.rows.row_starts[sequence : sequence + 2].tolist()
            if kv_len:
                keys = torch.arange(kv_len)
                pages = rows.page_table[sequence, keys // self._page_size].long()
                spans.append(Span(first, stop, pages * self._page_size + keys % self._page_size, kv_len))
        batch = RaggedBatch(rows.positions.long(), rows.slots.long(), spans)
        hidden, states = self._llama.forward(ids.long(), kv, batch, tuple(captured_layer_ids))
        used = torch.zeros(len(ids), dtype=torch.bool)
        for span in spans:
            used[span.row_start : span.row_stop] = True
        hidden_out.copy_(hidden.masked_fill(~used.unsqueeze(1), float("nan")))
        if captured is not None and states is not None:
            captured.copy_(states)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(self._llama.logits(hidden))
