"""Pieces of sequences on shuffled pages, laid out for the kernels and for torch alike."""

from __future__ import annotations

import random

import torch

from common.kernels.paged_attention import RaggedRows, row_tiles
from common.layers.attention import RaggedBatch, Span, key_slots
from common.layers.kernel_decoder import PagedRows
from common.paged_kv import PagePool, PageTable
from tests.paged_runs import Piece


class Pages:
    """Tables of sequences over one pool, whose pages come in random order."""

    def __init__(self, num_pages: int, page_size: int, seed: int) -> None:
        self.pool = PagePool(num_pages, page_size)
        random.Random(seed).shuffle(self.pool._free)
        self._tables: dict[int, PageTable] = {}

    def table(self, owner: int, num_tokens: int) -> PageTable:
        """The owner's table, with room for num_tokens."""
        table = self._tables.setdefault(owner, PageTable(self.pool))
        table.reserve(num_tokens)
        return table

    def kept_slots(self, lengths: dict[int, int]) -> torch.Tensor:
        """Slots of the first so many positions of each owner."""
        return torch.tensor([s for owner, n in lengths.items() for s in self.table(owner, n).slots(0, n)])


def for_torch(pages: Pages, step: list[Piece], device: str) -> RaggedBatch:
    """The rows of a step, one span a piece."""
    spans, row = [], 0
    for piece in step:
        keys = key_slots(pages.table(piece.owner, piece.stop).pages, pages.pool.page_size, piece.stop)
        spans.append(Span(row, row + piece.num_rows, keys, piece.stop))
        row += piece.num_rows
    positions, slots = _positions_and_slots(pages, step)
    return RaggedBatch(positions.to(device), slots.to(device), spans)


def for_kernels(
    pages: Pages, step: list[Piece], device: str, *, group: int, dtype: torch.dtype, padding: int,
    ragged: bool,
) -> PagedRows:  # fmt: skip
    """The same rows, with padding behind them: so many sequences, each of the others' number of rows; of
    ragged rows so many rows and tiles, and sequences without rows. group: query heads per K/V head."""
    num_rows = [piece.num_rows for piece in step]
    positions, slots = _positions_and_slots(pages, step)
    width = max(pages.table(piece.owner, piece.stop).num_pages for piece in step) + 2
    page_table = torch.zeros(len(step) + padding, width, dtype=torch.int32)
    for i, piece in enumerate(step):
        own = pages.table(piece.owner, piece.stop).pages
        page_table[i, : len(own)] = torch.tensor(own)
    kv_lens = [piece.stop for piece in step] + [0] * padding
    rows: int | RaggedRows = num_rows[0]
    if ragged:
        tiles = row_tiles(num_rows, group, dtype) + [(-1, 0)] * padding
        starts = torch.tensor([0, *num_rows] + [0] * padding).cumsum(0)
        rows = RaggedRows(_int32(starts, device), _int32(torch.tensor(tiles), device))
    else:
        assert len(set(num_rows)) == 1
    num_padding_rows = padding if ragged else padding * num_rows[0]
    more = torch.zeros(num_padding_rows, dtype=torch.int64)
    return PagedRows(
        _int32(torch.cat([positions, more]), device), _int32(torch.cat([slots, more]), device),
        page_table.to(device), _int32(torch.tensor(kv_lens), device), rows,
    )  # fmt: skip


def _positions_and_slots(pages: Pages, step: list[Piece]) -> tuple[torch.Tensor, torch.Tensor]:
    positions = [p for piece in step for p in range(piece.start, piece.stop)]
    slots = [
        slot for piece in step
        for slot in pages.table(piece.owner, piece.stop).slots(piece.start, piece.stop)
    ]  # fmt: skip
    return torch.tensor(positions), torch.tensor(slots)


def _int32(values: torch.Tensor, device: str) -> torch.Tensor:
    return values.to(device, torch.int32)
