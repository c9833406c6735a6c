"""The scheduler whose requests have lanes and whose last results nobody has seen: bounds, pages, riders."""

from __future__ import annotations

import pytest

from common.paged_kv import PagePool
from services.target.core.lanes_scheduler import LanesScheduler, Plan, Ride
from services.target.core.request import Phase, Request, SamplingParams

WIDTH = 4


def build_request(name: str, prompt_len: int, max_new_tokens: int = 40) -> Request:
    return Request(
        name, [1] * prompt_len, SamplingParams(), max_new_tokens, frozenset(), True, lambda _: None
    )


def build_scheduler(
    num_pages: int = 64, page_size: int = 4, *, num_running_max: int = 4, extend_rows_max: int = 64,
    extends_max: int = 4,
) -> LanesScheduler:  # fmt: skip
    return LanesScheduler(
        PagePool(num_pages, page_size), num_running_max=num_running_max,
        extend_rows_max=extend_rows_max, extends_max=extends_max,
    )  # fmt: skip


def ride_of(request: Request) -> Ride:
    assert request.ride is not None
    return request.ride


def launch(scheduler: LanesScheduler, width: int = WIDTH) -> Plan:
    """Plan a launch and let it be on its way, each decode with a draft where it may have one."""
    plan = scheduler.next_launch(width)
    for ride, may_draft in zip(plan.decodes, plan.may_draft, strict=True):
        ride.launched(width if may_draft else 1)
    for extend in plan.extends:
        if extend.samples:
            extend.ride.launched(1)
    return plan


def read(ride: Ride, num_tokens_max: int, num_tokens: int) -> None:
    """The oldest launch of a ride committed so many tokens."""
    ride.read(num_tokens_max)
    ride.request.tokens += [7] * num_tokens
    if ride.request.phase is Phase.RUNNING:
        ride.request.cached_len = ride.request.committed_len - 1


def start(scheduler: LanesScheduler, *requests: Request) -> None:
    """Let requests decode, with one token each and nothing in flight."""
    for request in requests:
        scheduler.add(request)
    launch(scheduler, width=1)
    for request in requests:
        read(ride_of(request), 1, 1)


def decoding(plan: Plan) -> list[str]:
    return [ride.request.request_id for ride in plan.decodes]


def test_pages_reach_as_far_as_all_that_is_in_flight_and_the_launch_may() -> None:
    scheduler = build_scheduler(page_size=1)
    request = build_request("a", 5)
    start(scheduler, request)
    table = request.page_table
    assert table is not None
    for in_flight in range(3):
        plan = launch(scheduler)
        # The anchor stands at position 5 at least, and 4 further for each launch before.
        assert table.num_pages == 5 + WIDTH * (in_flight + 1)
        assert ride_of(request).position_min == 5 + in_flight + 1
        assert ride_of(request).position_max == 5 + WIDTH * (in_flight + 1)
        assert [entry.page for entry in plan.pages] == list(table.pages[5 + WIDTH * in_flight :])
        assert [entry.page_index for entry in plan.pages] == list(
            range(5 + WIDTH * in_flight, 5 + WIDTH * (in_flight + 1))
        )
        assert {entry.lane for entry in plan.pages} == {ride_of(request).lane}


def test_no_page_is_taken_past_the_last_token_that_is_ever_read() -> None:
    scheduler = build_scheduler(page_size=1)
    request = build_request("a", 5, 3)
    start(scheduler, request)
    launch(scheduler)
    assert request.page_table is not None
    # 5 of the prompt and 3 more, the last of which is only told.
    assert request.page_table.num_pages == 7


def test_a_request_whose_room_is_surely_used_up_by_what_is_in_flight_rides_no_more() -> None:
    scheduler = build_scheduler()
    request = build_request("a", 5, 3)
    scheduler.add(request)
    assert len(launch(scheduler).extends) == 1
    assert decoding(launch(scheduler)) == ["a"]
    assert decoding(launch(scheduler)) == ["a"]
    assert launch(scheduler).is_empty
    read(ride_of(request), 1, 1)
    assert launch(scheduler).is_empty


def test_a_prompt_goes_on_before_anything_of_it_was_read_and_decodes_right_after() -> None:
    scheduler = build_scheduler(extend_rows_max=4)
    scheduler.add(build_request("a", 10))
    parts = [launch(scheduler) for _ in range(4)]
    assert [[(e.start, e.stop, e.samples) for e in plan.extends] for plan in parts] == [
        [(0, 4, False)], [(4, 8, False)], [(8, 10, True)], [],
    ]  # fmt: skip
    assert [len(plan.joined) for plan in parts] == [1, 0, 0, 0]
    assert decoding(parts[3]) == ["a"]


def test_a_launch_takes_no_more_prompts_and_prompt_rows_than_it_may() -> None:
    scheduler = build_scheduler(extend_rows_max=10, extends_max=2)
    for name in "abcd":
        scheduler.add(build_request(name, 4))
    assert [e.ride.request.request_id for e in launch(scheduler).extends] == ["a", "b"]
    assert [e.ride.request.request_id for e in launch(scheduler).extends] == ["c", "d"]
    scheduler = build_scheduler(extend_rows_max=10, extends_max=4)
    for name in "abcd":
        scheduler.add(build_request(name, 4))
    assert [(e.ride.request.request_id, e.num_tokens) for e in launch(scheduler).extends] == [
        ("a", 4), ("b", 4), ("c", 2),
    ]  # fmt: skip


def test_a_draft_is_left_out_before_anybody_is_preempted_for_it() -> None:
    scheduler = build_scheduler(num_pages=4, page_size=4)
    old, young = build_request("old", 6, 8), build_request("young", 6, 8)
    start(scheduler, old, young)
    plan = launch(scheduler)
    assert (decoding(plan), plan.may_draft) == (["old", "young"], [False, False])
    assert scheduler.num_preemptions == 0


def test_a_position_that_is_only_a_bound_sits_out_rather_than_preempt() -> None:
    scheduler = build_scheduler(num_pages=8, page_size=1)
    old, young = build_request("old", 3, 5), build_request("young", 2, 6)
    start(scheduler, old, young)
    assert scheduler.pool.num_free == 3
    first = launch(scheduler, width=2)
    assert (decoding(first), first.may_draft) == (["old", "young"], [True, False])
    assert scheduler.pool.num_free == 0
    second = launch(scheduler, width=2)
    assert second.is_empty
    assert scheduler.num_preemptions == 0
    # Known, and its token needs a page that only the younger has.
    read(ride_of(old), 2, 2)
    assert decoding(launch(scheduler, width=2)) == ["old"]
    assert scheduler.num_preemptions == 1
    assert young.phase is Phase.WAITING


def test_what_is_in_flight_for_a_preempted_request_is_read_before_it_starts_again() -> None:
    scheduler = build_scheduler(num_pages=12, page_size=1)
    old, young = build_request("old", 2, 10), build_request("young", 2, 10)
    start(scheduler, old, young)
    launch(scheduler, width=1)
    scheduler._preempt(young)
    ride = ride_of(young)
    assert (young.phase, ride.is_over, ride.num_in_flight) == (Phase.WAITING, False, 1)
    plan = launch(scheduler, width=1)
    assert not plan.joined, "its tokens are not known yet"
    read(ride, 1, 1)
    plan = launch(scheduler, width=1)
    assert [ride.request.request_id for ride in plan.joined] == ["young"]
    assert [(e.start, e.stop) for e in plan.extends] == [(0, 4)]
    assert ride_of(young) is not ride


def test_the_youngest_gives_lane_and_pages_back_and_waits_in_front() -> None:
    scheduler = build_scheduler(num_pages=6, page_size=1, num_running_max=2)
    first, second = build_request("first", 2, 4), build_request("second", 2, 4)
    start(scheduler, first, second)
    scheduler.add(build_request("third", 1, 1))
    lane = ride_of(second).lane
    first.tokens += [7] * 2
    first.cached_len = 4
    assert decoding(launch(scheduler, width=1)) == ["first"]
    assert second.phase is Phase.WAITING and second.page_table is None
    assert scheduler.num_lanes_unaccounted == 0
    assert scheduler._free_lanes == [lane]
    assert scheduler.num_waiting == 2, "the newcomer overtook"


def test_who_starts_again_from_a_token_keeps_lane_and_pages_and_discards_what_is_in_flight() -> None:
    scheduler = build_scheduler()
    request = build_request("a", 6)
    start(scheduler, request)
    launch(scheduler)
    before, pages = ride_of(request), request.page_table and request.page_table.pages
    scheduler.restart(request, request.committed_len - 1)
    assert before.is_over and not ride_of(request).is_over
    assert ride_of(request).lane == before.lane
    plan = launch(scheduler)
    assert [(e.start, e.stop, e.samples) for e in plan.extends] == [(6, 7, True)]
    assert not plan.decodes and not plan.joined and not plan.pages
    assert request.page_table and request.page_table.pages == pages


def test_a_request_that_ended_frees_all_it_had_while_it_still_rides() -> None:
    scheduler = build_scheduler(num_running_max=1)
    request, waits = build_request("a", 6), build_request("b", 3)
    start(scheduler, request)
    scheduler.add(waits)
    launch(scheduler)
    ride = ride_of(request)
    scheduler.remove(request)
    assert ride.is_over
    assert scheduler.pool.num_free == scheduler.pool.num_pages
    plan = launch(scheduler)
    assert [(r.request.request_id, r.lane) for r in plan.joined] == [("b", ride.lane)]


def test_a_request_is_admitted_only_with_pages_for_its_first_block() -> None:
    scheduler = build_scheduler(num_pages=8, page_size=1)
    scheduler.add(build_request("a", 5, 3))
    assert len(launch(scheduler, width=3).joined) == 1
    scheduler = build_scheduler(num_pages=8, page_size=1)
    scheduler.pool.allocate(2)
    scheduler.add(build_request("a", 5, 3))
    assert not launch(scheduler, width=3).joined
    # Where its end is nearer than a block, no more than that.
    scheduler.add(build_request("b", 1, 1))
    assert not launch(scheduler, width=3).joined, "the newcomer overtook"


def test_a_request_that_could_never_fit_is_refused_when_it_is_added() -> None:
    with pytest.raises(AssertionError):
        build_scheduler(num_pages=4, page_size=4).add(build_request("a", 10, 7))
