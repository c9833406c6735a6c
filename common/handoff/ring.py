"""The hand-off ring: where captured states, accept lengths and drafts lie in one piece of GPU memory.

Layout and typed views only: both processes compute the same offsets from the same shape. Makes no CUDA
call and knows nothing of who owns the memory. What the target reads back is `drafts` and nothing else:
whoever has mapped the ring may write any of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common import limits
from common.errors import InvalidRequest

# What a GPU's loads and its allocator are aligned to.
ALIGNMENT_BYTES = 256

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Region(NamedTuple):
    """A tensor's place in the allocation; offset in bytes."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class RingShape:
    """The numbers that fix a ring. InvalidRequest names the one that is out of range.

    num_rows: batch rows at most. captured_width: num_captured_layers * hidden_size, of type dtype.
    extend_rows_max: prompt rows of a step at most.
    """

    num_rows: int
    block_size: int
    num_draft_tokens: int
    captured_width: int
    dtype: torch.dtype
    extend_rows_max: int

    def __post_init__(self) -> None:
        limits.check_range("num_rows", self.num_rows, 1, limits.REQUESTS_RUNNING_MAX)
        limits.check_range("block_size", self.block_size, 2, limits.BLOCK_SIZE_MAX)
        limits.check_range("num_draft_tokens", self.num_draft_tokens, 1, self.block_size - 1)
        limits.check_range("captured_width", self.captured_width, 1, limits.CAPTURED_WIDTH_MAX)
        limits.check_range("extend_rows_max", self.extend_rows_max, 1, limits.EXTEND_ROWS_MAX)
        if self.dtype not in _DTYPES:
            raise InvalidRequest("dtype", limit="float32, bfloat16 or float16", given=self.dtype)
        limits.check_range("ring bytes", self.num_bytes, 1, limits.RING_BYTES_MAX)

    @property
    def regions(self) -> dict[str, Region]:
        """Where each of Ring's tensors lies, by name, without overlap."""
        rows, i32 = self.num_rows, torch.int32
        tensors = {
            "base": ((rows,), i32),
            "count": ((rows,), i32),
            "anchor": ((rows,), i32),
            "drafts": ((rows, self.num_draft_tokens), i32),
            "verify_captured": ((rows * self.block_size, self.captured_width), self.dtype),
            "extend_captured": ((self.extend_rows_max, self.captured_width), self.dtype),
        }
        regions, offset = {}, 0
        for name, (shape, dtype) in tensors.items():
            region = Region(offset, shape, dtype)
            regions[name] = region
            offset = _aligned(offset + region.num_bytes)
        return regions

    @property
    def num_bytes(self) -> int:
        """Bytes from the first tensor to the end of the last, in unbounded integers."""
        last = self.regions["extend_captured"]
        return _aligned(last.offset + last.num_bytes)


class Ring:
    """Views into one allocation; the target writes all but `drafts`.

    verify_captured `[num_rows * block_size, captured_width]`: batch row i's verify rows are
    [i * block_size, (i + 1) * block_size). extend_captured `[extend_rows_max, captured_width]`.
    base, count, anchor `[num_rows]` int32: the position of batch row i's first verify row (the anchor before
    the step); how many of its rows became context (num_accepted + 1, or 0 for a request whose prompt has
    just ended); its new anchor, which stands at base + count.
    drafts `[num_rows, num_draft_tokens]` int32, written by the drafter: any value may be in there.
    """

    def __init__(self, shape: RingShape, buffer: torch.Tensor) -> None:
        self.shape = shape
        self.buffer = buffer
        self.base = self._view("base")
        self.count = self._view("count")
        self.anchor = self._view("anchor")
        self.drafts = self._view("drafts")
        self.verify_captured = self._view("verify_captured")
        self.extend_captured = self._view("extend_captured")

    @classmethod
    def local(cls, shape: RingShape, device: torch.device | str) -> Ring:
        """A zeroed ring of this process alone."""
        return cls.over(shape, torch.zeros(shape.num_bytes, dtype=torch.uint8, device=device))

    @classmethod
    def over(cls, shape: RingShape, buffer: torch.Tensor) -> Ring:
        """A ring in memory that is there: buffer `[at least shape.num_bytes]` uint8, contiguous. What is in
        it stays."""
        assert buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
        if buffer.numel() < shape.num_bytes:
            raise InvalidRequest(
                "ring bytes", limit=f"at least {shape.num_bytes}", given=buffer.numel()
            )  # fmt: skip
        return cls(shape, buffer)

    def _view(self, name: str) -> torch.Tensor:
        region = self.shape.regions[name]
        content = self.buffer[region.offset : region.offset + region.num_bytes]
        return content.view(region.dtype).view(region.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
