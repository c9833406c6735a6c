"""Sessions on a device: lanes, room up to a bound, and what is kept while steps are in flight."""

from __future__ import annotations

import random

import pytest

from common.handoff.transport import Outcome
from common.paged_kv import PageEntry
from services.drafter.session import CloseReason, Session, SessionKey
from services.drafter.session_table import SessionTable
from tests.builders_drafter import ManualClock, RecordedSessions, build_table

A = SessionKey("target", 1)
B = SessionKey("target", 2)


def lane_of(session: Session) -> int:
    assert session.lane_state is not None
    return session.lane_state.lane


def reserved(table: SessionTable, key: SessionKey, position_max: int, **begins: int) -> Session:
    outcome, session = table.reserve_to(key, 0, position_max, **begins)
    assert outcome is Outcome.OK and session is not None
    return session


def test_each_open_session_has_a_lane_of_its_own_and_gives_it_back() -> None:
    table = build_table(has_lanes=True, num_sessions_max=2)
    for key in (A, B):
        table.open(key, 0, 0)
    lanes = [lane_of(reserved(table, key, 0)) for key in (A, B)]
    assert sorted(lanes) == [0, 1]
    table.close(A, 0)
    table.open(SessionKey("target", 3), 0, 0)
    assert lane_of(reserved(table, SessionKey("target", 3), 0)) == lanes[0]
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
    session = reserved(table, A, 0)
    first = table.begin_step(session)
    assert first == [PageEntry(lane_of(session), i, page) for i, page in enumerate(session.pages.pages)]
    assert len(first) == 2
    reserved(table, A, 7)
    assert [entry.page_index for entry in table.begin_step(session)] == [2, 3]
    assert table.begin_step(session) == []


def test_a_context_that_begins_somewhere_on_the_device_counts_its_room_from_the_lowest_position() -> None:
    table = build_table(has_lanes=True, num_pages=16, page_size=4, block_size=4)
    table.open(A, 0, 0)
    reserved(table, A, 14, begins_at_min=6)
    # Positions 6 … 14 + 8 - 1 are 16 rows.
    assert table.num_pages_used == 4
    reserved(table, A, 19)
    assert table.num_pages_used == 6


def test_a_beginning_that_finds_no_room_moves_nothing() -> None:
    table = build_table(has_lanes=True, num_pages=2, page_size=4, block_size=4)
    table.open(A, 0, 3)
    assert table.reserve_to(A, 0, 12, begins_at_min=9) == (Outcome.NO_CAPACITY, None)
    assert reserved(table, A, 3).start_position == 3


def test_the_end_of_a_context_is_what_the_last_step_that_is_over_left() -> None:
    table = build_table(has_lanes=True)
    table.open(A, 0, 0)
    session = reserved(table, A, 8)
    table.begin_step(session)
    assert table.context_len(A) == 0
    table.end_step(session, 7, is_finite=True)
    assert table.context_len(A) == 7


def test_the_pages_of_a_session_that_ends_are_kept_until_its_steps_are_over() -> None:
    table = build_table(has_lanes=True, num_pages=2, page_size=4, block_size=4)
    table.open(A, 0, 0)
    session = reserved(table, A, 0)
    table.begin_step(session)
    table.begin_step(session)
    table.close(A, 0)
    table.open(B, 0, 0)
    assert table.reserve_to(B, 0, 0) == (Outcome.NO_CAPACITY, None)
    assert table.end_step(session, 8, is_finite=True) == ()
    assert table.num_pages_used == 2 and table.num_pages_unaccounted == 0
    assert table.end_step(session, 9, is_finite=True) == ()
    assert reserved(table, B, 0).key == B


@pytest.mark.parametrize("closed_first", [False, True])
def test_pages_that_held_rows_that_are_not_finite_are_named_once_when_the_last_step_is_over(
    closed_first: bool,
) -> None:
    observer = RecordedSessions()
    table = build_table(has_lanes=True, observer=observer)
    table.open(A, 0, 0)
    session = reserved(table, A, 8)
    pages = session.pages.pages
    for _ in range(3):
        table.begin_step(session)
    if closed_first:
        table.close(A, 0)
    assert table.end_step(session, 8, is_finite=False) == ()
    assert A not in table
    assert observer.closed == [CloseReason.ASKED if closed_first else CloseReason.NON_FINITE]
    assert table.end_step(session, 8, is_finite=False) == ()
    assert sorted(table.end_step(session, 8, is_finite=True)) == sorted(pages)
    assert table.num_pages_used == 0


def test_a_session_that_opened_under_the_same_key_is_not_taken_for_the_one_that_was_spoiled() -> None:
    table = build_table(has_lanes=True, num_pages=32)
    table.open(A, 0, 0)
    session = reserved(table, A, 8)
    table.begin_step(session)
    table.open(A, 1, 0)
    assert table.end_step(session, 8, is_finite=False)
    assert A in table and table.reserve_to(A, 1, 8)[0] is Outcome.OK


@pytest.mark.parametrize("run", range(10))
def test_pages_and_lanes_are_conserved_through_random_steps_in_flight(run: int) -> None:
    seed = random.randrange(2**32)
    print(f"run {run}, seed {seed}")
    rng = random.Random(seed)
    clock = ManualClock()
    table = build_table(
        has_lanes=True, num_pages=rng.randint(4, 24), num_sessions_max=rng.randint(1, 6), clock=clock
    )
    in_flight: list[Session] = []
    told: dict[Session, list[int]] = {}
    for _ in range(400):
        key = SessionKey("x", rng.randrange(8))
        epoch, end = rng.randrange(2), table.context_len(key)
        match rng.choice(["open", "step", "step", "step", "begin", "close", "done", "done", "done", "time"]):
            case "open":
                table.open(key, epoch, rng.choice([0, 0, 7]))
            case "step":
                launch(table, table.reserve_to(key, epoch, end + rng.randint(0, 8))[1], in_flight, told)
            case "begin":
                launch(table, table.reserve_to(key, epoch, end + 8, end)[1], in_flight, told)
            case "close":
                table.close(key, epoch)
            case "done":
                if in_flight:
                    session = in_flight.pop(0)
                    held = session.pages.pages
                    end = session.context_len + rng.randint(0, 3)
                    cleaned = table.end_step(session, end, is_finite=rng.random() < 0.9)
                    assert cleaned in ((), held)
                    assert not cleaned or session not in in_flight
            case "time":
                clock.now_s += rng.choice([0, 1, 31])
        assert table.num_pages_unaccounted == 0
        assert table.num_lanes_unaccounted == 0
    for session in in_flight:
        table.end_step(session, 0, is_finite=True)
    table.close_instance("x")
    assert (table.num_sessions, table.num_pages_used, table.num_lanes_unaccounted) == (0, 0, 0)


def launch(
    table: SessionTable, session: Session | None, in_flight: list[Session], told: dict[Session, list[int]]
) -> None:
    """A step of this session alone. What the device was told by then is the session's page table."""
    if session is None:
        return
    entries = table.begin_step(session)
    known = told.setdefault(session, [])
    assert [entry.page_index for entry in entries] == list(range(len(known), session.pages.num_pages))
    known += [entry.page for entry in entries]
    assert known == list(session.pages.pages)
    in_flight.append(session)
