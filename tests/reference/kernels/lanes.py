"""A lane's pages, one position at a time."""

from __future__ import annotations


def slots(page_table: list[int], positions: list[int], page_size: int) -> list[int]:
    """Slots of positions; those past the table lie in page 0."""
    pages = [page_table[p // page_size] if p // page_size < len(page_table) else 0 for p in positions]
    return [page * page_size + p % page_size for page, p in zip(pages, positions, strict=True)]


def pages_needed(num_keys: int, page_size: int) -> int:
    return -(-num_keys // page_size)
