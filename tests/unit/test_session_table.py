"""The rules of the draft protocol, one test each; no tensors, a manual clock."""

from __future__ import annotations

import pytest

from common.handoff.transport import Outcome
from services.drafter.session import CloseReason, SessionKey
from services.drafter.session_table import SessionTable
from tests.builders_drafter import ManualClock, RecordedSessions, build_table

A = SessionKey("target", 1)
B = SessionKey("target", 2)
C = SessionKey("another", 1)


def open_with_rows(table: SessionTable, key: SessionKey, num_rows: int) -> list[int]:
    """Open a session and give it context; the slots."""
    assert table.open(key, 0, 0) is Outcome.OK
    outcome, slots = table.append_at(key, 0, 0, num_rows)
    assert outcome is Outcome.OK
    return slots


def test_appends_take_slots_page_by_page_and_never_the_sentinels() -> None:
    table = build_table(num_pages=4, page_size=4)
    slots = open_with_rows(table, A, 5)
    more = table.append_at(A, 0, 5, 2)[1]
    assert len(set(slots + more)) == 7
    assert min(slots + more) >= 4
    assert more == [slots[-1] + 1, slots[-1] + 2]
    assert table.context_len(A) == 7


def test_opening_twice_under_one_epoch_keeps_the_context() -> None:
    table = build_table()
    open_with_rows(table, A, 5)
    assert table.open(A, 0, 0) is Outcome.OK
    assert table.context_len(A) == 5
    assert table.num_sessions == 1


def test_a_higher_epoch_replaces_the_session_and_frees_its_pages() -> None:
    observer = RecordedSessions()
    table = build_table(observer=observer)
    open_with_rows(table, A, 20)
    assert table.open(A, 1, 7) is Outcome.OK
    assert table.context_len(A) == 7
    assert table.num_pages_used == 0
    assert observer.closed == [CloseReason.REPLACED]
    assert observer.num_opened == 2


def test_a_lower_epoch_is_stale_and_changes_nothing() -> None:
    table = build_table()
    assert table.open(A, 3, 0) is Outcome.OK
    table.append_at(A, 3, 0, 4)
    assert table.open(A, 2, 0) is Outcome.STALE_EPOCH
    assert table.context_len(A) == 4


@pytest.mark.parametrize("epoch", [2, 4], ids=["lower", "never opened"])
def test_appends_and_blocks_under_another_epoch_are_stale(epoch: int) -> None:
    table = build_table()
    table.open(A, 3, 0)
    assert table.append_at(A, epoch, 0, 1) == (Outcome.STALE_EPOCH, [])
    assert table.reserve_block(A, epoch, 0) == (Outcome.STALE_EPOCH, None)
    assert table.context_len(A) == 0


def test_an_unknown_session_is_named_so_and_not_created() -> None:
    table = build_table()
    assert table.append_at(A, 0, 0, 1) == (Outcome.UNKNOWN_SESSION, [])
    assert table.reserve_block(A, 0, 0) == (Outcome.UNKNOWN_SESSION, None)
    assert table.num_sessions == 0


def test_the_same_id_of_another_target_is_another_session() -> None:
    table = build_table()
    open_with_rows(table, A, 4)
    open_with_rows(table, C, 6)
    assert (table.context_len(A), table.context_len(C)) == (4, 6)


def test_an_append_beyond_the_end_needs_a_resync_and_writes_nothing() -> None:
    table = build_table()
    open_with_rows(table, A, 5)
    assert table.append_at(A, 0, 6, 1) == (Outcome.NEEDS_RESYNC, [])
    assert table.context_len(A) == 5


def test_an_append_below_the_end_crops_and_reuses_the_same_slots() -> None:
    table = build_table()
    slots = open_with_rows(table, A, 9)
    outcome, again = table.append_at(A, 0, 3, 2)
    assert outcome is Outcome.OK
    assert again == slots[3:5]
    assert table.context_len(A) == 5


def test_repeating_an_append_gives_the_same_slots_and_the_same_end() -> None:
    table = build_table()
    open_with_rows(table, A, 5)
    first = table.append_at(A, 0, 5, 4)
    assert table.append_at(A, 0, 5, 4) == first
    assert table.context_len(A) == 9


def test_a_late_start_counts_positions_from_there() -> None:
    table = build_table(num_pages=3, page_size=4)
    assert table.open(A, 0, 30) is Outcome.OK
    assert table.append_at(A, 0, 0, 1) == (Outcome.NEEDS_RESYNC, [])
    outcome, slots = table.append_at(A, 0, 30, 5)
    assert outcome is Outcome.OK
    assert len(slots) == 5
    # Two pages for five rows: the positions before the start take none.
    assert table.num_pages_used == 2


def test_a_block_anywhere_but_at_the_end_needs_a_resync() -> None:
    table = build_table()
    open_with_rows(table, A, 5)
    assert table.reserve_block(A, 0, 4) == (Outcome.NEEDS_RESYNC, None)
    assert table.reserve_block(A, 0, 6) == (Outcome.NEEDS_RESYNC, None)


def test_a_blocks_rows_follow_the_context_and_do_not_count_as_context() -> None:
    table = build_table(block_size=4)
    context = open_with_rows(table, A, 6)
    outcome, session = table.reserve_block(A, 0, 6)
    assert outcome is Outcome.OK and session is not None
    block = table.block_slots(session)
    assert len(block) == 4
    assert not set(block) & set(context)
    assert table.context_len(A) == 6
    assert table.append_at(A, 0, 6, 3)[1] == block[:3]


def test_context_past_the_limit_is_refused_and_a_block_at_the_limit_is_not() -> None:
    table = build_table(context_len_max=12, block_size=4)
    open_with_rows(table, A, 10)
    assert table.append_at(A, 0, 10, 3) == (Outcome.CONTEXT_LIMIT, [])
    assert table.append_at(A, 0, 10, 2)[0] is Outcome.OK
    assert table.reserve_block(A, 0, 12)[0] is Outcome.OK
    assert table.open(B, 0, 13) is Outcome.CONTEXT_LIMIT


def test_an_append_that_does_not_fit_writes_nothing_and_keeps_what_was_there() -> None:
    table = build_table(num_pages=3, page_size=4)
    open_with_rows(table, A, 9)
    open_with_rows_outcome = table.open(B, 0, 0)
    assert open_with_rows_outcome is Outcome.OK
    assert table.append_at(B, 0, 0, 1) == (Outcome.NO_CAPACITY, [])
    # A crop that would come with it does not happen either.
    assert table.append_at(A, 0, 2, 30) == (Outcome.NO_CAPACITY, [])
    assert table.context_len(A) == 9
    assert table.num_pages_unaccounted == 0


def test_a_block_without_room_is_refused_and_its_context_stays() -> None:
    table = build_table(num_pages=2, page_size=4, block_size=4)
    open_with_rows(table, A, 5)
    assert table.reserve_block(A, 0, 5) == (Outcome.NO_CAPACITY, None)
    assert table.context_len(A) == 5


def test_sessions_run_out_while_all_are_alive() -> None:
    table = build_table(num_sessions_max=1)
    open_with_rows(table, A, 4)
    assert table.open(B, 0, 0) is Outcome.NO_CAPACITY
    assert A in table and B not in table
    table.close(A, 0)
    assert table.open(B, 0, 0) is Outcome.OK


@pytest.mark.parametrize("short_of", ["sessions", "pages"])
def test_a_session_whose_lease_ended_makes_way_and_a_living_one_never_does(short_of: str) -> None:
    clock, observer = ManualClock(), RecordedSessions()
    num_sessions_max = 2 if short_of == "sessions" else 8
    table = build_table(
        num_pages=4, page_size=4, num_sessions_max=num_sessions_max, clock=clock, observer=observer
    )
    open_with_rows(table, A, 8)
    clock.now_s += 20
    open_with_rows(table, B, 8)
    assert table.open(C, 0, 0) is (Outcome.NO_CAPACITY if short_of == "sessions" else Outcome.OK)
    if short_of == "pages":
        assert table.append_at(C, 0, 0, 8)[0] is Outcome.NO_CAPACITY
    clock.now_s += 11
    assert table.open(C, 0, 0) is Outcome.OK
    assert table.append_at(C, 0, 0, 8)[0] is Outcome.OK
    assert A not in table and B in table
    assert observer.closed == [CloseReason.LEASE_EXPIRED]


def test_each_way_of_naming_a_session_renews_its_lease() -> None:
    clock = ManualClock()
    table = build_table(clock=clock, lease_s=30)
    table.open(A, 0, 0)
    for renew in (
        lambda: table.open(A, 0, 0),
        lambda: table.append_at(A, 0, 0, 3),
        lambda: table.reserve_block(A, 0, 3),
    ):
        clock.now_s += 29
        assert renew() is not None
        assert table.expire() == 0
    clock.now_s += 31
    assert table.expire() == 1
    assert table.num_pages_used == 0


def test_leases_end_in_order_of_last_use_not_of_opening() -> None:
    clock = ManualClock()
    table = build_table(clock=clock, lease_s=30)
    table.open(A, 0, 0)
    table.open(B, 0, 0)
    clock.now_s += 20
    table.open(A, 0, 0)
    clock.now_s += 15
    assert table.expire() == 1
    assert A in table and B not in table


def test_closing_ends_this_epoch_and_lower_ones_but_not_a_higher_one() -> None:
    table = build_table()
    table.open(A, 2, 0)
    assert table.close(A, 1) is False
    assert A in table
    assert table.close(A, 2) is True
    assert table.close(A, 2) is False
    assert table.num_sessions == 0


def test_a_target_can_close_some_or_all_of_its_own_sessions_only() -> None:
    table = build_table()
    for key in (A, B, C):
        open_with_rows(table, key, 3)
    assert table.close_instance("target", [2, 99]) == 1
    assert table.close_instance("target") == 1
    assert table.close_instance("nobody") == 0
    assert C in table and table.num_sessions == 1


def test_sessions_of_target_lives_that_are_over_are_dropped() -> None:
    observer = RecordedSessions()
    table = build_table(observer=observer)
    for key in (A, B, C):
        open_with_rows(table, key, 3)
    assert table.drop_other_instances({"another"}) == 2
    assert C in table and table.num_sessions == 1
    assert observer.closed == [CloseReason.INSTANCE_GONE] * 2


def test_while_draining_no_session_begins_and_open_ones_go_on() -> None:
    table = build_table()
    open_with_rows(table, A, 3)
    table.refuse_opens()
    assert table.open(B, 0, 0) is Outcome.NO_CAPACITY
    assert table.open(A, 0, 0) is Outcome.OK
    assert table.append_at(A, 0, 3, 1)[0] is Outcome.OK


def test_an_abandoned_session_is_gone_and_says_which_pages_to_clean() -> None:
    table = build_table(page_size=4)
    slots = open_with_rows(table, A, 6)
    assert sorted(table.abandon(A)) == sorted({slot // 4 for slot in slots})
    assert A not in table
    assert table.num_pages_used == 0
