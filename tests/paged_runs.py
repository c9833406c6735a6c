"""Runs a target model over pieces of sequences on real pages, without scheduler or engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from common.layers.attention import RaggedBatch, Span, key_slots
from common.paged_kv import PagePool, PageTable
from services.target.model.llama import Llama


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of sequence `owner`, whose tokens are ids."""

    owner: int
    ids: list[int]
    stop: int
    start: int = 0

    @property
    def num_rows(self) -> int:
        return self.stop - self.start


@torch.inference_mode()
def run_pieces(
    model: Llama,
    steps: Sequence[Sequence[Piece]],
    *,
    taps: tuple[int, ...] = (),
    pool: PagePool | None = None,
    garbage: float = 0.0,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each step is one forward. Returns logits `[N, V]` and captured states (empty without taps) of each.

    garbage fills the K/V storage first, as if others had left it there.
    """
    pool = pool or PagePool(num_pages=64, page_size=16)
    layers, kv_heads, dim = model.kv_shape
    kv = torch.full((layers, 2, pool.num_slots, kv_heads, dim), garbage, dtype=model.dtype)
    tables: dict[int, PageTable] = {}
    results = []
    for step in steps:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        for piece in step:
            table = tables.setdefault(piece.owner, PageTable(pool))
            table.reserve(piece.stop)
            keys = key_slots(table.pages, pool.page_size, piece.stop)
            spans.append(Span(len(ids), len(ids) + piece.num_rows, keys, piece.stop))
            ids += piece.ids[piece.start : piece.stop]
            positions += range(piece.start, piece.stop)
            slots += table.slots(piece.start, piece.stop)
        batch = RaggedBatch(torch.tensor(positions), torch.tensor(slots), spans)
        hidden, captured = model.forward(torch.tensor(ids), kv, batch, taps)
        results.append((model.logits(hidden), torch.empty(0) if captured is None else captured))
    return results
