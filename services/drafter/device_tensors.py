"""All that the drafter's graphs read and write on the device, allocated once at its largest, and the two
things that are done with it: storing staged context, drafting staged blocks.

Knows the model, slots and staged rows; not who staged them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from common.graphs import MemoryReport
from common.kernels.draft_lanes import StagedBlocks, StagedContext
from common.layers.kernel_decoder import PagedRows

if TYPE_CHECKING:
    from services.drafter.model.kernel_dflash import KernelDFlash


class DraftTensors:
    """The KV cache `[num_layers, 2, num_slots, num_kv_heads, head_dim]` and what is staged for it.

    context `[num_context_rows_max]`; blocks `[num_blocks_max]`; drafted `[num_blocks_max, K]` int32; finite
    `[num_context_rows_max, num_layers]` uint8: of the rows stored last.
    """

    def __init__(
        self,
        model: KernelDFlash,
        *,
        num_pages: int,
        page_size: int,
        num_blocks_max: int,
        num_context_rows_max: int,
        page_table_width: int,
    ) -> None:
        """num_pages counts the usable ones; the sentinel page 0 comes on top."""
        num_layers, num_kv_heads, head_dim = model.kv_shape
        device, block_size = model.device, model.config.block_size
        num_slots, num_rows = (num_pages + 1) * page_size, num_blocks_max * block_size

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._model = model
        self._page_size = page_size
        self._block_size = block_size
        self.kv = zeros(num_layers, 2, num_slots, num_kv_heads, head_dim, dtype=model.dtype)
        self.context = StagedContext(zeros(num_context_rows_max), zeros(num_context_rows_max))
        self.blocks = StagedBlocks(
            ids=zeros(num_rows), positions=zeros(num_rows), slots=zeros(num_rows),
            kv_lens=zeros(num_blocks_max), page_table=zeros(num_blocks_max, page_table_width),
        )  # fmt: skip
        self.drafted = zeros(num_blocks_max, model.contract.num_draft_tokens)
        self.finite = zeros(num_context_rows_max, num_layers, dtype=torch.uint8)
        self._context_kv = zeros(num_context_rows_max, model.context_kv_width, dtype=model.dtype)

    def context_rows(self, num_rows: int) -> StagedContext:
        """Views of the first rows."""
        return StagedContext(self.context.positions[:num_rows], self.context.slots[:num_rows])

    def block_rows(self, num_blocks: int) -> StagedBlocks:
        """Views of the first blocks."""
        blocks, num_rows = self.blocks, num_blocks * self._block_size
        return StagedBlocks(
            blocks.ids[:num_rows], blocks.positions[:num_rows], blocks.slots[:num_rows],
            blocks.kv_lens[:num_blocks], blocks.page_table[:num_blocks],
        )  # fmt: skip

    def store_context(self, captured: torch.Tensor) -> None:
        """Store the context K/V of captured rows `[N, num_captured_layers * hidden_size]` where the first N
        staged rows say."""
        num_rows = captured.shape[0]
        context_kv, places = self._context_kv[:num_rows], self.context_rows(num_rows)
        self._model.project_context(captured, context_kv)
        self._model.store(context_kv, places.positions, places.slots, self.kv, self.finite[:num_rows])

    def draft_blocks(self, num_blocks: int) -> None:
        """Draft the first staged blocks into `drafted`."""
        staged = self.block_rows(num_blocks)
        rows = PagedRows(
            positions=staged.positions, slots=staged.slots, page_table=staged.page_table,
            kv_lens=staged.kv_lens, rows=self._block_size,
        )  # fmt: skip
        self._model.draft(staged.ids, self.kv, rows, self.drafted[:num_blocks])

    def clean(self, pages: Sequence[int]) -> None:
        """Zero pages that held rows which were not finite: nobody inherits a NaN."""
        for page in pages:
            self.kv[:, :, page * self._page_size : (page + 1) * self._page_size].zero_()

    @property
    def memory(self) -> MemoryReport:
        """Bytes of each region."""
        blocks, context = self.blocks, self.context
        staged = (
            blocks.ids, blocks.positions, blocks.slots, blocks.kv_lens, blocks.page_table,
            context.positions, context.slots, self.drafted, self.finite,
        )  # fmt: skip
        return [
            ("draft KV pages", self.kv.nbytes),
            ("draft context projection", self._context_kv.nbytes),
            ("draft staged rows", sum(tensor.nbytes for tensor in staged)),
        ]
