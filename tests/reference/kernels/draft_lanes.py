"""The drafter's books, kept row by row in plain Python.

Must not import the code under test. Outcomes are the numbers of tandem.v1.Outcome.
"""

from __future__ import annotations

from dataclasses import dataclass

OK, NOBODY, NEEDS_RESYNC, NON_FINITE, CONTEXT_LIMIT = 1, 2, 4, 8, 9


@dataclass
class Books:
    """start, context_len and page_table of each lane, the sentinel's last."""

    start: list[int]
    context_len: list[int]
    page_table: list[list[int]]
    page_size: int
    context_len_max: int
    max_positions: int

    def place(self, lane: int, position: int) -> tuple[int, int]:
        """Position and slot of a row of the lane's; what the tables do not hold goes to their ends."""
        index, offset = divmod(position - self.start[lane], self.page_size)
        page_row = self.page_table[lane]
        slot = page_row[index] * self.page_size + offset if index < len(page_row) else 0
        return min(position, self.max_positions - 1), slot

    def judge(self, lane: int, position: int, num_rows: int, begins: bool) -> int:
        if not 0 <= lane < len(self.start) - 1:
            return NOBODY
        if begins and position < 0:
            return NEEDS_RESYNC
        if not begins and not self.start[lane] <= position <= self.context_len[lane]:
            return NEEDS_RESYNC
        return CONTEXT_LIMIT if position + num_rows > self.context_len_max else OK


@dataclass
class StagedRow:
    """What one ring row becomes: context and block rows as (position, slot)."""

    outcome: int
    context_len: int
    count: int
    context: list[tuple[int, int]]
    block: list[tuple[int, int]]
    ids: list[int]
    kv_len: int
    pages: list[int]


def stage_ring_row(
    books: Books, lane: int, begins: bool, row: tuple[int, int, int], block_size: int, vocab: int, mask: int
) -> StagedRow:
    """row: base, count, anchor. Changes the books where the row is taken."""
    base, count, anchor = row
    lane_exists = 0 <= lane < len(books.start) - 1
    if lane_exists and not 0 <= count <= block_size:
        outcome = NEEDS_RESYNC
    else:
        outcome = books.judge(lane, base, count, begins)
    if outcome != OK:
        nowhere = [(0, 0)] * block_size
        length = books.context_len[lane if lane_exists else -1]
        return StagedRow(outcome, length, 0, nowhere, nowhere, [mask] * block_size, 0, [])
    if begins:
        books.start[lane] = base
    books.context_len[lane] = base + count
    kv_len = base + count - books.start[lane] + block_size
    page_row = books.page_table[lane]
    return StagedRow(
        outcome=OK,
        context_len=base + count,
        count=count,
        context=[books.place(lane, base + i) for i in range(block_size)],
        block=[books.place(lane, base + count + i) for i in range(block_size)],
        ids=[min(max(anchor, 0), vocab - 1)] + [mask] * (block_size - 1),
        kv_len=min(kv_len, len(page_row) * books.page_size),
        pages=page_row[: -(-kv_len // books.page_size)],
    )


def stage_append(
    books: Books, lane: int, position: int, num_rows: int
) -> tuple[int, int, list[tuple[int, int]]]:
    """Outcome, end of the lane's context, and the rows' (position, slot); none unless OK."""
    outcome = books.judge(lane, position, num_rows, False)
    if outcome == OK:
        books.context_len[lane] = position + num_rows
        return OK, position + num_rows, [books.place(lane, position + i) for i in range(num_rows)]
    return outcome, books.context_len[lane if outcome != NOBODY else -1], []
