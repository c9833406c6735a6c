"""What the target believes of sessions whose positions only the device knows."""

from __future__ import annotations

import pytest

from common import limits
from common.handoff.transport import Close, DeviceRow, DeviceStep, Extend, Open, Outcome, SessionReport
from services.target.core.device_sessions import DeviceSessions
from services.target.core.draft_source import PlainReason
from services.target.core.pipelined_source import PostedExtend, PostedRow, PostedStep

NUM_SESSIONS_MAX = 3


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.resyncs: list[str] = []
        self.sessions = DeviceSessions(lambda: self.now, self.resyncs.append)
        self.sessions.connected(NUM_SESSIONS_MAX)
        self.sequence = 0

    def plan(
        self, *rows: PostedRow | None, extends: tuple[PostedExtend, ...] = (), ended: tuple[int, ...] = ()
    ) -> DeviceStep:
        self.sequence += 1
        posted = PostedStep(self.sequence, list(extends), list(rows), list(ended))
        return self.sessions.plan(posted, self.sequence)

    def learn(self, session_id: int, epoch: int, outcome: Outcome, context_len: int = 0) -> None:
        self.sessions.learn(SessionReport(session_id, epoch, outcome, context_len))


@pytest.fixture
def world() -> World:
    return World()


def test_a_prompt_opens_a_session_and_its_rows_go_on(world: World) -> None:
    step = world.plan(extends=(PostedExtend(1, 0, 4, 10),))
    assert (step.opens, step.extends) == ([Open(1, 0, 0)], [Extend(1, 0, 0, 4, 14)])
    step = world.plan(PostedRow(1, 13, 13), extends=(PostedExtend(1, 10, 0, 3),))
    assert step.opens == []
    assert step.extends == [Extend(1, 0, 10, 0, 3)]
    assert step.rows == [DeviceRow(1, 0, 13, 13, False)]
    assert world.plan(PostedRow(1, 13, 17)).rows == [DeviceRow(1, 0, 13, 17, False)]
    assert world.resyncs == []


def test_a_session_without_its_past_begins_where_the_device_finds_it(world: World) -> None:
    step = world.plan(None, PostedRow(1, 20, 35))
    assert step.opens == [Open(1, 0, 20)]
    assert step.rows == [None, DeviceRow(1, 0, 20, 35, True)]
    assert world.plan(PostedRow(1, 21, 50)).rows == [DeviceRow(1, 0, 21, 50, False)]
    assert world.resyncs == ["cold"]


def test_a_gap_that_the_device_found_re_opens_the_session_once(world: World) -> None:
    world.plan(PostedRow(1, 20, 35))
    world.plan(PostedRow(1, 21, 50))
    world.learn(1, 0, Outcome.NEEDS_RESYNC)
    assert not world.sessions.is_open(1, 0)
    assert world.plan(PostedRow(1, 22, 60)).rows == [DeviceRow(1, 1, 22, 60, True)]
    # The report on the step that was under way meanwhile is of the epoch before.
    world.learn(1, 0, Outcome.NEEDS_RESYNC)
    assert world.sessions.is_open(1, 1)
    assert world.plan(PostedRow(1, 23, 70)).rows == [DeviceRow(1, 1, 23, 70, False)]


def test_a_recompute_from_the_start_goes_on_in_a_session_that_has_its_start(world: World) -> None:
    world.plan(extends=(PostedExtend(1, 0, 0, 10),))
    world.plan(PostedRow(1, 11, 14))
    step = world.plan(extends=(PostedExtend(1, 0, 0, 12),))
    assert (step.opens, step.extends) == ([], [Extend(1, 0, 0, 0, 12)])


def test_a_recompute_from_the_start_re_opens_a_session_that_began_later(world: World) -> None:
    world.plan(PostedRow(1, 20, 35))
    step = world.plan(extends=(PostedExtend(1, 0, 0, 12),))
    assert (step.opens, step.extends) == ([Open(1, 1, 0)], [Extend(1, 1, 0, 0, 12)])
    assert world.resyncs == ["cold", "recaptured"]


def test_an_append_that_may_lie_past_the_context_re_opens(world: World) -> None:
    world.plan(extends=(PostedExtend(1, 0, 0, 10),))
    world.plan(PostedRow(1, 11, 26))
    # Somewhere in 11 … 26: an append at 12 may leave a gap.
    step = world.plan(extends=(PostedExtend(1, 12, 0, 4),))
    assert step.opens == [Open(1, 1, 12)]


def test_sessions_beyond_the_drafters_number_are_nobodys_rows(world: World) -> None:
    step = world.plan(*(PostedRow(s, 5, 9) for s in range(1, 6)))
    assert [row and row.session_id for row in step.rows] == [1, 2, 3, None, None]
    assert world.sessions.why_plain(4) is PlainReason.NO_CAPACITY
    step = world.plan(*(PostedRow(s, 6, 9) for s in (1, 2, 4)), ended=(3,))
    assert step.closes == [Close(3, 0)]
    assert [row and row.session_id for row in step.rows] == [1, 2, 4]


def test_a_step_that_was_not_sent_loses_what_it_named_and_keeps_its_closes(world: World) -> None:
    world.plan(PostedRow(1, 5, 9), PostedRow(2, 5, 9), PostedRow(3, 5, 9))
    step = world.plan(PostedRow(1, 6, 9), extends=(PostedExtend(2, 6, 0, 1),), ended=(3,))
    world.sessions.unsent(step)
    step = world.plan(PostedRow(1, 7, 9))
    assert step.closes == [Close(3, 0)]
    assert step.rows == [DeviceRow(1, 1, 7, 9, True)]
    assert not world.sessions.is_open(2, 0)


def test_a_session_that_is_not_finite_again_and_again_is_left_alone(world: World) -> None:
    for epoch in range(limits.SESSION_FAULTS_MAX):
        assert world.plan(PostedRow(1, 5 + epoch, 9)).rows == [DeviceRow(1, epoch, 5 + epoch, 9, True)]
        world.learn(1, epoch, Outcome.NON_FINITE)
    assert world.plan(PostedRow(1, 7, 9)).rows == [None]
    assert world.sessions.why_plain(1) is PlainReason.NON_FINITE


def test_a_full_drafter_is_asked_again_after_a_while(world: World) -> None:
    world.plan(PostedRow(1, 5, 9))
    world.learn(1, 0, Outcome.NO_CAPACITY)
    step = world.plan(PostedRow(1, 6, 9))
    assert step.closes == [Close(1, 0)]
    assert step.rows == [None]
    world.now += limits.PROBE_INTERVAL_S + 0.1
    assert world.plan(PostedRow(1, 7, 9)).rows == [DeviceRow(1, 1, 7, 9, True)]
