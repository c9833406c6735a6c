"""Prints the host's time for a step of the pipelined loop, with a device that does nothing.

    python -m tests.time_pipelined_loop

All of a step but waiting for the device, which here is never waited for: scheduling, launching, posting,
committing, telling. Each request has tokens to come for the whole measurement. It is the thread's CPU time,
which a busy machine lengthens less than the clock's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from common.metrics import Metrics
from common.paged_kv import PagePool
from services.target.core.device_launch import Launch, Results, Ticket
from services.target.core.draft_source import PlainReason
from services.target.core.lanes_scheduler import LanesScheduler
from services.target.core.pipelined_source import NoPipelinedDrafter, PostedStep
from services.target.core.pipelined_step import PipelinedStepLoop
from services.target.core.report import Observer
from services.target.core.request import Request, SamplingParams
from services.target.metrics import TargetMetrics
from tests.core_rig import RecordedObserver
from tests.fakes_device import build_contract

BLOCK_SIZE = 16
NUM_ACCEPTED = 5
NUM_STEPS = 400
NUM_WARM_STEPS = 50


class IdleEngine:
    """Answers at once: each verify accepts NUM_ACCEPTED drafts."""

    def __init__(self) -> None:
        self._number = 0

    def prepare_drafting(self, draft: object, ring: object, *, by_messages: bool) -> None: ...

    def join(self, lane: int, sampling: SamplingParams) -> None: ...

    def launch(self, launch: Launch, *in_turn: Callable[[], object]) -> Ticket:
        for enqueue in in_turn:
            enqueue()
        self._number += 1
        num_rows = 1 if launch.draft_rows is None else BLOCK_SIZE
        return Ticket(self._number, len(launch.extends), len(launch.lanes), num_rows, 0)

    def results_to_host(self, ticket: Ticket) -> Results:
        num_lanes, num_extends = ticket.num_lanes, ticket.num_extends
        accepted = NUM_ACCEPTED if ticket.rows_each > 1 else 0
        return Results(
            tokens=np.full((num_lanes, ticket.rows_each), 7, np.int32),
            num_accepted=np.full(num_lanes, accepted, np.int32), finite=np.ones(num_lanes, bool),
            num_clamped=np.zeros(num_lanes, np.int32), extend_tokens=np.zeros(num_extends, np.int32),
            extend_finite=np.ones(num_extends, bool), extend_s=0.0, verify_s=0.0, gpu_s=0.0,
        )  # fmt: skip


class ReadyDrafter(NoPipelinedDrafter):
    """Has a draft for everybody it was told of, at once."""

    draft = build_contract(BLOCK_SIZE)
    ring = SimpleNamespace(shape=SimpleNamespace(captured_width=20480, dtype=SimpleNamespace(itemsize=2)))  # type: ignore[assignment]

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}

    def draft_rows(self, session_ids: list[int]) -> list[int]:
        return [self._rows.get(session_id, -1) for session_id in session_ids]

    def why_plain(self, session_id: int) -> PlainReason:
        return PlainReason.RESYNC

    def await_drafts(self) -> None: ...

    def mark_ready(self) -> None: ...

    def post(self, step: PostedStep) -> None:
        self._rows = {row.session_id: i for i, row in enumerate(step.rows) if row is not None}


def time_steps(num_requests: int, drafter: NoPipelinedDrafter, observer: Observer) -> tuple[float, float]:
    """Median and 95th percentile of a step, in µs."""
    num_tokens = (NUM_STEPS + NUM_WARM_STEPS) * (NUM_ACCEPTED + 1) + 200
    pool = PagePool(num_requests * (num_tokens // 16 + 40), 16)
    scheduler = LanesScheduler(pool, num_running_max=num_requests, extend_rows_max=1 << 15, extends_max=256)
    loop = PipelinedStepLoop(scheduler, IdleEngine(), drafter, observer)  # type: ignore[arg-type]
    for i in range(num_requests):
        scheduler.add(
            Request(f"r{i}", [1] * 100, SamplingParams(), num_tokens, frozenset({2, 3}), True, lambda _: None)
        )
    times = []
    for _ in range(NUM_STEPS + NUM_WARM_STEPS):
        began = time.thread_time()
        loop.step()
        times.append((time.thread_time() - began) * 1e6)
    measured = sorted(times[NUM_WARM_STEPS:])
    assert scheduler.num_running == num_requests
    return statistics.median(measured), measured[len(measured) * 95 // 100]


def main() -> None:
    print("µs of CPU time a step: median (95th percentile)")
    print(f"{'requests':>8}  {'plain':>16}  {'drafted':>16}  {'drafted, metrics':>16}")
    for num_requests in (1, 8, 32, 128, 256):
        figures = (
            time_steps(num_requests, NoPipelinedDrafter(), RecordedObserver()),
            time_steps(num_requests, ReadyDrafter(), RecordedObserver()),
            time_steps(num_requests, ReadyDrafter(), TargetMetrics(Metrics("timing", "model"))),
        )
        print(f"{num_requests:>8}  " + "  ".join(f"{f'{m:.0f} ({p:.0f})':>16}" for m, p in figures))


if __name__ == "__main__":
    main()
