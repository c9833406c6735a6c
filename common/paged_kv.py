"""Pages of a KV cache: which are free, who owns which. Host bookkeeping only, no torch.

A slot is `page * page_size + offset`. Page 0 is the sentinel: padding rows write there, nobody
owns it, nobody reads it. Invariant (I3): free pages + pages in their owners' tables = all pages; whoever
keeps the tables checks it.
"""

from __future__ import annotations

from typing import NamedTuple


class PageEntry(NamedTuple):
    """Entry `page_index` of a lane's page table becomes `page`: how new pages are told to a device, where a
    lane is the row that an owner has in arrays while it runs."""

    lane: int
    page_index: int
    page: int


class OutOfPages(Exception):
    """The pool has fewer free pages than were asked for; nothing was taken."""


class PagePool:
    """A fixed number of pages. `allocate` and `free` are each other's inverse."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        """num_pages counts the usable ones; the sentinel comes on top."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages {num_pages} and page_size {page_size} must be positive")
        self.num_pages = num_pages
        self.page_size = page_size
        # Ascending pops keep a young request's pages contiguous, which the CPU attention reads
        # as one slice.
        self._free = list(range(num_pages, 0, -1))
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_slots(self) -> int:
        """Slots of the storage, the sentinel's included."""
        return (self.num_pages + 1) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold num_tokens."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, or raise OutOfPages and take none."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages asked, {len(self._free)} free")
        pages = [self._free.pop() for _ in range(count)]
        self._owned.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back; each must be owned."""
        for page in pages:
            self._owned.remove(page)
        self._free.extend(reversed(pages))
        # Sorted when idle, so that a long life does not end in scattered pages.
        if not self._owned:
            self._free.sort(reverse=True)


class PageTable:
    """The pages of one owner, in order of position."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: list[int] = []

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def capacity(self) -> int:
        """Tokens that fit without another page."""
        return len(self._pages) * self._pool.page_size

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(self._pages)

    def missing_for(self, num_tokens: int) -> int:
        """Pages that `reserve(num_tokens)` would take."""
        return max(0, self._pool.pages_for(num_tokens) - len(self._pages))

    def reserve(self, num_tokens: int) -> None:
        """Make room for positions 0 … num_tokens-1, or raise OutOfPages and change nothing."""
        self._pages += self._pool.allocate(self.missing_for(num_tokens))

    def slots(self, start: int, stop: int) -> list[int]:
        """Slots of positions [start, stop); they must be reserved."""
        if not 0 <= start <= stop <= self.capacity:
            raise IndexError(f"positions [{start}, {stop}) outside reserved {self.capacity}")
        size = self._pool.page_size
        return [self._pages[p // size] * size + p % size for p in range(start, stop)]

    def release(self) -> list[int]:
        """Give all pages back; returns them. The table is empty afterwards and may be used again."""
        pages, self._pages = self._pages, []
        self._pool.free(pages)
        return pages
