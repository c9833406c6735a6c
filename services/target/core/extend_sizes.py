"""Which prompt batches get graphs: so many rows of so many prompts. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# A graph takes a prompt for each of so many rows: with few prompts attention has few row tiles, and so
# splits a long context over the GPU. The largest graph takes all.
_ROWS_PER_EXTEND = 16


class ExtendSize(NamedTuple):
    """Rows and prompts that a graph takes at most."""

    num_rows: int
    num_extends: int


def extend_sizes(row_buckets: Sequence[int], extends_max: int) -> list[ExtendSize]:
    """Rising. row_buckets rise too; those too small to be worth a graph of their own are left out."""
    *smaller, largest = row_buckets
    sizes = [
        ExtendSize(rows, min(extends_max, -(-rows // _ROWS_PER_EXTEND)))
        for rows in smaller
        if rows >= _ROWS_PER_EXTEND
    ]
    return [*sizes, ExtendSize(largest, extends_max)]


def extend_size_for(sizes: Sequence[ExtendSize], num_rows: int, num_extends: int) -> ExtendSize:
    """The smallest that holds so many rows of so many prompts."""
    for size in sizes:
        if num_rows <= size.num_rows and num_extends <= size.num_extends:
            return size
    raise AssertionError(f"{num_rows} rows of {num_extends} prompts are more than {sizes[-1]}")
