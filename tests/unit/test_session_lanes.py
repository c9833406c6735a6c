"""Sessions on a device: lanes, room up to a bound, and what is kept while steps are in flight."""

from __future__ import annotations

import random

import pytest

from common.handoff.transport import Outcome
from common.paged_kv import PageEntry
from services.drafter.session import CloseReason, Effect, Session, SessionKey
from services.drafter.session_table import SessionTable
from tests.builders_drafter import ManualClock, RecordedSessions, build_table

A = SessionKey("target", 1)
B = SessionKey("target", 2)


def lane_of(session: Session) -> int:
    assert session.lane_state is not None
    return session.lane_state.lane


def appended(table: SessionTable, key: SessionKey, position: int, num_rows: int, epoch: int = 0) -> Session:
    outcome, session = table.append_to(key, epoch, position, num_rows)
    assert outcome is Outcome.OK and session is not None
    return session


def reserved(table: SessionTable, key: SessionKey, position_max: int, **begins: int) -> Session:
    outcome, session = table.reserve_to(key, 0, position_max, **begins)
    assert outcome is Outcome.OK and session is not None
    return session


def test_each_open_session_has_a_lane_of_its_own_and_gives_it_back() -> None:
    table = build_table(has_lanes=True, num_sessions_max=2)
    for key in (A, B):
        table.open(key, 0, 0)
    lanes = [lane_of(appended(table, key, 0, 1)) for key in (A, B)]
    assert sorted(lanes) == [0, 1]
    table.close(A, 0)
    table.open(SessionKey("target", 3), 0, 0)
    assert lane_of(appended(table, SessionKey("target", 3), 0, 1)) == lanes[0]
    assert table.num_lanes_unaccounted == 0


def test_room_is_made_for_the_highest_anchor_and_two_blocks_more() -> None:
    table = build_table(has_lanes=True, num_pages=16, page_size=4, block_size=4)
    table.open(A, 0, 10)
    reserved(table, A, 17)
    # Positions 10 … 17 + 8 - 1.
    assert table.num_pages_used == 4
    reserved(table, A, 16)
    assert table.num_pages_used == 4, "room is never given back before the end"


def test_a_bound_is_refused_with_the_outcome_that_fits() -> None:
    table = build_table(has_lanes=True, num_pages=4, page_size=4, block_size=4, context_len_max=40)
    assert table.reserve_to(A, 0, 5) == (Outcome.UNKNOWN_SESSION, None)
    table.open(A, 3, 0)
    assert table.reserve_to(A, 2, 5) == (Outcome.STALE_EPOCH, None)
    assert table.reserve_to(A, 3, 41) == (Outcome.CONTEXT_LIMIT, None)
    assert table.reserve_to(A, 3, 9) == (Outcome.NO_CAPACITY, None)
    assert table.num_pages_used == 0
    assert table.reserve_to(A, 3, 8)[0] is Outcome.OK


def test_a_page_is_told_once_with_its_lane_and_index() -> None:
    table = build_table(has_lanes=True, page_size=4, block_size=4)
    table.open(A, 0, 0)
    session = appended(table, A, 0, 5)
    first = table.begin_step(session, Effect(set_to=5))
    assert first == [PageEntry(lane_of(session), i, page) for i, page in enumerate(session.pages.pages)]
    assert len(first) == 2
    reserved(table, A, 7)
    more = table.begin_step(session, Effect(position_min=6))
    assert [entry.page_index for entry in more] == [2, 3]
    assert table.begin_step(session, Effect(position_min=7)) == []


def test_while_steps_are_in_flight_the_end_is_what_they_leave_it_at_least() -> None:
    table = build_table(has_lanes=True)
    table.open(A, 0, 0)
    session = appended(table, A, 0, 12)
    table.begin_step(session, Effect(set_to=12))
    table.begin_step(session, Effect(position_min=13))
    assert table.context_len(A) == 12, "the device may refuse the row"
    table.begin_step(session, Effect(position_min=9))
    assert table.context_len(A) == 9, "or crop"
    table.end_step(session, 12, is_finite=True)
    assert table.context_len(A) == 9
    table.end_step(session, 15, is_finite=True)
    assert table.context_len(A) == 9
    table.end_step(session, 10, is_finite=True)
    assert table.context_len(A) == 10


def test_pieces_of_a_prompt_follow_one_another_before_the_first_is_done() -> None:
    table = build_table(has_lanes=True)
    table.open(A, 0, 0)
    for position in (0, 8, 16):
        table.begin_step(appended(table, A, position, 8), Effect(set_to=position + 8))
    session = appended(table, A, 24, 1)
    table.end_step(session, 8, is_finite=True)
    assert table.context_len(A) == 24
    assert table.append_to(A, 0, 26, 1) == (Outcome.NEEDS_RESYNC, None)


def test_a_context_that_began_somewhere_on_the_device_is_appended_to_only_where_it_surely_is() -> None:
    table = build_table(has_lanes=True, page_size=4, block_size=4)
    table.open(A, 0, 0)
    session = reserved(table, A, 14, begins_at_min=6)
    # Positions 6 … 14 + 8 - 1 are 16 rows.
    assert table.num_pages_used == 4
    table.begin_step(session, Effect(set_to=10, position_min=10))
    table.end_step(session, 17, is_finite=True)
    assert table.append_to(A, 0, 13, 1) == (Outcome.NEEDS_RESYNC, None)
    assert table.append_to(A, 0, 14, 1)[0] is Outcome.OK


def test_the_pages_of_a_session_that_ends_are_kept_until_its_steps_are_over() -> None:
    table = build_table(has_lanes=True, num_pages=2, page_size=4)
    table.open(A, 0, 0)
    session = appended(table, A, 0, 8)
    table.begin_step(session, Effect(set_to=8))
    table.begin_step(session, Effect(position_min=8))
    table.close(A, 0)
    table.open(B, 0, 0)
    assert table.append_to(B, 0, 0, 1) == (Outcome.NO_CAPACITY, None)
    assert table.end_step(session, 8, is_finite=True) == ()
    assert table.num_pages_used == 2 and table.num_pages_unaccounted == 0
    assert table.end_step(session, 9, is_finite=True) == ()
    assert table.append_to(B, 0, 0, 8)[0] is Outcome.OK


@pytest.mark.parametrize("closed_first", [False, True])
def test_pages_that_held_rows_that_are_not_finite_are_named_once_when_the_last_step_is_over(
    closed_first: bool,
) -> None:
    observer = RecordedSessions()
    table = build_table(has_lanes=True, page_size=4, observer=observer)
    table.open(A, 0, 0)
    session = appended(table, A, 0, 8)
    pages = session.pages.pages
    for _ in range(3):
        table.begin_step(session, Effect(position_min=8))
    if closed_first:
        table.close(A, 0)
    assert table.end_step(session, 8, is_finite=False) == ()
    assert A not in table
    assert observer.closed == [CloseReason.ASKED if closed_first else CloseReason.NON_FINITE]
    assert table.end_step(session, 8, is_finite=False) == ()
    assert sorted(table.end_step(session, 8, is_finite=True)) == sorted(pages)
    assert table.num_pages_used == 0


def test_a_session_that_opened_under_the_same_key_is_not_taken_for_the_one_that_was_spoiled() -> None:
    table = build_table(has_lanes=True)
    table.open(A, 0, 0)
    session = appended(table, A, 0, 8)
    table.begin_step(session, Effect(set_to=8))
    table.open(A, 1, 0)
    assert table.end_step(session, 8, is_finite=False)
    assert A in table and table.append_to(A, 1, 0, 3)[0] is Outcome.OK


@pytest.mark.parametrize("run", range(10))
def test_pages_and_lanes_are_conserved_through_random_steps_in_flight(run: int) -> None:
    seed = random.randrange(2**32)
    print(f"run {run}, seed {seed}")
    rng = random.Random(seed)
    clock = ManualClock()
    table = build_table(
        has_lanes=True, num_pages=rng.randint(4, 24), num_sessions_max=rng.randint(1, 6), clock=clock
    )
    in_flight: list[tuple[Session, int]] = []
    told: dict[Session, list[int]] = {}
    for _ in range(400):
        key = SessionKey("x", rng.randrange(8))
        epoch, end = rng.randrange(2), table.context_len(key)
        match rng.choice(["open", "extend", "row", "row", "begin", "close", "done", "done", "done", "time"]):
            case "open":
                table.open(key, epoch, rng.choice([0, 0, 7]))
            case "extend":
                _, session = table.append_to(key, epoch, end, rng.randint(1, 9))
                launch(table, session, Effect(set_to=table.context_len(key)), in_flight, told)
            case "row":
                _, session = table.reserve_to(key, epoch, end + rng.randint(0, 8))
                launch(table, session, Effect(position_min=end), in_flight, told)
            case "begin":
                _, session = table.reserve_to(key, epoch, end + 8, begins_at_min=end)
                launch(table, session, Effect(set_to=end + 4, position_min=end + 4), in_flight, told)
            case "close":
                table.close(key, epoch)
            case "done":
                if in_flight:
                    session, least = in_flight.pop(0)
                    cleaned = table.end_step(session, least + rng.randint(0, 3), is_finite=rng.random() < 0.9)
                    assert not cleaned or all(session is not other for other, _ in in_flight)
            case "time":
                clock.now_s += rng.choice([0, 1, 31])
        assert table.num_pages_unaccounted == 0
        assert table.num_lanes_unaccounted == 0
    for session, least in in_flight:
        table.end_step(session, least, is_finite=True)
    table.close_instance("x")
    assert (table.num_sessions, table.num_pages_used, table.num_lanes_unaccounted) == (0, 0, 0)


def launch(
    table: SessionTable, session: Session | None, effect: Effect, in_flight: list[tuple[Session, int]],
    told: dict[Session, list[int]],
) -> None:  # fmt: skip
    """A step of this session alone. What the device was told by then is the session's page table."""
    if session is None:
        return
    entries = table.begin_step(session, effect)
    known = told.setdefault(session, [])
    assert [entry.page_index for entry in entries] == list(range(len(known), session.pages.num_pages))
    known += [entry.page for entry in entries]
    assert known == list(session.pages.pages)
    in_flight.append((session, session.context_len))
