"""The scheduler alone: rows, budgets, pages and preemption, with a made-up model that always accepts
at random."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from common.paged_kv import PagePool
from services.target.core.request import FinishReason, Phase, Request, SamplingParams
from services.target.core.scheduler import Batch, Scheduler

SEED = 20261213


def build_request(name: str, prompt_len: int, max_new_tokens: int = 20, *, drafting: bool = True) -> Request:
    return Request(
        name, [1] * prompt_len, SamplingParams(), max_new_tokens, frozenset(), drafting, lambda _: None
    )


def build_scheduler(
    num_pages: int = 64, page_size: int = 4, *, num_running_max: int = 8, extend_rows_max: int = 64
) -> Scheduler:
    return Scheduler(
        PagePool(num_pages, page_size), num_running_max=num_running_max, extend_rows_max=extend_rows_max
    )


def commit(scheduler: Scheduler, batch: Batch, num_accepted: dict[str, int] | None = None) -> None:
    """What the step loop does with a batch: store, commit the accepted drafts and a bonus, end."""
    for s in batch.scheduled:
        request = s.request
        request.cached_len += s.num_tokens
        if not s.samples:
            continue
        accepted = (num_accepted or {}).get(request.request_id, len(s.draft))
        assert accepted <= len(s.draft)
        request.cached_len += accepted
        request.tokens += [7] * (accepted + 1)
        if request.room == 0:
            scheduler.remove(request)
            request.finish(FinishReason.LENGTH)


def names(batch: Batch) -> list[str]:
    return [s.request.request_id for s in batch.scheduled]


def owned_pages(scheduler: Scheduler) -> list[int]:
    return [page for r in scheduler.running if r.page_table for page in r.page_table.pages]


@dataclass
class World:
    """A run with random traffic, that checks what must hold after every step."""

    rng: random.Random
    scheduler: Scheduler
    num_running_max: int
    extend_rows_max: int
    num_draft_tokens: int
    waiting_before: list[Request] = field(default_factory=list)
    sessions_seen: set[int] = field(default_factory=set)
    sessions_ended: list[int] = field(default_factory=list)

    def step(self) -> Batch:
        running_before = self.scheduler.running
        drafts = {
            r.session_id: [7] * self.num_draft_tokens for r in running_before if self.rng.random() < 0.7
        }
        batch = self.scheduler.next_batch(drafts)
        self.check(batch, running_before)
        accepted = {s.request.request_id: self.rng.randint(0, len(s.draft)) for s in batch.scheduled}
        commit(self.scheduler, batch, accepted)
        self.sessions_ended += self.scheduler.take_ended_sessions()
        return batch

    def check(self, batch: Batch, running_before: list[Request]) -> None:
        pool, running = self.scheduler.pool, self.scheduler.running
        self.sessions_seen |= {r.session_id for r in running}
        owned = owned_pages(self.scheduler)
        assert len(owned) == len(set(owned)), "two requests share a page"
        assert len(owned) + pool.num_free == pool.num_pages
        assert self.scheduler.num_pages_unaccounted == 0
        assert len(running) <= self.num_running_max
        assert len(set(names(batch))) == len(batch.scheduled), "a request is there twice"
        extends = 0
        for s in batch.scheduled:
            r = s.request
            assert r.phase is Phase.RUNNING
            assert r.page_table is not None
            assert r.page_table.capacity >= s.stop
            assert s.start == r.cached_len
            assert 1 <= s.num_tokens <= r.remaining_len
            assert not s.draft or s.samples
            # The last token of a request is never stored, so no row lies at its position.
            assert s.stop <= len(r.prompt) + r.max_new_tokens - 1
            extends += s.num_tokens if r.remaining_len > 1 else 0
        assert extends <= self.extend_rows_max
        scheduled = {s.request.request_id for s in batch.scheduled}
        assert {r.request_id for r in running if r.remaining_len == 1} <= scheduled, "a decode had to wait"
        if running:
            assert running[0].request_id in scheduled, "the oldest had to wait"
        # Those preempted were the youngest: what stays of the old order is a prefix of it.
        stayed = [r for r in running_before if r in running and r.session_id <= _last(running_before)]
        assert stayed == running_before[: len(stayed)]
        assert not running_before or running[0] is running_before[0], "the oldest was preempted"


def _last(running: list[Request]) -> int:
    return running[-1].session_id if running else 0


@pytest.mark.parametrize("round_", range(30))
def test_random_traffic_keeps_pages_budgets_and_order_and_everyone_ends(round_: int) -> None:
    seed = SEED * 100 + round_
    print(f"seed {seed}")
    rng = random.Random(seed)
    page_size, num_running_max = rng.choice([1, 2, 4, 16]), rng.choice([1, 4, 8, 8])
    extend_rows_max = rng.choice([1, 2, 7, 32, 1000])
    # From "one request only just fits" to "all fit".
    num_pages = -(-60 // page_size) + rng.choice([0, 0, 2, 8, 60])
    scheduler = build_scheduler(
        num_pages, page_size, num_running_max=num_running_max, extend_rows_max=extend_rows_max
    )
    world = World(rng, scheduler, num_running_max, extend_rows_max, rng.choice([0, 3, 7]))
    requests = [build_request(f"r{i}", rng.randint(1, 20), rng.randint(1, 40)) for i in range(25)]
    arriving = list(requests)
    for _ in range(20_000):
        while arriving and rng.random() < 0.3:
            scheduler.add(arriving.pop())
        if not arriving and not scheduler.num_running and not scheduler.num_waiting:
            break
        batch = world.step()
        assert batch.scheduled or not scheduler.num_running, "a step did nothing"
        if rng.random() < 0.02 and scheduler.running:
            scheduler.rewind(rng.choice(scheduler.running))
        if rng.random() < 0.01 and (victim := scheduler.find(f"r{rng.randrange(25)}")) is not None:
            scheduler.remove(victim)
            victim.finish(FinishReason.ABORT)
    assert all(r.phase is Phase.FINISHED for r in requests), "somebody starved"
    assert scheduler.pool.num_free == num_pages
    world.sessions_ended += scheduler.take_ended_sessions()
    assert sorted(world.sessions_ended) == list(range(1, len(world.sessions_ended) + 1))
    assert world.sessions_seen <= set(world.sessions_ended)


def test_a_draft_never_takes_pages_that_somebody_would_be_preempted_for() -> None:
    """It did: a request alone in a full pool preempted itself for its draft and prefilled again at
    every step."""
    scheduler = build_scheduler(num_pages=4, page_size=4)
    old, young = build_request("old", 6, 8), build_request("young", 6, 8)
    scheduler.add(old)
    scheduler.add(young)
    commit(scheduler, scheduler.next_batch({}))
    batch = scheduler.next_batch({old.session_id: [7] * 3, young.session_id: [7] * 3})
    assert scheduler.num_preemptions == 0
    assert [(s.request.request_id, s.num_rows) for s in batch.scheduled] == [("old", 1), ("young", 1)]


def test_the_youngest_is_preempted_and_waits_in_front_of_newcomers() -> None:
    scheduler = build_scheduler(num_pages=6, page_size=2)
    first, second, third = (build_request(name, 3, 9) for name in ("first", "second", "third"))
    for request in (first, second, third):
        scheduler.add(request)
    assert names(scheduler.next_batch({})) == ["first", "second", "third"]
    for request in (first, second, third):
        request.cached_len, request.tokens = 4, [1] * 5
    scheduler.add(build_request("newcomer", 1, 1))
    batch = scheduler.next_batch({})
    assert names(batch)[:2] == ["first", "second"]
    assert third.phase is Phase.WAITING
    assert third.cached_len == 0
    assert third.page_table is None
    assert scheduler.num_preemptions == 1
    assert third.session_id in scheduler.take_ended_sessions()
    assert "newcomer" not in names(batch), "the newcomer overtook"


def test_preempted_requests_keep_their_order() -> None:
    scheduler = build_scheduler(num_pages=8, page_size=1)
    requests = [build_request(f"r{i}", 1, 7) for i in range(4)]
    for request in requests:
        scheduler.add(request)
    scheduler.next_batch({})
    for request in requests:
        request.cached_len, request.tokens = 1, [1, 1]
    scheduler.next_batch({})
    # Each holds 2 of 8 pages; the oldest alone now asks for 4 more.
    requests[0].tokens = [1] * 6
    scheduler.next_batch({})
    assert [r.request_id for r in scheduler.running] == ["r0", "r1"]
    assert [r.request_id for r in scheduler._waiting] == ["r2", "r3"]


def test_a_request_is_admitted_only_when_all_of_its_tokens_and_the_next_fit() -> None:
    scheduler = build_scheduler(num_pages=4, page_size=4, extend_rows_max=100)
    scheduler.add(build_request("a", 5, 3))
    scheduler.add(build_request("b", 8, 3))
    assert names(scheduler.next_batch({})) == ["a"]
    assert scheduler.num_waiting == 1


def test_a_request_that_could_never_fit_is_refused_when_it_is_added() -> None:
    with pytest.raises(AssertionError):
        build_scheduler(num_pages=4, page_size=4).add(build_request("a", 10, 7))


@pytest.mark.parametrize(("room", "expected"), [(1, 0), (2, 1), (4, 3), (8, 7), (20, 7)])
def test_a_draft_is_cut_to_what_may_still_be_committed(room: int, expected: int) -> None:
    scheduler = build_scheduler()
    request = build_request("a", 3, room + 1)
    scheduler.add(request)
    commit(scheduler, scheduler.next_batch({}))
    assert request.room == room
    batch = scheduler.next_batch({request.session_id: list(range(10, 17))})
    assert batch.scheduled[0].draft == list(range(10, 10 + expected))


def test_a_draft_waits_for_no_one_whose_tokens_are_cut_by_the_budget() -> None:
    scheduler = build_scheduler(extend_rows_max=4)
    request = build_request("a", 3)
    scheduler.add(request)
    commit(scheduler, scheduler.next_batch({}))
    request.tokens += [7] * 6
    scheduler.rewind(request)
    drafts = {request.session_id: [9] * 3}
    parts = []
    for _ in range(3):
        batch = scheduler.next_batch(drafts)
        parts.append([(s.start, s.num_tokens, len(s.draft)) for s in batch.scheduled])
        for s in batch.scheduled:
            request.cached_len += s.num_tokens
    assert parts == [[(0, 4, 0)], [(4, 4, 0)], [(8, 2, 3)]]


def test_decoding_goes_on_beside_a_prompt_that_takes_the_whole_budget() -> None:
    scheduler = build_scheduler(extend_rows_max=5)
    scheduler.add(build_request("decodes", 2, 50))
    commit(scheduler, scheduler.next_batch({}))
    scheduler.add(build_request("long", 40, 5))
    for _ in range(8):
        batch = scheduler.next_batch({})
        assert [(s.request.request_id, s.num_rows) for s in batch.scheduled] == [("decodes", 1), ("long", 5)]
        commit(scheduler, batch)


def test_a_rewound_request_keeps_its_pages_and_computes_them_again() -> None:
    scheduler = build_scheduler()
    request = build_request("a", 10)
    scheduler.add(request)
    commit(scheduler, scheduler.next_batch({}))
    assert request.page_table is not None
    pages = request.page_table.pages
    scheduler.rewind(request)
    batch = scheduler.next_batch({})
    assert (batch.scheduled[0].start, batch.scheduled[0].num_tokens) == (0, 11)
    assert request.page_table.pages[: len(pages)] == pages


def test_a_removed_request_is_found_no_more_and_its_pages_are_named() -> None:
    scheduler = build_scheduler(num_running_max=1)
    runs, waits = build_request("runs", 9), build_request("waits", 2)
    scheduler.add(runs)
    scheduler.add(waits)
    scheduler.next_batch({})
    assert scheduler.find("runs") is runs
    assert scheduler.find("waits") is waits
    assert scheduler.remove(waits) == []
    assert scheduler.remove(runs) == [1, 2, 3]
    assert scheduler.find("runs") is scheduler.find("waits") is scheduler.first() is None
    assert scheduler.take_ended_sessions() == [runs.session_id]
    assert scheduler.take_ended_sessions() == []


def test_a_page_that_no_request_holds_and_that_is_not_free_shows() -> None:
    scheduler = build_scheduler()
    scheduler.add(build_request("a", 5))
    scheduler.next_batch({})
    assert scheduler.num_pages_unaccounted == 0
    scheduler.pool.allocate(3)
    assert scheduler.num_pages_unaccounted == 3
