"""What the kernels around prompt rows must do, on whichever device they are run."""

from __future__ import annotations

import random

import torch

from common.kernels.extend_rows import ExtendBatch, commit_extends, stage_extends
from common.kernels.lanes import Published
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
from tests.reference.kernels import lanes as reference

NUM_LANES = 7


def _some_batch(
    rng: random.Random, lens: list[int], num_rows: int, num_sequences: int, start_max: int, device: str
) -> tuple[ExtendBatch, list[int], list[int]]:
    """The batch, and each prompt's lane and start."""
    padding = num_sequences - len(lens)
    lanes = rng.sample(range(NUM_LANES), len(lens))
    starts = [rng.choice((0, rng.randrange(start_max))) for _ in lens]
    row_starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    row_sequences = [i for i, count in enumerate(lens) for _ in range(count)]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch = ExtendBatch(
        ids=ints([rng.randrange(VOCAB) for _ in range(num_rows)]),
        row_sequences=ints(row_sequences + [-1] * (num_rows - len(row_sequences))),
        row_starts=ints(row_starts + [row_starts[-1]] * padding),
        lanes=ints(lanes + [NUM_LANES] * padding),
        # What earlier launches left there.
        starts=ints(starts + [rng.randrange(300) for _ in range(padding)]),
        samples=ints([rng.randrange(2) for _ in lens] + [0] * padding),
        ring_rows=ints([rng.choice((-1, i)) for i in range(num_sequences)]),
    )
    return batch, lanes, starts


def check_stages_prompts_of_any_lengths(device: str, seed: int, *, pdl: bool = False) -> None:
    rng = random.Random(seed)
    for lens, num_rows, num_sequences, num_pages_each in (
        ([1], 1, 1, 90), ([5, 1, 9], 16, 4, 90), ([140, 3], 150, 2, WIDE_TABLE), ([6], 24, 7, WIDE_TABLE),
    ):  # fmt: skip
        lanes = some_lanes(rng, NUM_LANES, num_pages_each, device)
        positions_max = num_pages_each * PAGE_SIZE - 1
        start_max = positions_max - max(lens)
        batch, of_prompts, starts = _some_batch(rng, lens, num_rows, num_sequences, start_max, device)
        staged = poisoned_rows(num_rows, num_sequences, num_pages_each, device)
        last_rows = torch.full((num_sequences,), -77, dtype=torch.int32, device=device)
        before = state_of(lanes)
        stage_extends(
            batch, lanes, staged, last_rows, page_size=PAGE_SIZE, positions_max=positions_max, pdl=pdl
        )
        assert state_of(lanes) == before
        row = 0
        for i, (count, lane, start) in enumerate(zip(lens, of_prompts, starts, strict=True)):
            wanted = list(range(start, start + count))
            assert staged.positions[row : row + count].tolist() == wanted
            slots = reference.slots(lanes.page_table[lane].tolist(), wanted, PAGE_SIZE)
            assert staged.slots[row : row + count].tolist() == slots
            assert int(staged.kv_lens[i]) == start + count == int(staged.params.position[i])
            check_pages_are_the_lanes(staged, i, lanes, lane)
            check_params_are_the_lanes(staged, i, lanes, lane)
            row += count
            assert int(last_rows[i]) == row - 1
        assert staged.positions[row:].tolist() == staged.slots[row:].tolist() == [0] * (num_rows - row)
        assert not staged.kv_lens[len(lens) :].any()
        assert all(0 <= last < num_rows for last in last_rows.tolist())


def check_a_prompt_that_passes_the_last_position_is_cut(device: str, seed: int) -> None:
    rng = random.Random(seed)
    lanes = some_lanes(rng, NUM_LANES, 10, device)
    batch, of_prompts, _ = _some_batch(rng, [8], 8, 1, 1, device)
    batch.starts.fill_(36)
    staged = poisoned_rows(8, 1, 10, device)
    last_rows = torch.zeros(1, dtype=torch.int32, device=device)
    stage_extends(batch, lanes, staged, last_rows, page_size=PAGE_SIZE, positions_max=39)
    assert staged.positions.tolist() == [36, 37, 38, 38, 38, 38, 38, 38] and staged.kv_lens.tolist() == [39]
    slots = reference.slots(lanes.page_table[of_prompts[0]].tolist(), list(range(36, 44)), PAGE_SIZE)
    assert staged.slots.tolist() == slots and slots[4:] == [0, 1, 2, 3]


def check_the_token_at_a_prompts_end_becomes_the_anchor(device: str, seed: int, *, pdl: bool = False) -> None:
    rng = random.Random(seed)
    for publish in (True, False):
        lens = [4, 1, 7, 2]
        lanes = some_lanes(rng, NUM_LANES, 90, device)
        batch, of_prompts, starts = _some_batch(rng, lens, 16, 6, 300, device)
        wanted = state_of(lanes)
        chosen = torch.tensor([rng.randrange(VOCAB) for _ in range(6)], dtype=torch.int32, device=device)
        finite = torch.tensor([rng.randrange(2) for _ in range(6)], dtype=torch.int32, device=device)
        results = torch.full((6, 2), -77, dtype=torch.int32, device=device)
        ring = Published(*(torch.full((8,), -9, dtype=torch.int32, device=device) for _ in range(3)))
        published = [[-9] * 8 for _ in range(3)]
        for i, (count, lane, start) in enumerate(zip(lens, of_prompts, starts, strict=True)):
            if batch.samples[i]:
                wanted["anchors"][lane], wanted["positions"][lane] = int(chosen[i]), start + count
                ring_row = int(batch.ring_rows[i])
                if publish and ring_row >= 0:
                    for column, value in zip(published, (start + count, 0, int(chosen[i])), strict=True):
                        column[ring_row] = value
        commit_extends(chosen, finite, batch, lanes, results, ring if publish else None, pdl=pdl)
        assert state_of(lanes) == wanted
        assert results[: len(lens)].tolist() == torch.stack((chosen, finite), 1)[: len(lens)].tolist()
        assert [ring.base.tolist(), ring.count.tolist(), ring.anchor.tolist()] == published
