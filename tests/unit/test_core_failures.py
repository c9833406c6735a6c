"""The core's thread when it is stopped or breaks: every request gets its one ending (I2)."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from common import limits
from common.errors import Unavailable
from services.target.core.request import RequestFailed
from tests.core_thread_rig import WAIT_S, Bench, wait_until


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


def test_stopping_does_not_wait_for_a_step_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CORE_STOP_DEADLINE_S", 0.1)
    bench = Bench()
    bench.gate.open.clear()
    caller = bench.submit("a")
    bench.core.start()
    wait_until(lambda: bench.scheduler.num_running == 1)
    with pytest.raises(TimeoutError):
        bench.core.stop()
    bench.gate.open.set()
    assert isinstance(caller.wait(), RequestFailed)


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
