"""Overlap of a kernel with the one before it on its stream: programmatic dependent launch, L2 prefetch.

A kernel launched with `launch_pdl=True` may start while its predecessor still runs. Then

- whatever an earlier kernel wrote may be read, and anything may be written, only after
  `await_previous`, which returns when the predecessor is complete and its writes are visible;
- each program calls `await_previous`, also one that has nothing to do: the successor takes this
  kernel's end for the end of everything before it;
- weights never change, so they may be fetched before.

With pdl False (the interpreter, GPUs before Hopper) nothing of this exists and launches are ordered
as ever.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Block until every kernel launched before this one is complete."""
    if PDL:
        cuda.gdc_wait()


@triton.jit
def admit_next(PDL: tl.constexpr):
    """Let the next kernel's programs start as soon as all of this one's have come here and room is left."""
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(first, row_bytes, num_bytes, NUM_ROWS: tl.constexpr, PIECES: tl.constexpr):
    """Ask for num_bytes (divisible by 16 * PIECES) of each of NUM_ROWS rows in L2, without waiting.

    first: pointer to the first byte wanted of the first row, aligned to 16 bytes; row_bytes: distance of
    rows. NUM_ROWS * PIECES requests, one a thread when that is the number of threads.
    """
    request = tl.arange(0, NUM_ROWS * PIECES)
    piece_bytes = num_bytes // PIECES
    address = (
        first.to(tl.int64) + (request // PIECES).to(tl.int64) * row_bytes + (request % PIECES) * piece_bytes
    )
    size = tl.zeros([NUM_ROWS * PIECES], tl.int32) + piece_bytes
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
