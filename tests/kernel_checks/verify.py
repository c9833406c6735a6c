"""What the kernels around a verify must do, on whichever device they are run."""

from __future__ import annotations

import random

import torch

from common.kernels.lanes import DRAFTS_START, LaneState, Published
from common.kernels.verify import RESULT_WORDS, BlockBatch, accept_blocks, stage_blocks
from tests.kernel_checks.lanes import (
    PAGE_SIZE,
    VOCAB,
    WIDE_TABLE,
    check_pages_are_the_lanes,
    check_params_are_the_lanes,
    poisoned_rows,
    some_lanes,
    state_of,
)
from tests.reference.kernels import lanes as lanes_reference
from tests.reference.kernels import verify as reference

NUM_LANES, RING_ROWS = 9, 11


def _some_batch(
    rng: random.Random, num_sequences: int, num_drafts: int, device: str, *, inline: bool = False
) -> tuple[BlockBatch, list[list[int]]]:
    """The batch, and the drafts by row of where they lie; ids of all kinds among them."""
    odd = (-1, -(2**31), VOCAB, 2**31 - 1, 0, VOCAB - 1)
    drafts = [
        [rng.choice((rng.randrange(VOCAB), rng.choice(odd))) for _ in range(num_drafts)]
        for _ in range(RING_ROWS)
    ]
    num_real = rng.randint(1, min(num_sequences, NUM_LANES))
    lanes = rng.sample(range(NUM_LANES), num_real) + [NUM_LANES] * (num_sequences - num_real)
    rows = [rng.choice((-1, rng.randrange(RING_ROWS))) if lane < NUM_LANES else -1 for lane in lanes]

    def ints(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    # The ring is wider than the block that is read.
    ring = torch.full((RING_ROWS, num_drafts + 2), -9, dtype=torch.int32, device=device)
    control = torch.full((40 + RING_ROWS * num_drafts,), -9, dtype=torch.int32, device=device)
    control[DRAFTS_START] = 0
    if inline:
        control[DRAFTS_START] = 40
        control[40:] = ints(drafts).flatten()
    else:
        ring[:, :num_drafts] = ints(drafts)
    batch = BlockBatch(ints(lanes), ints(rows), ring[:, : max(num_drafts, 1)], control)
    return batch, drafts


def check_stages_anchors_and_clamped_drafts(device: str, seed: int, *, pdl: bool = False) -> None:
    rng = random.Random(seed)
    for num_sequences, num_drafts, num_pages_each, inline in (
        (1, 0, 90, False), (1, 1, 90, False), (3, 7, WIDE_TABLE, True), (6, 15, WIDE_TABLE, False),
        (4, 4, 90, True),
    ):  # fmt: skip
        rows_each = num_drafts + 1
        lanes = some_lanes(rng, NUM_LANES, num_pages_each, device)
        batch, drafts = _some_batch(rng, num_sequences, num_drafts, device, inline=inline)
        staged = poisoned_rows(num_sequences * rows_each, num_sequences, num_pages_each, device)
        num_clamped = torch.full((num_sequences,), -77, dtype=torch.int32, device=device)
        before = state_of(lanes)
        stage_blocks(
            batch, lanes, staged, num_clamped, vocab_rows=VOCAB, page_size=PAGE_SIZE,
            positions_max=num_pages_each * PAGE_SIZE, pdl=pdl,
        )  # fmt: skip
        assert state_of(lanes) == before
        for s, (lane, draft_row) in enumerate(
            zip(batch.lanes.tolist(), batch.draft_rows.tolist(), strict=True)
        ):
            rows = slice(s * rows_each, (s + 1) * rows_each)
            first = int(lanes.positions[lane])
            positions = list(range(first, first + rows_each))
            draft = drafts[draft_row] if draft_row >= 0 else None
            ids, clamped = reference.assemble(int(lanes.anchors[lane]), draft, rows_each, VOCAB)
            assert (staged.ids[rows].tolist(), int(num_clamped[s])) == (ids, clamped)
            assert staged.positions[rows].tolist() == positions
            assert staged.params.position[rows].tolist() == [p + 1 for p in positions]
            slots = lanes_reference.slots(lanes.page_table[lane].tolist(), positions, PAGE_SIZE)
            assert staged.slots[rows].tolist() == slots
            assert int(staged.kv_lens[s]) == (0 if lane == NUM_LANES else first + rows_each)
            check_pages_are_the_lanes(staged, s, lanes, lane)
            for row in range(rows.start, rows.stop):
                check_params_are_the_lanes(staged, row, lanes, lane)


def check_a_block_that_passes_the_last_position_stays_in_its_memory(device: str, seed: int) -> None:
    rng = random.Random(seed)
    num_pages_each, positions_max = 10, 38
    lanes = some_lanes(rng, NUM_LANES, num_pages_each, device)
    batch, _ = _some_batch(rng, 1, 7, device)
    lane = int(batch.lanes[0])
    lanes.positions[lane] = 36
    staged = poisoned_rows(8, 1, num_pages_each, device)
    num_clamped = torch.zeros(1, dtype=torch.int32, device=device)
    stage_blocks(
        batch, lanes, staged, num_clamped, vocab_rows=VOCAB, page_size=PAGE_SIZE, positions_max=positions_max
    )
    assert staged.positions.tolist() == [36] + [37] * 7 and staged.kv_lens.tolist() == [positions_max]
    slots = lanes_reference.slots(lanes.page_table[lane].tolist(), list(range(36, 44)), PAGE_SIZE)
    assert staged.slots.tolist() == slots and slots[4:] == [0, 1, 2, 3]


def check_accepts_up_to_the_first_difference(device: str, seed: int, *, pdl: bool = False) -> None:
    rng = random.Random(seed)
    for num_rows, publish in ((1, False), (1, True), (2, True), (5, True), (8, False), (16, True)):
        num_sequences = NUM_LANES + 2
        lanes = some_lanes(rng, NUM_LANES, 90, device)
        batch, _ = _some_batch(rng, num_sequences, num_rows - 1, device)
        chosen = [[rng.randrange(VOCAB) for _ in range(num_rows)] for _ in range(num_sequences)]
        finite = [[int(rng.random() > 0.05) for _ in range(num_rows)] for _ in range(num_sequences)]
        ids = [[rng.randrange(VOCAB), *row[:-1]] for row in chosen]
        for row in ids:
            for place in range(1, num_rows):
                if rng.random() < 0.15:
                    row[place] = (row[place] + 1) % VOCAB
        got = _accept(batch, lanes, chosen, finite, ids, publish, pdl=pdl)
        wanted, ring = got.before, [[-9] * RING_ROWS for _ in range(3)]
        for s, (lane, draft_row) in enumerate(
            zip(batch.lanes.tolist(), batch.draft_rows.tolist(), strict=True)
        ):
            accepted, bonus = reference.accept(chosen[s], ids[s], num_rows - 1 if draft_row >= 0 else 0)
            whole = int(all(finite[s][: accepted + 1]))
            assert got.results[s] == [*chosen[s], accepted, whole, s]
            if lane < NUM_LANES:
                base = wanted["positions"][lane]
                wanted["anchors"][lane], wanted["positions"][lane] = bonus, base + accepted + 1
                if publish:
                    ring[0][s], ring[1][s], ring[2][s] = base, accepted + 1, bonus
        assert state_of(lanes) == wanted and got.ring == ring


def check_synthetic_acceptance_has_the_mean_that_was_asked_for(device: str, seed: int) -> None:
    rng = random.Random(seed)
    num_rows, steps, mean = 8, 40, 2.3
    lanes = some_lanes(rng, NUM_LANES, 2000, device)
    batch, _ = _some_batch(rng, NUM_LANES, num_rows - 1, device)
    batch.lanes.copy_(torch.arange(NUM_LANES))
    batch.draft_rows.copy_(torch.arange(NUM_LANES))
    batch.draft_rows[4] = -1
    same = [[7] * num_rows for _ in range(NUM_LANES)]
    counts: list[list[int]] = []
    for step in range(steps):
        drafts = [[8 - step % 2] * num_rows for _ in range(NUM_LANES)]
        got = _accept(batch, lanes, same, same, drafts, False, synthetic_accepted=mean)
        counts.append([row[num_rows] for row in got.results])
    without_draft = [row.pop(4) for row in counts]
    assert not any(without_draft)
    every = [count for row in counts for count in row]
    assert set(every) == {2, 3}
    # Right drafts or wrong ones, lane by lane and all together: 4 standard errors.
    assert abs(sum(every) / len(every) - mean) < 4 * (0.21 / len(every)) ** 0.5
    assert all(len({row[i] for row in counts}) == 2 for i in range(NUM_LANES - 1))


class _Accepted:
    def __init__(self, before: dict[str, list], results: list, ring: list) -> None:
        self.before, self.results, self.ring = before, results, ring


def _accept(
    batch: BlockBatch,
    lanes: LaneState,
    chosen: list[list[int]],
    finite: list[list[int]],
    ids: list[list[int]],
    publish: bool,
    *,
    synthetic_accepted: float | None = None,
    pdl: bool = False,
) -> _Accepted:
    device, (num_sequences, num_rows) = lanes.anchors.device, (len(chosen), len(chosen[0]))

    def ints(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    staged = poisoned_rows(num_sequences * num_rows, num_sequences, 90, str(device))
    staged.ids.copy_(ints(ids).flatten())
    results = torch.full((num_sequences, num_rows + RESULT_WORDS), -77, dtype=torch.int32, device=device)
    ring = Published(*(torch.full((RING_ROWS,), -9, dtype=torch.int32, device=device) for _ in range(3)))
    before = state_of(lanes)
    accept_blocks(
        ints(chosen), ints(finite), batch, lanes, staged, ints(list(range(num_sequences))), results,
        ring if publish else None, synthetic_accepted=synthetic_accepted, pdl=pdl,
    )  # fmt: skip
    published = [ring.base.tolist(), ring.count.tolist(), ring.anchor.tolist()]
    return _Accepted(before, results.tolist(), published)
