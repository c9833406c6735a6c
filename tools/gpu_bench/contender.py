"""A mode that can be measured: a step loop of its own, and what is known of its drafting.

Knows loops and logs; must not know how they were put together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from services.target.core.report import CoreStats
from services.target.core.request import Request
from tools.gpu_bench.core_load import Ask, CoreLoad, LoadTimes, StepRunner
from tools.gpu_bench.plan import Mode
from tools.gpu_bench.step_log import LoggedStep, StepLog


@dataclass
class Contender:
    """One mode's loop over one engine. Used by one thread.

    on_stream: entered around steps, so that what a drafter enqueues goes where the engine works.
    take_drafting_ms: phases of the drafter in milliseconds, over what it did since the last call. leftovers:
    what the drafter still holds although no request is left, one line each. drafter_pid: its process, where
    it has one. syncs: places where the host waited unseen, in all runs so far.
    """

    mode: Mode
    loop: StepRunner
    load: CoreLoad
    log: StepLog
    on_stream: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    take_drafting_ms: Callable[[], dict[str, float]] = field(default=dict)
    leftovers: Callable[[], list[str]] = field(default=list)
    drafter_pid: int | None = None
    syncs: list[str] = field(default_factory=list)
    close: Callable[[], None] = field(default=lambda: None)

    def run(
        self,
        asks: Iterable[Ask],
        concurrency: int,
        before_step: Callable[[dict[str, Request]], None] = lambda running: None,
    ) -> tuple[LoadTimes, list[LoggedStep]]:
        """Put the asks through; the answers and what each step reported."""
        self.log.take()
        with self.on_stream():
            times = self.load.run(asks, concurrency, before_step)
        return times, self.log.take()

    def stats(self) -> CoreStats:
        """The core's snapshot."""
        return self.loop.stats()

    def all_leftovers(self) -> list[str]:
        """What target and drafter still hold although no request is left."""
        stats = self.stats()
        complaints = self.leftovers()
        if stats.num_pages_free != stats.num_pages:
            complaints.append(f"target: {stats.num_pages - stats.num_pages_free} pages are not free")
        return complaints


@contextlib.contextmanager
def closing(contenders: Sequence[Contender]) -> Iterator[Sequence[Contender]]:
    """Closes all of them at the end, whatever happens."""
    with contextlib.ExitStack() as ending:
        for contender in contenders:
            ending.callback(contender.close)
        yield contenders
