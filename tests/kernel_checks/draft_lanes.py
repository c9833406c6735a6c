"""What must hold for the drafter's books on a device, whichever it is."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from common.kernels.draft_appends import settle_appends, stage_appends
from common.kernels.draft_lanes import (
    DraftLanes,
    StagedBlocks,
    StagedContext,
    enter_pages,
    publish_drafts,
    stage_ring_rows,
)
from tests.reference.kernels import draft_lanes as reference
from tests.reference.kernels.draft_lanes import Books, StagedRow

UNTOUCHED = -7
VOCAB, MASK = 50, 49
WILD = (-1, -(2**31), 2**31 - 1, 2**31 - 8, 10**6)


def check_ring_rows_are_staged(device: str, seed: int, *, pdl: bool = False) -> None:
    """Rows that append, crop, leave a gap, begin, are nobody's or hold nonsense; lanes at their limits."""
    rng = random.Random(seed)
    seen: set[int] = set()
    for block_size, page_size, num_ring_rows, bucket in ((4, 4, 9, 12), (16, 16, 33, 33), (5, 8, 1, 2)):
        for short in (False, True):
            books = _books(rng, 40, page_size, block_size, short)
            device_lanes = _on_device(books, device)
            lanes = _row_lanes(rng, bucket, len(books.start))
            begins = [rng.random() < 0.25 for _ in lanes]
            rows = [_ring_row(rng, books, lane, block_size) for lane in lanes[:num_ring_rows]]
            staged = _stage(rows, lanes, begins, device_lanes, block_size, device, pdl)
            for i, lane in enumerate(lanes):
                row = rows[i] if i < num_ring_rows else (0, 0, 0)
                taken_lane = lane if i < num_ring_rows else -1
                wanted = reference.stage_ring_row(
                    books, taken_lane, begins[i], row, block_size, VOCAB, MASK
                )  # fmt: skip
                seen.add(wanted.outcome)
                assert staged.row(i, block_size) == wanted
                assert (staged.blocks.page_table[i, len(wanted.pages) :] == UNTOUCHED).all()
            _assert_same_books(device_lanes, books)
    assert seen == {
        reference.OK, reference.NOBODY, reference.NEEDS_RESYNC, reference.CONTEXT_LIMIT,
    }  # fmt: skip


def check_appends_are_staged(device: str, seed: int, *, pdl: bool = False) -> None:
    """Appends of one row and of many, wherever their rows lie; rows that nobody takes stay the sentinel's."""
    rng = random.Random(seed)
    seen: set[int] = set()
    for short in (False, True, False):
        books = _books(rng, 10, 8, 4, short)
        device_lanes = _on_device(books, device)
        appends, num_rows = [], 0
        for lane in (*rng.sample(range(10), 8), 10, -1):
            position = _near(rng, books, lane)
            size = rng.choice((0, 1, 7, 300))
            num_rows += rng.randrange(3)
            appends.append((lane, position, num_rows, size))
            num_rows += size
        rng.shuffle(appends)
        places = torch.zeros(2, num_rows + 5, dtype=torch.int32, device=device)
        results = torch.full((len(appends), 2), UNTOUCHED, dtype=torch.int32, device=device)
        table = torch.tensor(appends, dtype=torch.int32, device=device)
        stage_appends(table, device_lanes, StagedContext(places[0], places[1]), results, pdl=pdl)
        wanted = [(0, 0)] * (num_rows + 5)
        for (lane, position, first, size), result in zip(appends, results.tolist(), strict=True):
            if size == 0:
                assert result[0] == reference.NOBODY
                continue
            outcome, context_len, rows = reference.stage_append(books, lane, position, size)
            assert result == [outcome, context_len]
            wanted[first : first + len(rows)] = rows
            seen.add(outcome)
        assert [tuple(pair) for pair in places.T.tolist()] == wanted
        _assert_same_books(device_lanes, books)
    assert {reference.OK, reference.NOBODY, reference.NEEDS_RESYNC} <= seen


def check_rows_that_are_not_finite_are_named(device: str, seed: int, *, pdl: bool = False) -> None:
    """Of ring rows only those that became context count; of appends all their rows, and none beside them."""
    rng = random.Random(seed)
    num_rows, block_size, num_layers, num_drafts = 24, 5, 3, 4
    finite = torch.ones(num_rows * block_size, num_layers, dtype=torch.uint8)
    for _ in range(20):
        finite[rng.randrange(len(finite)), rng.randrange(num_layers)] = 0
    counts = [rng.randrange(block_size + 1) for _ in range(num_rows)]
    outcomes = [rng.choice((reference.OK, reference.OK, reference.NEEDS_RESYNC)) for _ in range(num_rows)]
    drafted = torch.randint(0, VOCAB, (num_rows, num_drafts), dtype=torch.int32)
    for wanted in (1, 0):
        results = torch.tensor([[o, i] for i, o in enumerate(outcomes)], dtype=torch.int32, device=device)
        # The ring holds fewer rows than are staged, and is wider than a draft.
        ring = torch.full((num_rows - 2, num_drafts + 3), UNTOUCHED, dtype=torch.int32, device=device)
        publish_drafts(
            drafted.to(device), torch.tensor([wanted], dtype=torch.int32, device=device), finite.to(device),
            torch.tensor(counts, dtype=torch.int32, device=device), results, ring[:, :num_drafts],
            mask_token_id=MASK, pdl=pdl,
        )  # fmt: skip
        for i, (outcome, count) in enumerate(zip(outcomes, counts, strict=True)):
            spoiled = not finite[i * block_size : i * block_size + count].all()
            if outcome == reference.OK and spoiled:
                outcome = reference.NON_FINITE
            assert results[i].tolist() == [outcome, i]
            if i < len(ring):
                is_given = wanted and outcome == reference.OK
                draft = drafted[i].tolist() if is_given else [MASK] * num_drafts
                assert ring[i].tolist() == draft + [UNTOUCHED] * 3

    sizes = [rng.choice((1, 2, 30)) for _ in range(20)]
    finite = torch.ones(sum(sizes) + 1, num_layers, dtype=torch.uint8)
    for _ in range(8):
        finite[rng.randrange(len(finite)), rng.randrange(num_layers)] = 0
    appends = [[0, 0, sum(sizes[:i]), size] for i, size in enumerate(sizes)] + [[0, 0, 0, 0]]
    outcomes = [rng.choice((reference.OK, reference.OK, reference.CONTEXT_LIMIT)) for _ in sizes]
    results = torch.tensor(
        [[o, 5] for o in (*outcomes, reference.NOBODY)], dtype=torch.int32, device=device
    )
    settle_appends(
        torch.tensor(appends, dtype=torch.int32, device=device), finite.to(device), results, pdl=pdl
    )
    wanted_outcomes = [
        reference.NON_FINITE if o == reference.OK and not finite[a[2] : a[2] + a[3]].all() else o
        for o, a in zip(outcomes, appends, strict=False)
    ]
    assert reference.NON_FINITE in wanted_outcomes and reference.OK in wanted_outcomes
    assert results[:, 0].tolist() == [*wanted_outcomes, reference.NOBODY]
    assert (results[:, 1] == 5).all()


def check_pages_are_entered(device: str, seed: int) -> None:
    """As many as are announced, whatever lies behind them."""
    rng = random.Random(seed)
    books = _books(rng, 60, 4, 4, False)
    width = len(books.page_table[0])
    for num_entries in (0, 1, 300, 59 * width):
        device_lanes = _on_device(books, device)
        places = rng.sample([(lane, index) for lane in range(60) for index in range(width)], 60 * width)
        entries = [(lane, index, rng.randrange(1, 99)) for lane, index in places]
        enter_pages(
            torch.tensor(entries, dtype=torch.int32, device=device),
            torch.tensor([num_entries], dtype=torch.int32, device=device),
            device_lanes,
        )
        for lane, index, page in entries[:num_entries]:
            books.page_table[lane][index] = page
        _assert_same_books(device_lanes, books)


@dataclass
class _Staged:
    context: StagedContext
    blocks: StagedBlocks
    counts: torch.Tensor
    results: torch.Tensor

    def row(self, i: int, block_size: int) -> StagedRow:
        rows = slice(i * block_size, (i + 1) * block_size)
        context, blocks = self.context, self.blocks
        outcome, context_len = self.results[i].tolist()
        kv_len = int(blocks.kv_lens[i])
        pages = blocks.page_table[i]
        return StagedRow(
            outcome, context_len, int(self.counts[i]),
            list(zip(context.positions[rows].tolist(), context.slots[rows].tolist(), strict=True)),
            list(zip(blocks.positions[rows].tolist(), blocks.slots[rows].tolist(), strict=True)),
            blocks.ids[rows].tolist(), kv_len, pages[pages != UNTOUCHED].tolist(),
        )  # fmt: skip


def _stage(
    rows: list[tuple[int, int, int]], lanes: list[int], begins: list[bool], device_lanes: DraftLanes,
    block_size: int, device: str, pdl: bool,
) -> _Staged:  # fmt: skip
    num_rows, width = len(lanes), device_lanes.page_table.shape[1]

    def new(*shape: int) -> torch.Tensor:
        return torch.full(shape, UNTOUCHED, dtype=torch.int32, device=device)

    staged = _Staged(
        StagedContext(new(num_rows * block_size), new(num_rows * block_size)),
        StagedBlocks(
            new(num_rows * block_size), new(num_rows * block_size), new(num_rows * block_size),
            new(num_rows), new(num_rows, width),
        ),
        new(num_rows), new(num_rows, 2),
    )  # fmt: skip
    base, count, anchor = torch.tensor(rows, dtype=torch.int32).T.contiguous().to(device)
    stage_ring_rows(
        base, count, anchor, torch.tensor(lanes, dtype=torch.int32, device=device),
        torch.tensor(begins, dtype=torch.int32, device=device), device_lanes, staged.context, staged.blocks,
        staged.counts, staged.results, vocab_rows=VOCAB, mask_token_id=MASK, pdl=pdl,
    )  # fmt: skip
    return staged


def _books(rng: random.Random, num_lanes: int, page_size: int, block_size: int, short: bool) -> Books:
    """Lanes of all lengths up to the limit. short: tables that end before the longest context does."""
    limit = 400
    width = -(-(limit + 3 * block_size) // page_size) - (25 if short else 0)
    start = [rng.choice((0, rng.randrange(limit))) for _ in range(num_lanes)]
    context_len = [rng.choice((first, rng.randint(first, limit), limit)) for first in start]
    return Books(
        [*start, 0], [*context_len, 0],
        [[rng.randrange(1, 500) for _ in range(width)] for _ in start] + [[0] * width],
        page_size, limit, limit - 30 if short else limit + 3 * block_size,
    )  # fmt: skip


def _row_lanes(rng: random.Random, num_rows: int, num_lanes: int) -> list[int]:
    """Distinct lanes, with some rows that are nobody's in whichever way."""
    lanes = rng.sample(range(num_lanes - 1), num_rows)
    return [rng.choice((num_lanes - 1, -1, 10**6)) if rng.random() < 0.2 else lane for lane in lanes]


def _near(rng: random.Random, books: Books, lane: int) -> int:
    """A position at which rows may or may not continue the lane's context."""
    start, end = books.start[lane % len(books.start)], books.context_len[lane % len(books.start)]
    positions = (end, end, end, rng.randint(start, end), start, start - 1, end + 1, rng.choice(WILD))
    return rng.choice(positions)


def _ring_row(rng: random.Random, books: Books, lane: int, block_size: int) -> tuple[int, int, int]:
    base = _near(rng, books, lane if 0 <= lane < len(books.start) else 0)
    count = rng.choice((0, 1, block_size, rng.randint(0, block_size), -1, block_size + 1))
    if rng.random() < 0.05:
        count = rng.choice(WILD)
    return base, count, rng.choice((rng.randrange(VOCAB), rng.randrange(VOCAB), rng.choice(WILD)))


def _on_device(books: Books, device: str) -> DraftLanes:
    def table(values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return DraftLanes(
        table(books.start), table(books.context_len), table(books.page_table), books.page_size,
        books.context_len_max, books.max_positions,
    )  # fmt: skip


def _assert_same_books(device_lanes: DraftLanes, books: Books) -> None:
    assert device_lanes.start.tolist() == books.start
    assert device_lanes.context_len.tolist() == books.context_len
    assert device_lanes.page_table.tolist() == books.page_table
