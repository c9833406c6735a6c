"""The drafter's tensors: its KV cache, and the two things done with it: append context, draft blocks.

One append and one block forward serve all sessions of a message. Knows slots and pages; must not know
sessions, epochs, protobuf or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.layers.attention import RaggedBatch, Span, key_slots, slot_index
from common.paged_kv import PagePool
from services.drafter.model.dflash import DFlash


@dataclass(frozen=True)
class PlacedBlock:
    """A draft block to compute, with its place in the cache.

    position: of the anchor, absolute. num_context: rows of context before it, which with the block lie
    in `pages`, in order. slots: where the block's own rows go, one for each.
    """

    anchor: int
    position: int
    num_context: int
    pages: tuple[int, ...]
    slots: list[int]


class DraftEngine:
    """Owns the KV cache. Called from one thread."""

    def __init__(self, model: DFlash, pool: PagePool) -> None:
        """Allocates `[num_layers, 2, num_slots, num_kv_heads, head_dim]`, the sentinel page included."""
        c = model.config
        self._model = model
        self._page_size = pool.page_size
        self._kv = torch.zeros(c.num_layers, 2, pool.num_slots, c.num_kv_heads, c.head_dim, dtype=model.dtype)

    @torch.inference_mode()
    def append_to_host(self, captured: torch.Tensor, positions: list[int], slots: list[int]) -> list[bool]:
        """Store the context K/V of captured rows `[N, num_captured_layers * hidden_size]`.

        Returns for each row whether what it stored is finite.
        """
        finite = self._model.append_context(captured, torch.tensor(positions), slot_index(slots), self._kv)
        return finite.tolist()

    @torch.inference_mode()
    def draft_to_host(self, blocks: Sequence[PlacedBlock]) -> torch.Tensor:
        """Draft after each anchor: `[len(blocks), num_draft_tokens]` int32, each id below vocab_rows."""
        size = self._model.config.block_size
        spans = []
        positions: list[int] = []
        slots: list[int] = []
        for i, block in enumerate(blocks):
            num_keys = block.num_context + size
            keys = key_slots(block.pages, self._page_size, num_keys)
            spans.append(Span(i * size, (i + 1) * size, keys, num_keys))
            positions += range(block.position, block.position + size)
            slots += block.slots
        batch = RaggedBatch(torch.tensor(positions), torch.tensor(slots), spans)
        anchors = torch.tensor([block.anchor for block in blocks])
        return self._model.draft(anchors, self._kv, batch).to(torch.int32)

    def clean(self, pages: Sequence[int]) -> None:
        """Zero pages that held rows which were not finite: nobody inherits a NaN."""
        for page in pages:
            self._kv[:, :, page * self._page_size : (page + 1) * self._page_size] = 0
