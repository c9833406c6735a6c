"""The core's thread: admission from many threads, bounds, draining, stopping, and its own death."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common import limits
from common.errors import Overloaded, Unavailable
from common.paged_kv import PagePool
from services.target.core import core as core_module
from services.target.core.core import Core
from services.target.core.draft_source import NoDrafts
from services.target.core.engine import Engine
from services.target.core.request import (
    Event,
    FinishReason,
    Request,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    TokensCommitted,
)
from services.target.core.scheduler import Scheduler
from services.target.core.step import StepLoop
from tests.core_rig import CountingModel, RecordedObserver

WAIT_S = 20.0


class Caller:
    """Keeps what a request emits; may be waited for."""

    def __init__(self, name: str, max_new_tokens: int = 5) -> None:
        self.tokens: list[int] = []
        self.terminals: list[Event] = []
        self.ended = threading.Event()
        self.begun = threading.Event()
        self.request = Request(
            name, [3, 4], SamplingParams(), max_new_tokens, frozenset(), True, self.receive
        )

    def receive(self, event: Event) -> None:
        self.begun.set()
        if isinstance(event, TokensCommitted):
            assert not self.terminals, "a token after the end"
            self.tokens += event.token_ids
        else:
            self.terminals.append(event)
            self.ended.set()

    def wait(self) -> Event:
        assert self.ended.wait(WAIT_S), f"{self.request.request_id} never ended"
        return self.terminals[0]


class Gate:
    """An engine that computes only while it is open, and raises when told to."""

    def __init__(self, engine: Engine) -> None:
        self.open = threading.Event()
        self.open.set()
        self.fault: Exception | None = None
        self._engine = engine

    def run(self, *args: Any) -> Any:
        assert self.open.wait(WAIT_S)
        if self.fault is not None:
            raise self.fault
        return self._engine.run(*args)

    def zero_pages(self, pages: list[int]) -> None:
        self._engine.zero_pages(pages)


class Source(NoDrafts):
    """A source that remembers that it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


class Bench:
    """A core over a made-up model."""

    def __init__(self, num_known_max: int = 64) -> None:
        pool = PagePool(400, 4)
        self.scheduler = Scheduler(pool, num_running_max=8, extend_rows_max=64)
        self.gate = Gate(Engine(CountingModel(), pool))
        self.observer, self.source = RecordedObserver(), Source()
        self.loop = StepLoop(self.scheduler, self.gate, self.source, self.observer)  # type: ignore[arg-type]
        self.num_failures = 0
        self.failed = threading.Event()
        self.core = Core(
            self.scheduler, self.loop, self.source,
            num_known_max=num_known_max, on_failure=self._on_failure,
        )  # fmt: skip

    def _on_failure(self) -> None:
        self.num_failures += 1
        self.failed.set()

    def submit(self, name: str, max_new_tokens: int = 5) -> Caller:
        caller = Caller(name, max_new_tokens)
        self.core.submit(caller.request)
        return caller


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    bench.core.start()
    yield bench
    bench.gate.open.set()
    bench.core.stop()
    assert bench.scheduler.pool.num_free == bench.scheduler.pool.num_pages
    assert bench.source.closed == 1


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_request_runs_to_its_end_and_is_then_unknown(bench: Bench) -> None:
    caller = bench.submit("a")
    assert isinstance(caller.wait(), RequestFinished)
    assert caller.tokens == [5, 6, 7, 8, 9]
    assert not bench.core.is_known("a")
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
                bench.core.abort(f"{thread}-{rng.randint(0, i)}")
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
    assert not bench.core.is_known("r3")
    bench.gate.open.set()
    for caller in callers:
        caller.wait()
    assert isinstance(bench.submit("r3").wait(), RequestFinished)
    bench.core.stop()


def test_a_full_inbox_refuses_requests_and_aborts_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CORE_INBOX_MAX", 2)
    bench = Bench()
    first = bench.submit("a")
    bench.core.abort("a")
    with pytest.raises(Overloaded, match="core inbox: limit is 2, have 2"):
        bench.submit("b")
    assert not bench.core.is_known("b")
    with pytest.raises(Overloaded, match="core inbox"):
        bench.core.abort("a")
    bench.core.start()
    assert isinstance(first.wait(), RequestFinished)
    bench.core.stop()


def test_the_abort_of_an_unknown_request_does_nothing(bench: Bench) -> None:
    bench.core.abort("nobody")
    assert isinstance(bench.submit("a").wait(), RequestFinished)


def test_an_abort_ends_a_running_and_a_waiting_request(bench: Bench) -> None:
    callers = [bench.submit(f"r{i}", 1000) for i in range(9)]
    assert callers[0].begun.wait(WAIT_S)
    for name in ("r0", "r8"):
        bench.core.abort(name)
    for i in (0, 8):
        ending = callers[i].wait()
        assert isinstance(ending, RequestFinished)
        assert ending.reason is FinishReason.ABORT
    for i in range(1, 8):
        bench.core.abort(f"r{i}")
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


def test_stopping_fails_what_is_left_exactly_once() -> None:
    bench = Bench()
    bench.gate.open.clear()
    bench.core.start()
    callers = [bench.submit(f"r{i}", 1000) for i in range(12)]
    stopping = threading.Thread(target=bench.core.stop)
    stopping.start()
    bench.gate.open.set()
    stopping.join(WAIT_S)
    assert not stopping.is_alive()
    for caller in callers:
        assert isinstance(caller.wait(), RequestFailed)
        assert len(caller.terminals) == 1
    assert bench.core.idle
    assert bench.num_failures == 0
    assert bench.scheduler.pool.num_free == bench.scheduler.pool.num_pages
    bench.core.stop()


def test_stopping_fails_a_request_that_still_waits_in_the_inbox() -> None:
    bench = Bench()
    caller = bench.submit("a")
    bench.core._stopping.set()
    bench.core.drain()
    bench.core.start()
    assert isinstance(caller.wait(), RequestFailed)
    assert bench.observer.failed == [("a", "unavailable")]


@pytest.mark.parametrize("fault", [ValueError("a bug"), MemoryError("no memory"), AssertionError("untrue")])
def test_an_exception_in_a_step_fails_each_request_once_and_is_told_once(fault: Exception) -> None:
    bench = Bench()
    bench.core.start()
    bench.gate.open.clear()
    callers = [bench.submit(f"r{i}", 1000) for i in range(12)]
    bench.gate.fault = fault
    bench.gate.open.set()
    assert bench.failed.wait(WAIT_S)
    for caller in callers:
        ending = caller.wait()
        assert isinstance(ending, RequestFailed)
        assert isinstance(ending.error, Unavailable)
        assert len(caller.terminals) == 1
    assert bench.num_failures == 1
    assert bench.source.closed == 1
    with pytest.raises(Unavailable, match="failed"):
        bench.submit("late")
    assert sorted(bench.observer.failed) == sorted((f"r{i}", "internal") for i in range(12))
    bench.core.stop()


@pytest.mark.parametrize("place", ["post", "observe_first_token", "add"])
def test_a_request_that_was_in_nobodys_hands_when_a_step_raised_gets_its_ending(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not: one that had just ended, or just left the inbox, waited for ever, and so did drain."""
    bench = Bench()

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    holder: Any = {"post": bench.source, "observe_first_token": bench.observer, "add": bench.scheduler}[place]
    if place == "post":
        # After the commit of a step in which the request ended.
        monkeypatch.setattr(holder, place, lambda handoff: broken() if handoff.ended else None)
    else:
        monkeypatch.setattr(holder, place, broken)
    callers = [bench.submit("short", 1), bench.submit("long", 100)]
    bench.core.start()
    assert bench.failed.wait(WAIT_S)
    for caller in callers:
        assert isinstance(caller.wait(), RequestFailed)
        assert len(caller.terminals) == 1
    assert bench.core.idle
    bench.core.stop()


def test_stats_follow_the_requests(bench: Bench) -> None:
    assert bench.core.stats().num_running == 0
    callers = [bench.submit(f"r{i}", 1500) for i in range(10)]
    wait_until(lambda: bench.core.stats().num_running == 8 and bench.core.stats().num_waiting == 2)
    assert bench.core.stats().num_pages_free < 400
    for i, caller in enumerate(callers):
        bench.core.abort(f"r{i}")
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
