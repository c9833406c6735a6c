"""The core's thread: admission from many threads, bounds, aborts and draining."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator

import pytest

from common import limits
from common.errors import InvalidRequest, Overloaded, Unavailable
from services.target.core import core as core_module
from services.target.core.request import FinishReason, RequestFinished
from tests.core_thread_rig import WAIT_S, Bench, Caller, wait_until


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    bench.core.start()
    yield bench
    bench.gate.open.set()
    bench.core.stop()
    assert bench.scheduler.pool.num_free == bench.scheduler.pool.num_pages
    assert bench.source.closed == 1


def test_a_request_runs_to_its_end_and_is_then_unknown(bench: Bench) -> None:
    caller = bench.submit("a")
    assert isinstance(caller.wait(), RequestFinished)
    assert caller.tokens == [5, 6, 7, 8, 9]
    assert bench.core.idle
    # The name is free again.
    assert isinstance(bench.submit("a").wait(), RequestFinished)


def test_requests_and_aborts_from_many_threads_end_exactly_once(bench: Bench) -> None:
    callers: list[Caller] = []
    refused = 0
    lock = threading.Lock()

    def bombard(thread: int) -> None:
        nonlocal refused
        rng = random.Random(thread)
        for i in range(30):
            name = f"{thread}-{i}"
            try:
                caller = bench.submit(name, rng.randint(1, 40))
            except Overloaded:
                with lock:
                    refused += 1
                continue
            with lock:
                callers.append(caller)
            for _ in range(rng.randint(0, 2)):
                asyncio.run(bench.core.abort_named(f"{thread}-{rng.randint(0, i)}"))
            time.sleep(rng.random() * 0.002)

    threads = [threading.Thread(target=bombard, args=(t,)) for t in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for caller in callers:
        caller.wait()
    time.sleep(0.05)
    assert len(callers) + refused == 240
    assert all(len(caller.terminals) == 1 for caller in callers)
    reasons = {c.terminals[0].reason for c in callers if isinstance(c.terminals[0], RequestFinished)}
    assert reasons == {FinishReason.ABORT, FinishReason.LENGTH}
    for caller in callers:
        assert caller.tokens == [5 + i for i in range(len(caller.tokens))]
    assert bench.core.idle
    assert bench.num_failures == 0


def test_one_more_than_the_core_may_know_is_overloaded_and_leaves_no_trace() -> None:
    bench = Bench(num_known_max=3)
    bench.gate.open.clear()
    bench.core.start()
    callers = [bench.submit(f"r{i}") for i in range(3)]
    with pytest.raises(Overloaded, match="limit is 3, have 3"):
        bench.submit("r3")
    assert not asyncio.run(bench.core.abort_named("r3"))
    bench.gate.open.set()
    for caller in callers:
        caller.wait()
    assert isinstance(bench.submit("r3").wait(), RequestFinished)
    bench.core.stop()


def test_a_full_inbox_refuses_requests_and_keeps_nothing_but_takes_aborts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CORE_INBOX_MAX", 2)
    bench = Bench()
    callers = [bench.submit("a", 1000), bench.submit("b")]
    with pytest.raises(Overloaded, match="core inbox: limit is 2, have 2"):
        bench.submit("c")
    assert not asyncio.run(bench.core.abort_named("c"))
    bench.core.abort(callers[0].request)
    bench.core.start()
    ending = callers[0].wait()
    assert isinstance(ending, RequestFinished)
    assert ending.reason is FinishReason.ABORT
    assert isinstance(callers[1].wait(), RequestFinished)
    bench.core.stop()


def test_an_id_may_run_once_at_a_time(bench: Bench) -> None:
    bench.gate.open.clear()
    caller = bench.submit("a")
    with pytest.raises(InvalidRequest, match="request_id: must be unique among running requests, got a"):
        bench.submit("a")
    bench.gate.open.set()
    assert caller.wait() and caller.tokens == [5, 6, 7, 8, 9]
    assert isinstance(bench.submit("a").wait(), RequestFinished), "the name is free again"


def test_the_abort_of_an_ended_or_unknown_request_does_nothing(bench: Bench) -> None:
    first = bench.submit("a")
    first.wait()
    bench.gate.open.clear()
    second = bench.submit("a")
    bench.core.abort(first.request)
    assert not asyncio.run(bench.core.abort_named("nobody"))
    bench.gate.open.set()
    ending = second.wait()
    assert isinstance(ending, RequestFinished)
    assert ending.reason is FinishReason.LENGTH, "the abort was of another request of that name"


def test_an_abort_that_comes_too_late_does_not_end_a_namesake(bench: Bench) -> None:
    bench.gate.open.clear()
    first = bench.submit("a", 1)
    wait_until(lambda: bench.scheduler.num_running == 1)
    bench.core.abort(first.request)
    # The step that ends the first goes on; the abort is looked at only when the second is known.
    second_is_known = threading.Event()
    bench.core._announce = lambda: assert_set(second_is_known)
    bench.gate.open.set()
    first.wait()
    second = bench.submit("a")
    second_is_known.set()
    ending = second.wait()
    assert isinstance(ending, RequestFinished)
    assert ending.reason is FinishReason.LENGTH


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def test_after_each_step_it_is_announced_that_its_events_are_out(bench: Bench) -> None:
    heard: list[int] = []
    caller = Caller("a")
    bench.core._announce = lambda: heard.append(len(caller.tokens))
    bench.core.submit(caller.request)
    caller.wait()
    wait_until(lambda: 5 in heard)
    assert [n for n in heard if n] == sorted(n for n in heard if n)
    assert set(range(1, 6)) <= set(heard), "one step, one token, one announcement"


def test_an_abort_ends_a_running_and_a_waiting_request(bench: Bench) -> None:
    callers = [bench.submit(f"r{i}", 1000) for i in range(9)]
    assert callers[0].begun.wait(WAIT_S)
    for i in (0, 8):
        bench.core.abort(callers[i].request)
    for i in (0, 8):
        ending = callers[i].wait()
        assert isinstance(ending, RequestFinished)
        assert ending.reason is FinishReason.ABORT
    for i in range(1, 8):
        bench.core.abort(callers[i].request)
        callers[i].wait()


def test_a_draining_core_refuses_the_new_and_finishes_the_known(bench: Bench) -> None:
    bench.gate.open.clear()
    callers = [bench.submit(f"r{i}") for i in range(3)]
    bench.core.drain()
    with pytest.raises(Unavailable, match="draining"):
        bench.submit("late")
    bench.gate.open.set()
    assert all(isinstance(caller.wait(), RequestFinished) for caller in callers)
    wait_until(lambda: bench.core.idle)
    assert bench.num_failures == 0


def test_stats_follow_the_requests(bench: Bench) -> None:
    assert bench.core.stats().num_running == 0
    callers = [bench.submit(f"r{i}", 1500) for i in range(10)]
    wait_until(lambda: bench.core.stats().num_running == 8 and bench.core.stats().num_waiting == 2)
    assert bench.core.stats().num_pages_free < 400
    for caller in callers:
        bench.core.abort(caller.request)
        caller.wait()
    assert bench.core.stats().num_pages_free == 400
    assert bench.core.stats().pages_unaccounted == 0


def test_whoever_hears_of_an_ending_sees_it_in_the_stats(bench: Bench) -> None:
    seen = []
    caller = Caller("a")
    receive = caller.request.emit
    caller.request.emit = lambda event: (seen.append(bench.core.stats().num_running), receive(event))[1]
    bench.core.submit(caller.request)
    assert isinstance(caller.wait(), RequestFinished)
    assert seen[0] == 1
    assert seen[-1] == 0


def test_an_idle_core_sleeps(bench: Bench) -> None:
    steps = 0
    step = bench.loop.step

    def counted() -> None:
        nonlocal steps
        steps += 1
        step()

    bench.loop.step = counted  # type: ignore[method-assign]
    time.sleep(6 * core_module._IDLE_WAIT_S)
    assert steps <= 8
