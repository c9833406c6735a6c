"""The device's draft engine in Triton's interpreter, against the CPU's engine and session table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from common.handoff.transport import Outcome
from common.paged_kv import PageEntry, PagePool, PageTable
from services.drafter.draft_work import DraftWork
from services.drafter.engine import PlacedBlock
from services.drafter.launch_control import LAUNCHES_IN_FLIGHT_MAX
from tests.builders_drafter import build_draft_pair
from tests.draft_engine_rig import (
    NOBODY,
    Append,
    DraftRig,
    Row,
    Sizes,
    build_engine,
    build_kernel_draft,
    build_ring,
    random_step,
)

SEED = 20261208
DRAFT: dict[str, Any] = {
    "num_heads": 2, "num_kv_heads": 1, "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 9, "max_len": 60,
}  # fmt: skip
ONE_LAYER: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "num_layers": 1, "max_len": 60}


@pytest.fixture
def rig(tmp_path: Path) -> DraftRig:
    print(f"seed {SEED}")
    return DraftRig(build_draft_pair(tmp_path, SEED, **DRAFT), Sizes(), SEED)


@pytest.mark.slow
def test_random_histories_give_the_outcomes_contexts_and_drafts_of_the_cpu(rig: DraftRig) -> None:
    seen: Counter[Outcome] = Counter()
    for _ in range(20):
        seen.update(rig.step(*random_step(rig)))
    assert seen[Outcome.OK] > 12 and seen[Outcome.NEEDS_RESYNC] > 2 and seen[Outcome.UNKNOWN_SESSION] > 2
    assert rig.num_clear > 25


def test_a_prompts_end_needs_no_row_of_the_step_and_repeating_a_step_changes_nothing(rig: DraftRig) -> None:
    rig.join(2, 0)
    rig.join(0, 5)
    prompts = [Append(2, 0, 6), Append(0, 5, 1)]
    rows: list[Row | None] = [None, Row(2, 6, 0), Row(0, 6, 0)]
    assert rig.step(prompts, rows) == [Outcome.UNKNOWN_SESSION, Outcome.OK, Outcome.OK]
    assert rig.step([Append(2, 2, 4)], [Row(2, 6, 3), Row(0, 6, 4)]) == [Outcome.OK, Outcome.OK]
    # The same verify again, of other captured states: they replace those before.
    assert rig.step([], [Row(2, 6, 3), Row(0, 6, 2)]) == [Outcome.OK, Outcome.OK]
    assert rig.context_len(2) == 9 and rig.context_len(0) == 8


def test_contexts_end_exactly_at_the_limit_and_never_beyond(rig: DraftRig) -> None:
    rig.join(1, 53)
    rig.join(3, 0)
    assert rig.step([Append(1, 53, 4)], [Row(1, 57, 3), Row(3, 60, 0, begins=True)]) == [Outcome.OK] * 2
    assert rig.context_len(1) == rig.context_len(3) == 60
    assert rig.step([], [Row(1, 60, 1), Row(3, 60, 4)]) == [Outcome.CONTEXT_LIMIT] * 2
    assert rig.step([Append(1, 58, 3)], [Row(1, 60, 0), Row(3, 61, 0, begins=True)]) == [
        Outcome.OK, Outcome.CONTEXT_LIMIT,
    ]  # fmt: skip


def test_states_that_are_not_finite_spoil_their_own_session_alone(rig: DraftRig) -> None:
    for lane in range(3):
        rig.join(lane, 0)
    assert rig.step([Append(0, 0, 3), Append(1, 0, 3)], [Row(0, 3, 0), Row(1, 3, 0)]) == [Outcome.OK] * 2
    rows: list[Row | None] = [Row(0, 3, 2, spoiled=1), Row(1, 3, 2)]
    assert rig.step([Append(2, 0, 2)], rows) == [Outcome.NON_FINITE, Outcome.OK]
    assert rig.joined == [1, 2]
    rig.join(0, 0)
    assert rig.step([Append(0, 0, 2), Append(2, 2, 3)], [Row(0, 2, 0), Row(1, 5, 0)], spoiled=1) == [
        Outcome.OK, Outcome.OK,
    ]  # fmt: skip
    assert rig.joined == [1, 0]


def test_without_blocks_rows_become_context_and_nothing_is_drafted(rig: DraftRig) -> None:
    rig.join(0, 0)
    assert rig.step([], [Row(0, 0, 4)], blocks=False) == [Outcome.OK]
    assert rig.step([], [Row(0, 4, 2)]) == [Outcome.OK]


def test_rows_that_nobody_takes_touch_no_context(rig: DraftRig) -> None:
    """Neither rows of a step beside an append, nor those of a lane that was told of no pages: not even in
    pages that the lane had in an earlier life."""
    rig.join(0, 0)
    rig.join(1, 0)
    assert rig.step([], [Row(1, 0, 4), Row(0, 0, 4)]) == [Outcome.OK] * 2
    assert rig.step([Append(1, 4, 2)], []) == []
    rig.engine.join(2, 0)
    pages = [PageEntry(2, i, page) for i, page in enumerate(rig._tables[0].pages)]
    rig.engine.results_to_host(rig.engine.launch(DraftWork(pages=pages)))
    rig.engine.join(2, 0)
    rig.ring.base[0], rig.ring.count[0] = 0, 4
    rig.engine.results_to_host(rig.engine.launch(DraftWork(lanes=[2], begins=[False])))
    assert rig.step([], [Row(0, 4, 0), Row(1, 6, 0)]) == [Outcome.OK] * 2


def test_launches_may_be_in_flight_together_but_not_without_end(rig: DraftRig) -> None:
    rig.join(0, 0)
    tickets = []
    for length in range(1, LAUNCHES_IN_FLIGHT_MAX + 1):
        rig.ring.base[0], rig.ring.count[0] = length - 1, 1
        tickets.append(rig.engine.launch(DraftWork(lanes=[0], begins=[False], blocks=False)))
    with pytest.raises(AssertionError, match="unread"):
        rig.engine.launch(DraftWork())
    found = [rig.engine.results_to_host(ticket).rows[0].context_len for ticket in tickets]
    assert found == list(range(1, LAUNCHES_IN_FLIGHT_MAX + 1))
    with pytest.raises(AssertionError, match="read before"):
        rig.engine.results_to_host(tickets[0])


def test_a_ring_is_captured_once_and_another_takes_its_place(rig: DraftRig) -> None:
    rig.join(0, 0)
    captured: list[tuple[int, int]] = []
    rig.engine._on_captured = lambda done, total: captured.append((done, total))
    rig.engine.attach(rig.ring)
    assert not captured
    first, rig.ring = rig.ring, build_ring(rig.engine._model, Sizes(ring_rows=1, extend_rows=3))
    rig.sizes = Sizes(ring_rows=1, extend_rows=3)
    rig.engine.attach(rig.ring)
    assert captured[-1] == (len(captured), len(captured))
    first.buffer.fill_(99)
    before = first.buffer.clone()
    assert rig.step([Append(0, 0, 3)], [Row(0, 3, 0)]) == [Outcome.OK]
    assert rig.step([], [Row(0, 3, 4)]) == [Outcome.OK]
    assert torch.equal(first.buffer, before)
    # Nobody's rows beyond the ring's are padding.
    work = DraftWork(lanes=[rig.engine.sentinel_lane], begins=[False])
    assert rig.engine.results_to_host(rig.engine.launch(work)).rows == [NOBODY]


def test_inline_rows_and_blocks_give_what_the_cpus_engine_gives(rig: DraftRig) -> None:
    """A block before any context, one after context; rows of which one is not finite."""
    rows = rig._captured(20)
    rows[3, 5] = float("nan")
    given: list[tuple[list[bool], torch.Tensor]] = []
    for engine, pool in ((rig.cpu.engine, PagePool(30, 5)), (rig.engine, PagePool(30, 8))):
        tables = [PageTable(pool) for _ in range(3)]
        for table, room in zip(tables, (24, 4, 8), strict=True):
            table.reserve(room)
        finite = engine.append_to_host(rows[4:], list(range(7, 23)), tables[0].slots(0, 16))
        finite += engine.append_to_host(rows[:4], list(range(4)), tables[2].slots(0, 4))
        blocks = [
            PlacedBlock(17, 23, 16, tables[0].pages, tables[0].slots(16, 20)),
            PlacedBlock(5, 0, 0, tables[1].pages, tables[1].slots(0, 4)),
        ]
        given.append((finite, engine.draft_to_host(blocks)))
    (cpu_finite, cpu_drafts), (finite, drafts) = given
    assert finite == cpu_finite == [True] * 19 + [False]
    best = rig._logits.pop().topk(2, dim=-1).values
    clear = best[..., 0] - best[..., 1] > 1e-3
    assert clear.sum() >= 4 and torch.equal(drafts[clear], cpu_drafts[clear])
    assert drafts.dtype == torch.int32
    assert rig.engine.append_to_host(rows[:0], [], []) == []


@pytest.mark.slow
@pytest.mark.usefixtures("products_in_order")
def test_each_of_32_lanes_gets_the_drafts_that_it_gets_alone(tmp_path: Path) -> None:
    """To the bit in fp32, in the cache as in the ring. The two have the same pages, for other lanes."""
    sizes = Sizes(num_pages=40, num_lanes=32, num_rows_max=32, ring_rows=32, extend_rows=2)
    checkpoints = build_draft_pair(tmp_path, SEED, block_size=2, **ONE_LAYER)
    model = build_kernel_draft(*checkpoints, "cpu", sizes, row_independent=True)
    together, alone = (build_engine(model, sizes) for _ in range(2))
    many, one = build_ring(model, sizes), build_ring(model, Sizes(ring_rows=1, extend_rows=2))
    together.attach(many)
    alone.attach(one)
    generator = torch.Generator().manual_seed(SEED)
    lanes = torch.randperm(32, generator=generator).tolist()
    starts = torch.randint(0, 50, (32,), generator=generator)
    for lane, start in zip(lanes, starts.tolist(), strict=True):
        together.join(lane, start)
    watched = range(0, 32, 5)
    for i in watched:
        alone.join(i, int(starts[i]))
    for step in range(2):
        many.verify_captured.normal_(generator=generator)
        many.base.copy_(starts + 2 * step)
        many.count.fill_(2 - step)
        many.anchor.copy_(torch.randint(0, model.config.vocab_size, (32,), generator=generator))
        pages = [PageEntry(lane, 0, 1 + i) for i, lane in enumerate(lanes)] if step == 0 else []
        together.results_to_host(together.launch(DraftWork(lanes=lanes, begins=[False] * 32, pages=pages)))
        for i in watched:
            one.verify_captured.copy_(many.verify_captured[2 * i : 2 * i + 2])
            for name in ("base", "count", "anchor"):
                getattr(one, name)[0] = getattr(many, name)[i]
            pages = [PageEntry(i, 0, 1 + i)] if step == 0 else []
            results = alone.results_to_host(
                alone.launch(DraftWork(lanes=[i], begins=[False], pages=pages))
            )
            assert results.rows == [(Outcome.OK, int(starts[i]) + 2 + step)]
            assert torch.equal(one.drafts[0], many.drafts[i])
            slots = slice((1 + i) * sizes.page_size, (1 + i) * sizes.page_size + 4 + step)
            assert torch.equal(together._tensors.kv[:, :, slots], alone._tensors.kv[:, :, slots])
