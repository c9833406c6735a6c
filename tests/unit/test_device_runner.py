"""Device steps over a fake device: what is launched, what waits for what, what becomes of each session."""

from __future__ import annotations

import pytest

from common.errors import Unavailable
from common.handoff.transport import DeviceRow, Extend, Open, Outcome
from services.drafter.session import SessionKey
from tests.ring_rig import RingRig, anchor_of, close, draft_of, fill_row, outcomes

OK = Outcome.OK


@pytest.fixture
def rig() -> RingRig:
    return RingRig()


def row(session_id: int, position_min: int, position_max: int, **changes: int | bool) -> DeviceRow:
    return DeviceRow(session_id, 0, position_min, position_max, False)._replace(**changes)


def test_a_prompt_then_verified_rows_become_context_and_are_drafted_after(rig: RingRig) -> None:
    assert rig.begin(1, owner=7, prompt_len=6, i=2) == {1: OK}
    assert rig.drafts(2) == draft_of(7, 6)
    base = 6
    for count in (1, 4, 2):
        fill_row(rig.ring, 0, 7, base, count)
        assert rig.run(rows=[row(1, base + 1, base + 4)]) == {1: OK}
        base += count
        assert rig.drafts(0) == draft_of(7, base)
    assert rig.table.context_len(SessionKey("target", 1)) == base
    rig.check()


def test_nothing_runs_before_its_states_are_ready_and_done_comes_behind_it(rig: RingRig) -> None:
    fill_row(rig.ring, 0, 7, 3, 0)
    extends = [rig.extend(1, 7, 0, 3)]
    sequence = rig.launch(opens=[Open(1, 0, 0)], extends=extends, rows=[row(1, 3, 3)])
    assert not rig.runner.is_idle(rig.link)
    assert rig.drafts(0) == [0, 0, 0] and rig.flags.done == 0
    rig.flags.set_ready(sequence)
    assert rig.runner.is_idle(rig.link)
    assert rig.drafts(0) == draft_of(7, 3) and rig.flags.done == sequence


def test_the_next_step_is_launched_while_one_is_in_flight_and_both_are_answered_in_order(
    rig: RingRig,
) -> None:
    rig.begin(1, owner=7, prompt_len=6)
    fill_row(rig.ring, 0, 7, 6, 2)
    first = rig.launch(rows=[row(1, 7, 10)])
    second = rig.launch(rows=[row(1, 8, 14)])
    rig.flags.set_ready(first)
    assert (rig.flags.done, rig.runner.is_idle(rig.link)) == (first, False)
    reply = rig.finish()
    assert [(v.outcome, v.context_len) for v in reply.verdicts] == [(OK, 8)]
    fill_row(rig.ring, 0, 7, 8, 3)
    rig.flags.set_ready(second)
    reply = rig.finish()
    assert [(v.outcome, v.context_len) for v in reply.verdicts] == [(OK, 11)]
    assert rig.drafts(0) == draft_of(7, 11)


def test_a_reply_counts_blocks_and_the_rows_that_became_context(rig: RingRig) -> None:
    rig.begin(1, owner=7, prompt_len=6)
    fill_row(rig.ring, 0, 7, 6, 3)
    fill_row(rig.ring, 1, 8, 5, 0)
    sequence = rig.launch(
        opens=[Open(2, 0, 0)], extends=[rig.extend(2, 8, 0, 5)], rows=[row(1, 7, 10), row(2, 5, 5)]
    )
    rig.flags.set_ready(sequence)
    reply = rig.finish()
    assert (reply.num_blocks, reply.num_context_rows, reply.drafts) == (2, 8, None)
    assert (reply.ingest_s, reply.draft_s) == (0.001, 0.002)


def test_a_context_may_begin_with_a_row_wherever_that_is(rig: RingRig) -> None:
    fill_row(rig.ring, 0, 7, 30, 2)
    assert rig.run(opens=[Open(1, 0, 29)], rows=[row(1, 29, 40, begins=True)]) == {1: OK}
    assert rig.drafts(0) == draft_of(7, 32)
    fill_row(rig.ring, 0, 7, 32, 4)
    assert rig.run(rows=[row(1, 33, 36)]) == {1: OK}
    assert rig.drafts(0) == draft_of(7, 36)
    # Not the 30 positions before it.
    assert rig.table.num_pages_used <= 6


def test_done_is_written_also_when_nothing_of_a_step_can_be_done(rig: RingRig) -> None:
    sequence = rig.launch(
        extends=[Extend(3, 0, 0, 0, 4)], rows=[None, row(9, 5, 5), DeviceRow(1, 4, 5, 5, False)]
    )
    rig.flags.set_ready(sequence)
    assert rig.flags.done == sequence
    unknown = Outcome.UNKNOWN_SESSION
    assert outcomes(rig.finish()) == {3: unknown, 9: unknown, 1: unknown}
    assert rig.table.num_sessions == 0


def test_one_sessions_refusal_is_nobody_elses(rig: RingRig) -> None:
    rig.begin(1, owner=7, prompt_len=6)
    fill_row(rig.ring, 0, 9, 2, 1)
    fill_row(rig.ring, 1, 7, 6, 2)
    # The first session never got context up to there: the device says so.
    found = rig.run(opens=[Open(2, 0, 0)], rows=[row(2, 3, 6), row(1, 7, 10)])
    assert found == {2: Outcome.NEEDS_RESYNC, 1: OK}
    assert rig.drafts(1) == draft_of(7, 8)


@pytest.mark.parametrize(
    ("rows", "outcome"),
    [
        ([DeviceRow(1, 1, 7, 10, False)], Outcome.STALE_EPOCH),
        ([DeviceRow(1, 0, 58, 61, False)], Outcome.CONTEXT_LIMIT),
    ],
    ids=["epoch", "limit"],
)
def test_what_the_host_can_refuse_it_refuses_before_the_launch(
    rig: RingRig, rows: list[DeviceRow | None], outcome: Outcome
) -> None:
    rig.begin(1, owner=7, prompt_len=6)
    fill_row(rig.ring, 0, 7, 6, 2)
    assert rig.run(rows=rows) == {1: outcome}
    assert rig.run(rows=[row(1, 7, 10)]) == {1: OK}


@pytest.mark.parametrize(
    "twice",
    [
        {"extends": [Extend(1, 0, 6, 0, 2), Extend(1, 0, 8, 2, 4)]},
        {"opens": [Open(1, 0, 0), Open(1, 0, 0)]},
        {"extends": [Extend(1, 1, 6, 0, 2)], "rows": [DeviceRow(1, 0, 8, 8, False)]},
    ],
    ids=["extends", "opens", "epochs"],
)
def test_a_session_named_twice_is_an_invalid_field_and_untouched(rig: RingRig, twice: dict) -> None:
    rig.begin(1, owner=7, prompt_len=6)
    assert rig.run(**twice) == {1: Outcome.INVALID_FIELD}
    assert rig.table.context_len(SessionKey("target", 1)) == 6


def test_extends_over_the_same_rows_of_the_ring_are_not_both_taken(rig: RingRig) -> None:
    extends = [Extend(1, 0, 0, 0, 4), Extend(2, 0, 0, 3, 6)]
    found = rig.run(opens=[Open(1, 0, 0), Open(2, 0, 0)], extends=extends)
    assert found == {1: OK, 2: Outcome.INVALID_FIELD}


def test_a_row_without_room_gets_no_capacity_and_the_prompt_before_it_stays(rig: RingRig) -> None:
    rig = RingRig(num_pages=7)
    assert rig.begin(1, owner=7, prompt_len=6) == {1: OK}
    fill_row(rig.ring, 0, 7, 6, 1)
    found = rig.run(
        opens=[Open(2, 0, 0)], extends=[rig.extend(2, 8, 0, 3)], rows=[row(1, 7, 10), row(2, 3, 3)]
    )
    # Three pages for the second; the first row would need one more than there is.
    assert found == {1: Outcome.NO_CAPACITY, 2: OK}
    rig.run(closes=[close(2)])
    assert rig.run(rows=[row(1, 7, 10)]) == {1: OK}
    assert rig.drafts(0) == draft_of(7, 7)
    rig.check()


def test_rows_that_are_not_finite_end_their_session_alone_and_leave_clean_pages(rig: RingRig) -> None:
    rig.begin(1, owner=7, prompt_len=6)
    rig.begin(2, owner=8, prompt_len=5)
    fill_row(rig.ring, 0, 7, 6, 2, is_finite=False)
    fill_row(rig.ring, 1, 8, 5, 2)
    assert rig.run(rows=[row(1, 7, 10), row(2, 6, 9)]) == {1: Outcome.NON_FINITE, 2: OK}
    assert SessionKey("target", 1) not in rig.table
    assert rig.engine.num_spoiled_cells == 0
    assert rig.drafts(1) == draft_of(8, 7)
    rig.check()


def test_an_extend_that_is_not_finite_ends_its_session(rig: RingRig) -> None:
    extends = [rig.extend(1, 7, 0, 6)]
    rig.ring.extend_captured[3] = float("nan")
    assert rig.run(opens=[Open(1, 0, 0)], extends=extends) == {1: Outcome.NON_FINITE}
    assert rig.table.num_sessions == 0 and rig.engine.num_spoiled_cells == 0


@pytest.mark.parametrize("ends", ["by itself", "closed", "replaced"])
def test_what_is_not_finite_is_cleaned_after_the_steps_behind_it(rig: RingRig, ends: str) -> None:
    rig.begin(1, owner=7, prompt_len=6)
    used = rig.table.num_pages_used
    fill_row(rig.ring, 0, 7, 6, 1, is_finite=False)
    first = rig.launch(rows=[row(1, 7, 10)])
    second = rig.launch(rows=[row(1, 8, 14)])
    third = {"closed": {"closes": [close(1)]}, "replaced": {"opens": [Open(1, 1, 0)]}}.get(ends, {})
    rig.launch(**third)
    rig.flags.set_ready(first)
    assert outcomes(rig.finish()) == {1: Outcome.NON_FINITE}
    assert rig.table.num_pages_used >= used, "pages that a step in flight writes to are nobody else's"
    fill_row(rig.ring, 0, 7, 7, 1)
    rig.flags.set_ready(second)
    assert outcomes(rig.finish()) == {1: Outcome.NON_FINITE}
    rig.flags.set_ready(second + 1)
    assert rig.finish().verdicts == [] or ends == "replaced"
    assert rig.engine.num_spoiled_cells == 0
    assert rig.table.num_pages_used == 0
    assert (SessionKey("target", 1) in rig.table) == (ends == "replaced")
    rig.check()


def test_a_lane_that_is_taken_over_while_its_old_sessions_step_is_in_flight_mixes_nothing_up() -> None:
    rig = RingRig(num_sessions_max=1)
    rig.begin(1, owner=7, prompt_len=6)
    fill_row(rig.ring, 0, 7, 6, 2)
    first = rig.launch(rows=[row(1, 7, 10)])
    extends = [rig.extend(2, 8, 0, 5)]
    second = rig.launch(closes=[close(1)], opens=[Open(2, 0, 0)], extends=extends, rows=[row(2, 5, 5)])
    rig.flags.set_ready(first)
    assert outcomes(rig.finish()) == {1: OK}
    assert rig.drafts(0) == draft_of(7, 8)
    fill_row(rig.ring, 0, 8, 5, 0)
    rig.flags.set_ready(second)
    assert outcomes(rig.finish()) == {2: OK}
    assert rig.drafts(0) == draft_of(8, 5)
    rig.check()


def test_a_step_after_the_loss_of_its_link_is_not_launched(rig: RingRig) -> None:
    rig.link.is_lost = True
    with pytest.raises(Unavailable):
        rig.launch()
    assert rig.flags.awaited == []


@pytest.mark.parametrize("num_in_flight", [0, 1, 3])
def test_at_a_loss_what_is_in_flight_runs_out_and_all_is_given_back(
    rig: RingRig, num_in_flight: int
) -> None:
    rig.begin(1, owner=7, prompt_len=6)
    for i in range(num_in_flight):
        rig.launch(rows=[row(1, 7 + i, 10 + 4 * i)])
    rig.link.is_lost = True
    rig.flags.release()
    assert rig.runner.is_idle(rig.link)
    rig.runner.end(rig.link)
    assert (rig.table.num_sessions, rig.table.num_pages_used) == (0, 0)
    rig.check()
    rig.link = rig.new_link()
    assert rig.begin(1, owner=9, prompt_len=6) == {1: OK}
    assert rig.drafts(0) == draft_of(9, 6)


def test_another_targets_sessions_outlive_a_loss(rig: RingRig) -> None:
    rig.table.open(SessionKey("other", 1), 0, 0)
    rig.begin(1, owner=7, prompt_len=6)
    rig.link.is_lost = True
    rig.runner.end(rig.link)
    assert SessionKey("other", 1) in rig.table and rig.table.num_sessions == 1


def test_the_fake_notices_a_context_that_is_not_its_owners() -> None:
    """Or the tests above would prove nothing."""
    rig = RingRig()
    rig.begin(1, owner=7, prompt_len=6)
    fill_row(rig.ring, 0, 7, 6, 1)
    rig.ring.verify_captured[0, 0] = 8.0
    rig.run(rows=[row(1, 7, 10)])
    assert rig.drafts(0) == [0, 0, 0] != draft_of(7, 7)
    assert anchor_of(7, 7) == 7007
