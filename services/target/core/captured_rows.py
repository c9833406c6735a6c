"""Captured states on their way to the host, for a drafter that is reached by messages."""

from __future__ import annotations

import torch

from common.handoff.ring import Ring


class CapturedRows:
    """Pinned memory for what a launch captures at most, allocated once: 250 MB for 32 requests with blocks of
    16 and 2,048 prompt rows at 8B scale, 600 MB with 256."""

    def __init__(self, ring: Ring, *, num_lanes: int, pinned: bool) -> None:
        self._ring = ring
        num_rows = ring.shape.extend_rows_max + num_lanes * ring.shape.block_size
        self._rows = torch.empty(
            num_rows, ring.shape.captured_width, dtype=ring.shape.dtype, pin_memory=pinned
        )  # fmt: skip

    def copy(self, num_extend_rows: int, num_block_rows: int) -> torch.Tensor:
        """Enqueue the copy of so many rows of the ring's, extends first; they are there when it is done."""
        rows = self._rows[: num_extend_rows + num_block_rows]
        rows[:num_extend_rows].copy_(self._ring.extend_captured[:num_extend_rows], non_blocking=True)
        rows[num_extend_rows:].copy_(self._ring.verify_captured[:num_block_rows], non_blocking=True)
        return rows
