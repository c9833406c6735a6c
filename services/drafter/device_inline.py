"""Inline messages on a device: rows and blocks whose places the host knows, one message at a time.

The interface of engine.DraftEngine over the kernels and graphs that also serve the ring. Waits for what it
asks: whoever sends states as bytes waits for the drafts as well.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from common.graphs import Graphs, bucket_for
from services.drafter.device_tensors import DraftTensors
from services.drafter.engine import PlacedBlock

if TYPE_CHECKING:
    from services.drafter.model.kernel_dflash import KernelDFlash

# Captured rows that are stored at once: few, or at most so many. A message of 2 MiB holds 51 at 8B scale.
_FEW_ROWS, _ROWS_MAX = 16, 64


class InlineDrafting:
    """Stages what the host placed. captured `[at most 64, num_captured_layers * hidden_size]`."""

    def __init__(
        self, tensors: DraftTensors, graphs: Graphs, model: KernelDFlash, block_buckets: list[int]
    ) -> None:
        """graphs: has, for each of block_buckets, one named ("draft", bucket) when a block is drafted."""
        width = len(model.contract.captured_layer_ids) * model.config.hidden_size
        rows_max = min(_ROWS_MAX, tensors.context.slots.shape[0])
        self._row_buckets = [size for size in (_FEW_ROWS,) if size < rows_max] + [rows_max]
        self.captured = torch.zeros(rows_max, width, dtype=model.dtype, device=model.device)
        self._tensors = tensors
        self._graphs = graphs
        self._block_buckets = block_buckets
        self._block_size, self._mask_token_id = model.config.block_size, model.config.mask_token_id

    def bodies(self) -> list[tuple[Hashable, Callable[[], None]]]:
        """What must be captured before the first append."""
        return [
            (("rows", size), partial(self._tensors.store_context, self.captured[:size]))
            for size in reversed(self._row_buckets)
        ]

    def append_to_host(self, captured: torch.Tensor, positions: list[int], slots: list[int]) -> list[bool]:
        """Store the context K/V of captured rows `[N, num_captured_layers * hidden_size]`; whether what each
        stored is finite."""
        found, most = [], self._row_buckets[-1]
        for first in range(0, len(positions), most):
            rows = slice(first, min(first + most, len(positions)))
            num_rows = rows.stop - rows.start
            size = bucket_for(self._row_buckets, num_rows)
            places = np.zeros((2, size), np.int32)
            places[:, :num_rows] = positions[rows], slots[rows]
            staged = self._tensors.context_rows(size)
            _upload(staged.positions, places[0])
            _upload(staged.slots, places[1])
            self.captured[:num_rows].copy_(captured[rows])
            self._graphs.replay(("rows", size))
            found.append(self._tensors.finite[:num_rows].clone())
        return torch.cat(found).bool().all(dim=1).tolist() if found else []

    def draft_to_host(self, blocks: Sequence[PlacedBlock]) -> torch.Tensor:
        """Draft after each anchor: `[len(blocks), num_draft_tokens]` int32."""
        most = self._block_buckets[-1]
        drafted = [self._tensors.drafted[:0].cpu()]
        for first in range(0, len(blocks), most):
            batch = blocks[first : first + most]
            bucket = bucket_for(self._block_buckets, len(batch))
            self._stage(batch, bucket)
            self._graphs.replay(("draft", bucket))
            drafted.append(self._tensors.drafted[: len(batch)].cpu())
        return torch.cat(drafted)

    def _stage(self, batch: Sequence[PlacedBlock], bucket: int) -> None:
        num_blocks, size = len(batch), self._block_size
        ids = np.full((bucket, size), self._mask_token_id, np.int32)
        positions, slots = np.zeros((2, bucket, size), np.int32)
        kv_lens = np.zeros(bucket, np.int32)
        page_table = np.zeros((num_blocks, max(len(block.pages) for block in batch)), np.int32)
        ids[:num_blocks, 0] = [block.anchor for block in batch]
        for i, block in enumerate(batch):
            positions[i] = np.arange(block.position, block.position + size)
            slots[i] = block.slots
            kv_lens[i] = block.num_context + size
            page_table[i, : len(block.pages)] = block.pages
        staged = self._tensors.block_rows(bucket)
        _upload(staged.ids, ids.ravel())
        _upload(staged.positions, positions.ravel())
        _upload(staged.slots, slots.ravel())
        _upload(staged.kv_lens, kv_lens)
        _upload(staged.page_table[:num_blocks, : page_table.shape[1]], page_table)


def _upload(place: torch.Tensor, numbers: NDArray[np.int32]) -> None:
    place.copy_(torch.from_numpy(numbers))
