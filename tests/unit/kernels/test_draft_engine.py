"""The device's draft engine in Triton's interpreter, against the CPU's engine and session table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.handoff.transport import Outcome
from common.paged_kv import PageEntry
from services.drafter.draft_work import DraftWork
from services.drafter.launch_control import LAUNCHES_IN_FLIGHT_MAX
from tests.builders_drafter import build_draft_pair
from tests.draft_engine_rig import Append, DraftRig, Row, Sizes
from tests.kernel_checks import draft_engine as checks

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
    seen = checks.play_random_history(rig, 10)
    assert seen[Outcome.OK] > 5 and seen[Outcome.NEEDS_RESYNC] and seen[Outcome.UNKNOWN_SESSION]
    assert rig.num_clear > 14


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


def test_a_lane_begins_in_its_launchs_turn_and_not_before(rig: DraftRig) -> None:
    """Ahead of the wait for the target's states, what fills a lane would take the GPU in mid-step."""
    rig.join(0, 0)
    assert rig.step([], [Row(0, 0, 4)]) == [Outcome.OK]
    lanes = rig.engine._lanes
    seen = []

    def look() -> None:
        seen.append((lanes.start[0].item(), lanes.context_len[0].item(), bool(lanes.page_table[0].any())))

    rig.engine.join(0, 7)
    look()
    rig.engine.results_to_host(rig.engine.launch(DraftWork(), enter=look, leave=look))
    assert seen == [(0, 4, True), (0, 4, True), (7, 7, False)]
    rig.ring.base[0], rig.ring.count[0] = 7, 2
    work = DraftWork(lanes=[0], begins=[False], blocks=False)
    assert rig.engine.results_to_host(rig.engine.launch(work)).rows[0].context_len == 9


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
    checks.check_another_ring_takes_its_place(rig)


def test_inline_rows_and_blocks_give_what_the_cpus_engine_gives(rig: DraftRig) -> None:
    checks.check_inline_rows_and_blocks(rig)


@pytest.mark.slow
@pytest.mark.usefixtures("products_in_order")
def test_each_of_twelve_lanes_gets_the_drafts_that_it_gets_alone(tmp_path: Path) -> None:
    checkpoints = build_draft_pair(tmp_path, SEED, block_size=2, **ONE_LAYER)
    checks.check_a_lane_among_many_equals_the_lane_alone(checkpoints, "cpu", SEED, 12)
