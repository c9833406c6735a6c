"""What the host tells the device for a launch: written in place into pinned memory, sent in one copy each.

Knows layouts (common/kernels/lanes.py, extend_rows.py) and sizes; nothing of models or graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common import limits
from common.kernels.extend_rows import ExtendBatch
from common.kernels.lanes import (
    DRAFTS_START,
    ENTRY_WORDS,
    HEADER_WORDS,
    JOIN_WORDS,
    NUM_ENTRIES,
    NUM_JOINS,
)
from common.kernels.paged_attention import RaggedRows, Tile, row_tiles
from common.kernels.sampling import min_p_reach
from common.paged_kv import PageEntry
from common.pinned_ring import PinnedRing, Words
from services.target.core.device_launch import ExtendRows
from services.target.core.request import SamplingParams

# Launches whose results are not read yet, at most: the loop runs one or two ahead.
LAUNCHES_IN_FLIGHT_MAX = 4


def join_words(lane: int, sampling: SamplingParams) -> Words:
    """A lane that begins, as common.kernels.lanes reads it."""
    words = np.zeros(JOIN_WORDS, np.int32)
    words[[0, 2]] = lane, sampling.top_k
    reals = words.view(np.float32)
    reals[1], reals[3], reals[4] = sampling.temperature, sampling.top_p, min_p_reach(sampling.min_p)
    words.view(np.uint32)[5:7] = sampling.seed & 0xFFFFFFFF, sampling.seed >> 32
    return words


class LaneControl:
    """Which lanes decode on which drafts, what lanes begin, which pages are new, and inline drafts."""

    def __init__(self, num_lanes: int, num_pages: int, num_pages_each: int, device: torch.device) -> None:
        """num_pages: of the pool, num_pages_each: of a lane's table."""
        self._num_lanes, self._num_pages_each = num_lanes, num_pages_each
        self.first_join = HEADER_WORDS + 2 * num_lanes
        # Every lane joins, every page is entered, every lane has the longest draft.
        num_words = self.first_join + num_lanes * (JOIN_WORDS + limits.BLOCK_SIZE_MAX)
        self._ring = PinnedRing(num_words + num_pages * ENTRY_WORDS, LAUNCHES_IN_FLIGHT_MAX, device)
        self.device = self._ring.device
        self.lanes = self.device[HEADER_WORDS : HEADER_WORDS + num_lanes]
        self.draft_rows = self.device[HEADER_WORDS + num_lanes : self.first_join]
        self.reset()

    def reset(self) -> None:
        """Let the device see padding only."""
        self.device.zero_()
        self.lanes.fill_(self._num_lanes)
        self.draft_rows.fill_(-1)

    def upload(
        self,
        number: int,
        lanes: Sequence[int],
        draft_rows: Sequence[int],
        bucket: int,
        joins: Sequence[Words],
        pages: Sequence[PageEntry],
        drafts: Words | None,
    ) -> None:
        """Write launch `number` and enqueue its copy. bucket: lanes that the graph takes; drafts `[any, K]`:
        sent along, draft_rows are its rows."""
        words, num_lanes = self._ring.words(number), len(lanes)
        words[NUM_JOINS], words[NUM_ENTRIES], words[DRAFTS_START] = len(joins), len(pages), 0
        at = HEADER_WORDS
        words[at : at + num_lanes] = lanes
        words[at + num_lanes : at + bucket] = self._num_lanes
        at += self._num_lanes
        words[at : at + bucket] = -1
        words[at : at + len(draft_rows)] = draft_rows
        at = self.first_join
        for join in joins:
            words[at : at + JOIN_WORDS] = join
            at += JOIN_WORDS
        if pages:
            entries = words[at : at + len(pages) * ENTRY_WORDS].reshape(-1, ENTRY_WORDS)
            entries[:] = pages
            assert entries[:, 1].max() < self._num_pages_each, "a page beyond its table"
            at += len(pages) * ENTRY_WORDS
        if drafts is not None:
            words[DRAFTS_START] = at
            words[at : at + drafts.size] = drafts.ravel()
            at += drafts.size
        self._ring.upload(number, at)


class ExtendControl:
    """Prompt rows of a launch."""

    def __init__(
        self, num_rows_max: int, num_extends_max: int, sentinel: int, group: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        """group: query heads per K/V head; dtype: of the model, for the tiles of attention."""
        self._sentinel, self._group, self._dtype = sentinel, group, dtype
        sizes = {
            "row_starts": num_extends_max + 1,
            "lanes": num_extends_max,
            "starts": num_extends_max,
            "samples": num_extends_max,
            "ring_rows": num_extends_max,
            "tiles": 2 * self._num_tiles(num_rows_max, num_extends_max),
            "row_sequences": num_rows_max,
            "ids": num_rows_max,
        }
        self._places: dict[str, slice] = {}
        at = 0
        for name, size in sizes.items():
            self._places[name] = slice(at, at + size)
            at += size
        self._ring = PinnedRing(at, LAUNCHES_IN_FLIGHT_MAX, device)
        self.reset()

    def reset(self) -> None:
        """Let the device see padding only."""
        device = self._ring.device
        device.zero_()
        device[self._places["lanes"]] = self._sentinel
        device[self._places["tiles"]] = -1
        device[self._places["row_sequences"]] = -1

    def batch(self, num_rows: int, num_extends: int) -> tuple[ExtendBatch, RaggedRows]:
        """What a graph over so many rows and prompts reads."""
        view = {name: self._ring.device[place] for name, place in self._places.items()}
        row_starts = view["row_starts"][: num_extends + 1]
        tiles = view["tiles"].view(-1, 2)[: self._num_tiles(num_rows, num_extends)]
        batch = ExtendBatch(
            ids=view["ids"][:num_rows], row_sequences=view["row_sequences"][:num_rows],
            row_starts=row_starts, lanes=view["lanes"][:num_extends], starts=view["starts"][:num_extends],
            samples=view["samples"][:num_extends], ring_rows=view["ring_rows"][:num_extends],
        )  # fmt: skip
        return batch, RaggedRows(row_starts, tiles)

    def upload(self, number: int, extends: Sequence[ExtendRows], num_rows: int, num_extends: int) -> None:
        """Write launch `number` and enqueue its copy. Its graph takes num_rows rows, num_extends prompts."""
        words = self._ring.words(number)
        view = {name: words[place] for name, place in self._places.items()}
        view["lanes"][: len(extends)] = [extend.lane for extend in extends]
        view["lanes"][len(extends) : num_extends] = self._sentinel
        view["starts"][: len(extends)] = [extend.start for extend in extends]
        view["samples"][:num_extends] = 0
        view["samples"][: len(extends)] = [extend.samples for extend in extends]
        view["ring_rows"][: len(extends)] = [extend.ring_row for extend in extends]
        view["row_starts"][0] = row = 0
        for i, extend in enumerate(extends):
            first, row = row, row + len(extend.token_ids)
            view["ids"][first:row] = extend.token_ids
            view["row_sequences"][first:row] = i
            view["row_starts"][i + 1] = row
        view["row_starts"][len(extends) + 1 : num_extends + 1] = row
        view["row_sequences"][row:num_rows] = -1
        tiles = row_tiles([len(extend.token_ids) for extend in extends], self._group, self._dtype)
        view["tiles"][: 2 * len(tiles)].reshape(-1, 2)[:] = tiles
        view["tiles"][2 * len(tiles) : 2 * self._num_tiles(num_rows, num_extends)] = -1
        self._ring.upload(number, len(words))

    def _num_tiles(self, num_rows: int, num_extends: int) -> int:
        """Row tiles at most: each prompt may end in the middle of one."""
        return num_rows * self._group // Tile.of(self._dtype).rows + num_extends
