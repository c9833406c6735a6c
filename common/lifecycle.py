"""One life of a service: serving, then draining, then over; and what ends it.

Knows signals and tasks; nothing of gRPC or of what is served. A background task that dies takes the
service with it: a part that silently stopped is worse than a restart.
"""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, Protocol

from common.log import get_log

log = get_log("lifecycle")

# Between NOT_SERVING and the first refusal: watchers of health learn first, and stop sending.
NOTICE_S = 0.2
# A stop that takes longer hangs; the process ends all the same.
STOP_DEADLINE_S = 10.0

LAG_INTERVAL_S = 0.25
LAG_WINDOW_S = 15.0


class Service(Protocol):
    """What a life is made of. Each is called once at most, in this order (False without drain, too)."""

    async def set_serving(self, serving: bool) -> None:
        """Tell health."""

    async def drain(self) -> None:
        """Refuse new work; return when none is left."""

    async def stop(self) -> None:
        """End what is left with an error, and release everything."""


class State(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


TRANSITIONS = {
    State.STARTING: {State.SERVING, State.STOPPED},
    State.SERVING: {State.DRAINING, State.STOPPED},
    State.DRAINING: {State.STOPPED},
    State.STOPPED: set(),
}


class Lifecycle:
    """Runs a service from ready to over. Made and run on the event loop; `fail` is thread-safe."""

    def __init__(self, service: Service, grace_s: float) -> None:
        self.state = State.STARTING
        self._service = service
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._stop_asked = asyncio.Event()
        self._hurry_asked = asyncio.Event()
        self._failed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def supervise(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` beside the service. It should never end; if it does, the service fails."""
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def fail(self, reason: str) -> None:
        """A part is broken: NOT_SERVING, stop, exit status 1. From any thread."""
        log.error("service_failed", reason=reason)
        self._loop.call_soon_threadsafe(self._failed.set)

    def ask_stop(self) -> None:
        """What SIGTERM does: drain, then stop. A second time: stop now."""
        if self._stop_asked.is_set():
            self._hurry_asked.set()
        self._stop_asked.set()

    async def run(self) -> int:
        """Serve until a signal or a failure; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.ask_stop)
        try:
            if not self._failed.is_set():
                await self._service.set_serving(True)
                self._move_to(State.SERVING)
                await self._first_of(self._stop_asked.wait(), self._failed.wait())
            await self._service.set_serving(False)
            if not self._failed.is_set():
                self._move_to(State.DRAINING)
                await self._first_of(self._drain(), self._failed.wait(), self._hurry_asked.wait())
            await self._stop()
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.remove_signal_handler(number)
        return 1 if self._failed.is_set() else 0

    async def _drain(self) -> None:
        await asyncio.sleep(NOTICE_S)
        try:
            await asyncio.wait_for(self._service.drain(), self._grace_s)
        except TimeoutError:
            log.warning("grace_over", grace_s=self._grace_s)

    async def _stop(self) -> None:
        # First of all: what the tasks work on ends next, and one that trips over it is no failure.
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await asyncio.wait_for(self._service.stop(), STOP_DEADLINE_S)
        except TimeoutError:
            log.error("stop_hangs", deadline_s=STOP_DEADLINE_S)
            self._failed.set()
        self._move_to(State.STOPPED)

    async def _first_of(self, *works: Coroutine[Any, Any, Any]) -> None:
        tasks = [self._loop.create_task(work) for work in works]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for task in done:
            if task.exception() is not None:
                log.error("service_failed", reason="drain", exc_info=task.exception())
                self._failed.set()

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self.state is State.STOPPED or task.cancelled():
            return
        log.error("background_task_died", task=task.get_name(), exc_info=task.exception())
        self._failed.set()

    def _move_to(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
        self.state = state
        log.info("service_state", state=state.value)


def leave(status: int) -> NoReturn:
    """End the process at once. Python would first wait for every thread, also for one that hangs in a
    device call and that nobody can stop; what had to end has ended by now."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def watch_event_loop(observe_lag: Callable[[float], None]) -> None:
    """Tell `observe_lag` the longest delay of the last LAG_WINDOW_S, again and again. Never returns."""
    lags: deque[float] = deque(maxlen=int(LAG_WINDOW_S / LAG_INTERVAL_S))
    while True:
        before = time.monotonic()
        await asyncio.sleep(LAG_INTERVAL_S)
        lags.append(max(0.0, time.monotonic() - before - LAG_INTERVAL_S))
        observe_lag(max(lags))
