"""What the target believes of its drafter sessions, plans for them, and learns."""

from __future__ import annotations

import pytest
import torch

from common import limits
from common.handoff.transport import Block, Close, Extend, Open, Outcome, SessionReport, Step
from services.target.core.draft_source import ContextRows, HandOff, PlainReason, WantedBlock
from services.target.core.drafter_sessions import DrafterSessions

ANCHOR = 9
CAPTURED = torch.zeros(64, 2)


class World:
    def __init__(self, num_sessions_max: int = 8) -> None:
        self.now = -5.0
        self.resyncs: list[str] = []
        self.sessions = DrafterSessions(lambda: self.now, self.resyncs.append)
        self.sessions.connected(num_sessions_max)

    def plan(
        self, *appends: tuple[int, int, int], wanted: tuple[int, ...] = (), ended: tuple[int, ...] = (),
        captured: bool = True,
    ) -> tuple[Step, dict[int, PlainReason]]:  # fmt: skip
        """appends are (session, position, number of rows); a block is wanted at the end of each."""
        rows, row = [], 0
        for session_id, position, num_rows in appends:
            rows.append(ContextRows(session_id, position, row, row + num_rows))
            row += num_rows
        ends = {session_id: position + num_rows for session_id, position, num_rows in appends}
        blocks = [WantedBlock(session_id, ends[session_id], ANCHOR) for session_id in wanted]
        return self.sessions.plan(HandOff(rows, blocks, list(ended), CAPTURED if captured else None))

    def learn(
        self, session_id: int, epoch: int, outcome: Outcome, end: int = 0, *, asked: bool = True,
        draft: list[int] | None = None, faulty: bool = False,
    ) -> PlainReason | None:  # fmt: skip
        report = SessionReport(session_id, epoch, outcome, end, draft, faulty)
        if not asked:
            return self.sessions.learn(report)
        return self.sessions.learn_of_block(report, Block(session_id, epoch, end, ANCHOR))


@pytest.fixture
def world() -> World:
    return World()


def test_a_new_session_is_opened_extended_and_asked_in_one_step(world: World) -> None:
    step, plain = world.plan((1, 0, 5), wanted=(1,))
    assert step == Step([], [Open(1, 0, 0)], [Extend(1, 0, 0, 0, 5)], [Block(1, 0, 5, ANCHOR)])
    assert plain == {}
    assert world.learn(1, 0, Outcome.OK, 5, draft=[1]) is None
    step, _ = world.plan((1, 5, 2), wanted=(1,))
    assert step == Step([], [], [Extend(1, 0, 5, 0, 2)], [Block(1, 0, 7, ANCHOR)])


def test_a_context_that_begins_late_says_where_it_begins(world: World) -> None:
    step, _ = world.plan((1, 40, 2), wanted=(1,))
    assert step.opens == [Open(1, 0, 40)]
    assert world.resyncs == []


def test_nothing_is_asked_without_captured_rows(world: World) -> None:
    step, plain = world.plan((1, 0, 5), wanted=(1,), captured=False)
    assert step.is_empty
    assert plain == {1: PlainReason.RESYNC}


def test_a_lower_position_crops_without_a_new_epoch(world: World) -> None:
    world.plan((1, 0, 10))
    step, _ = world.plan((1, 4, 1), wanted=(1,))
    assert step == Step([], [], [Extend(1, 0, 4, 0, 1)], [Block(1, 0, 5, ANCHOR)])


def test_a_position_before_the_start_opens_anew(world: World) -> None:
    world.plan((1, 40, 2))
    step, _ = world.plan((1, 0, 42), wanted=(1,))
    assert step.opens == [Open(1, 1, 0)]
    assert world.resyncs == ["recaptured"]


def test_a_gap_opens_anew_at_the_position_beyond_it(world: World) -> None:
    world.plan((1, 0, 5))
    step, _ = world.plan((1, 7, 1), wanted=(1,))
    assert step == Step([], [Open(1, 1, 7)], [Extend(1, 1, 7, 0, 1)], [Block(1, 1, 8, ANCHOR)])
    assert world.resyncs == ["cold"]


def test_a_block_beyond_the_context_is_not_asked_for(world: World) -> None:
    world.plan((1, 0, 5))
    handoff = HandOff([], [WantedBlock(1, 6, ANCHOR)], [], CAPTURED)
    step, plain = world.sessions.plan(handoff)
    assert step.is_empty
    assert plain == {1: PlainReason.RESYNC}
    assert world.sessions.lost_sessions() == {1}


LOSING = {
    Outcome.UNKNOWN_SESSION: PlainReason.RESYNC,
    Outcome.STALE_EPOCH: PlainReason.RESYNC,
    Outcome.NEEDS_RESYNC: PlainReason.RESYNC,
    Outcome.NON_FINITE: PlainReason.NON_FINITE,
    Outcome.INVALID_FIELD: PlainReason.INVALID_DRAFT,
}


@pytest.mark.parametrize("outcome", LOSING)
def test_a_lost_session_is_opened_anew_under_the_next_epoch(world: World, outcome: Outcome) -> None:
    world.plan((1, 0, 5), wanted=(1,))
    assert world.learn(1, 0, outcome, 5) is LOSING[outcome]
    step, plain = world.plan((1, 5, 1), wanted=(1,))
    assert step.opens == [Open(1, 1, 5)]
    assert plain == {}
    assert world.resyncs == ["cold"]


def test_busy_keeps_the_context(world: World) -> None:
    world.plan((1, 0, 5), wanted=(1,))
    assert world.learn(1, 0, Outcome.BUSY, 5) is PlainReason.BUSY
    step, _ = world.plan((1, 5, 1), wanted=(1,))
    assert step.opens == []


def test_after_a_missed_deadline_the_next_append_goes_out_at_its_own_position(world: World) -> None:
    world.plan((1, 0, 5), wanted=(1,))
    step, _ = world.plan((1, 5, 1), wanted=(1,))
    assert step.opens == []
    # The late report of the first step says nothing against it.
    assert world.learn(1, 0, Outcome.OK, 5, asked=False) is None
    assert world.learn(1, 0, Outcome.OK, 6, draft=[1]) is None


def test_a_draft_for_another_base_is_refused(world: World) -> None:
    world.plan((1, 0, 5), wanted=(1,))
    report = SessionReport(1, 0, Outcome.OK, 6, [1])
    assert world.sessions.learn_of_block(report, Block(1, 0, 5, ANCHOR)) is PlainReason.RESYNC
    step, _ = world.plan((1, 5, 1), wanted=(1,))
    assert step.opens == [Open(1, 1, 5)]


def test_reports_of_an_earlier_epoch_change_nothing(world: World) -> None:
    world.plan((1, 0, 5), wanted=(1,))
    world.learn(1, 0, Outcome.NEEDS_RESYNC)
    world.plan((1, 5, 1), wanted=(1,))
    for outcome in (Outcome.NEEDS_RESYNC, Outcome.NO_CAPACITY, Outcome.NON_FINITE):
        assert world.learn(1, 0, outcome, asked=False) is not None
    step, _ = world.plan((1, 6, 1), wanted=(1,))
    assert step == Step([], [], [Extend(1, 1, 6, 0, 1)], [Block(1, 1, 7, ANCHOR)])


def test_reports_on_ended_sessions_change_nothing(world: World) -> None:
    world.plan((1, 0, 5), wanted=(1,))
    world.plan(ended=(1,))
    assert world.learn(1, 0, Outcome.OK, 5, draft=[1]) is not None
    assert not world.sessions._sessions


def test_an_ended_session_is_closed_once_and_only_if_it_was_opened(world: World) -> None:
    world.plan((1, 0, 5))
    step, _ = world.plan(ended=(1, 2))
    assert step == Step([Close(1, 0)], [], [], [])
    step, _ = world.plan(ended=(1,))
    assert step.is_empty


def test_a_session_that_was_lost_is_still_closed(world: World) -> None:
    world.plan((1, 0, 5), wanted=(1,))
    world.learn(1, 0, Outcome.NEEDS_RESYNC)
    step, _ = world.plan(ended=(1,))
    assert step.closes == [Close(1, 0)]


def test_closes_that_do_not_fit_one_message_wait_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DRAFT_ENTRIES_MAX", 2)
    world = World()
    world.plan((1, 0, 1), (2, 0, 1), (3, 0, 1))
    assert len(world.plan(ended=(1, 2, 3))[0].closes) == 2
    assert len(world.plan()[0].closes) == 1
    assert world.plan()[0].is_empty


def test_a_new_drafter_holds_nothing(world: World) -> None:
    world.plan((1, 0, 5), (2, 0, 5), wanted=(1, 2))
    world.sessions.disconnected()
    assert world.sessions.num_open == 0
    assert world.sessions.lost_sessions() == set(), "there is nobody to capture for"
    world.plan(ended=(2,), captured=False)
    world.sessions.connected(8)
    assert world.sessions.lost_sessions() == {1}
    step, _ = world.plan((1, 0, 6), wanted=(1,))
    assert step.opens == [Open(1, 1, 0)]
    assert step.closes == [], "the new one never heard of 2"
    assert world.resyncs == ["recaptured"]


def test_a_loss_is_named_once(world: World) -> None:
    world.plan((1, 0, 5), wanted=(1,))
    assert world.sessions.lost_sessions() == set()
    world.learn(1, 0, Outcome.UNKNOWN_SESSION)
    assert world.sessions.lost_sessions() == {1}
    assert world.sessions.lost_sessions() == set()


def test_a_cold_context_is_offered_to_be_captured_anew(world: World) -> None:
    world.plan((1, 40, 5), wanted=(1,))
    assert world.sessions.lost_sessions() == {1}
    assert world.sessions.lost_sessions() == set()


def test_a_session_that_is_lost_each_step_is_not_captured_each_step(world: World) -> None:
    offers = 0
    for epoch in range(20):
        world.plan((1, 0, 5), wanted=(1,))
        world.learn(1, epoch, Outcome.NEEDS_RESYNC)
        offers += len(world.sessions.lost_sessions())
    assert offers == limits.RECAPTURES_MAX


def test_no_capacity_closes_the_session_and_waits(world: World) -> None:
    world.plan((1, 0, 5), (2, 0, 5), wanted=(1, 2))
    assert world.learn(2, 0, Outcome.NO_CAPACITY) is PlainReason.NO_CAPACITY
    step, plain = world.plan((1, 5, 1), (2, 5, 1), wanted=(1, 2))
    assert step.closes == [Close(2, 0)]
    assert step.opens == []
    assert plain == {2: PlainReason.NO_CAPACITY}
    assert world.sessions.lost_sessions() == set()
    world.now += limits.PROBE_INTERVAL_S
    assert world.sessions.lost_sessions() == {2}
    step, plain = world.plan((2, 6, 1), wanted=(2,))
    assert step.opens == [Open(2, 1, 6)]


def test_no_capacity_is_over_when_a_session_ends(world: World) -> None:
    world.plan((1, 0, 5), (2, 0, 5), wanted=(1, 2))
    world.learn(2, 0, Outcome.NO_CAPACITY)
    step, plain = world.plan((2, 5, 1), wanted=(2,), ended=(1,))
    assert step.closes == [Close(2, 0), Close(1, 0)]
    assert step.opens == [Open(2, 1, 5)]
    assert plain == {}


def test_no_more_sessions_are_opened_than_the_drafter_allows() -> None:
    world = World(num_sessions_max=2)
    step, plain = world.plan((1, 0, 1), (2, 0, 1), (3, 0, 1), wanted=(1, 2, 3))
    assert [o.session_id for o in step.opens] == [1, 2]
    assert plain == {3: PlainReason.NO_CAPACITY}
    step, plain = world.plan((3, 1, 1), wanted=(3,), ended=(1,))
    assert [o.session_id for o in step.opens] == [3]


def test_a_second_fault_ends_the_session_for_good(world: World) -> None:
    world.plan((1, 0, 5), wanted=(1,))
    assert world.learn(1, 0, Outcome.OK, 5, faulty=True) is PlainReason.INVALID_DRAFT
    step, _ = world.plan((1, 5, 1), wanted=(1,))
    assert step.blocks, "once may be chance"
    assert world.learn(1, 0, Outcome.OK, 6, faulty=True) is PlainReason.INVALID_DRAFT
    step, plain = world.plan((1, 6, 1), wanted=(1,))
    assert step == Step([Close(1, 0)], [], [], [])
    assert plain == {1: PlainReason.INVALID_DRAFT}
    assert world.sessions.lost_sessions() == set()


def test_a_context_beyond_the_limit_is_not_tried_again(world: World) -> None:
    world.plan((1, 0, 5), wanted=(1,))
    assert world.learn(1, 0, Outcome.CONTEXT_LIMIT) is PlainReason.NO_CAPACITY
    step, plain = world.plan((1, 5, 1), wanted=(1,))
    assert step == Step([Close(1, 0)], [], [], [])
    assert plain == {1: PlainReason.NO_CAPACITY}


def test_a_step_that_was_not_sent_loses_the_context_and_keeps_the_closes(world: World) -> None:
    world.plan((1, 0, 5), (2, 0, 5))
    step, _ = world.plan((1, 5, 1), wanted=(1,), ended=(2,))
    world.sessions.unsent(step)
    assert world.sessions.num_open == 0
    step, _ = world.plan((1, 6, 1), wanted=(1,))
    assert step.closes == [Close(2, 0)]
    assert step.opens == [Open(1, 1, 6)]
