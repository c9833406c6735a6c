"""A service's life: the order of its end, and what ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from common import lifecycle
from common.lifecycle import Lifecycle, State, watch_event_loop

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def short_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "NOTICE_S", 0.01)


class Recorder:
    """A service that writes down what it is told; `work_s` of work is left when it drains."""

    def __init__(self, work_s: float = 0.0) -> None:
        self.calls: list[str] = []
        self._work_s = work_s

    async def set_serving(self, serving: bool) -> None:
        self.calls.append("serving" if serving else "not serving")

    async def drain(self) -> None:
        self.calls.append("drain")
        await asyncio.sleep(self._work_s)
        self.calls.append("drained")

    async def stop(self) -> None:
        self.calls.append("stop")


async def until_serving(life: Lifecycle) -> None:
    while life.state is not State.SERVING:
        await asyncio.sleep(0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_health_first_then_drains_then_stops(number: signal.Signals) -> None:
    service = Recorder(work_s=0.02)
    life = Lifecycle(service, grace_s=5)
    running = asyncio.create_task(life.run())
    await until_serving(life)
    os.kill(os.getpid(), number)
    assert await running == 0
    assert service.calls == ["serving", "not serving", "drain", "drained", "stop"]
    assert life.state is State.STOPPED


async def test_work_that_outlasts_the_grace_is_cut_and_the_stop_is_still_clean() -> None:
    service = Recorder(work_s=60)
    life = Lifecycle(service, grace_s=0.05)
    running = asyncio.create_task(life.run())
    await until_serving(life)
    life.ask_stop()
    assert await asyncio.wait_for(running, 5) == 0
    assert service.calls == ["serving", "not serving", "drain", "stop"]


async def test_a_second_signal_cuts_the_grace() -> None:
    service = Recorder(work_s=60)
    life = Lifecycle(service, grace_s=60)
    running = asyncio.create_task(life.run())
    await until_serving(life)
    life.ask_stop()
    while "drain" not in service.calls:
        await asyncio.sleep(0.005)
    life.ask_stop()
    assert await asyncio.wait_for(running, 5) == 0
    assert service.calls[-1] == "stop"


async def test_a_failure_reported_from_another_thread_ends_the_service_with_status_1() -> None:
    service = Recorder()
    life = Lifecycle(service, grace_s=60)
    running = asyncio.create_task(life.run())
    await until_serving(life)
    threading.Thread(target=life.fail, args=("core",)).start()
    assert await asyncio.wait_for(running, 5) == 1
    assert service.calls == ["serving", "not serving", "stop"]


@pytest.mark.parametrize("raises", [True, False])
async def test_a_background_task_that_ends_takes_the_service_with_it(raises: bool) -> None:
    async def work() -> None:
        await asyncio.sleep(0.01)
        if raises:
            raise RuntimeError("lost")

    service = Recorder()
    life = Lifecycle(service, grace_s=60)
    life.supervise("work", work())
    assert await asyncio.wait_for(life.run(), 5) == 1
    assert service.calls == ["serving", "not serving", "stop"]


async def test_background_tasks_end_with_the_service() -> None:
    life = Lifecycle(Recorder(), grace_s=1)
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    life.supervise("work", work())
    running = asyncio.create_task(life.run())
    await until_serving(life)
    life.ask_stop()
    assert await asyncio.wait_for(running, 5) == 0
    assert ended.is_set()


async def test_a_failing_drain_is_a_failure_and_the_service_still_stops() -> None:
    class Broken(Recorder):
        async def drain(self) -> None:
            raise RuntimeError("pages lost")

    service = Broken()
    life = Lifecycle(service, grace_s=1)
    running = asyncio.create_task(life.run())
    await until_serving(life)
    life.ask_stop()
    assert await asyncio.wait_for(running, 5) == 1
    assert service.calls[-1] == "stop"


async def test_a_stop_that_hangs_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "STOP_DEADLINE_S", 0.05)

    class Hanging(Recorder):
        async def stop(self) -> None:
            await asyncio.sleep(60)

    life = Lifecycle(Hanging(), grace_s=1)
    life.fail("core")
    assert await asyncio.wait_for(life.run(), 5) == 1


async def test_a_blocked_event_loop_shows_as_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    monkeypatch.setattr(lifecycle, "LAG_INTERVAL_S", 0.01)
    lags: list[float] = []
    task = asyncio.create_task(watch_event_loop(lags.append))
    await asyncio.sleep(0.03)
    time.sleep(0.2)
    await asyncio.sleep(0.03)
    task.cancel()
    assert lags[-1] > 0.15
    assert lags[0] < lags[-1]


async def test_background_work_that_trips_over_the_stop_is_no_failure() -> None:
    """Found by a drafter that drained for longer than its housekeeping's interval and exited 1."""
    closed = asyncio.Event()

    class Closing(Recorder):
        async def stop(self) -> None:
            closed.set()
            await asyncio.sleep(0.02)

    async def work() -> None:
        await closed.wait()
        raise RuntimeError("what I work on is closed")

    life = Lifecycle(Closing(), grace_s=5)
    life.supervise("work", work())
    running = asyncio.create_task(life.run())
    await until_serving(life)
    life.ask_stop()
    assert await running == 0


def test_a_process_that_leaves_does_not_wait_for_a_thread_that_hangs() -> None:
    program = (
        "import concurrent.futures, time; from common.lifecycle import leave; "
        "concurrent.futures.ThreadPoolExecutor(1).submit(time.sleep, 60); print('told'); leave(3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (3, "told\n")
