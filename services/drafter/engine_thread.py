"""The one thread on which the session table and the engine live; jobs run in the order they come.

Knows threads and the event loop; nothing of what the jobs do. An exception that no peer can cause ends
the service: after it, nobody knows what the table and the cache hold.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from common.errors import TandemError, Unavailable
from common.log import get_log

log = get_log("engine_thread")

P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    """Runs jobs one after another. `on_failure` is called, on that thread, when one raises our bug."""

    def __init__(
        self,
        on_failure: Callable[[str], None],
        prepare: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """prepare is called once, on that thread, before the first job."""
        self._on_failure = on_failure
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine", initializer=prepare)
        self._busy_since_s: float | None = None
        self._failed = False

    async def run(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The job's result. TandemErrors pass through; any other becomes Unavailable, now and for good."""

        def guarded() -> T:
            if self._failed:
                raise Unavailable("the drafter's engine failed")
            self._busy_since_s = self._clock()
            try:
                return job(*args, **kwargs)
            except TandemError:
                raise
            except Exception as error:
                self._failed = True
                log.exception("engine_failed")
                self._on_failure("engine")
                raise Unavailable("the drafter's engine failed") from error
            finally:
                self._busy_since_s = None

        return await asyncio.get_running_loop().run_in_executor(self._thread, guarded)

    @property
    def heartbeat_age_s(self) -> float:
        """How long the present job has been running; 0 between jobs."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else self._clock() - since_s

    def close(self) -> None:
        """No more jobs; does not wait for one that hangs (see common.lifecycle.leave)."""
        self._thread.shutdown(wait=False, cancel_futures=True)
