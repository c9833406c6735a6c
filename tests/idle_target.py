"""A target whose step loop has neither model nor device: real core, real fronts, made-up tokens.

    python -m tests.idle_target ADDRESS FRONTS     # serves until it is killed; starts within a second or two
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import Any

from common.address import Address, parse_listen_address
from common.log import configure_log
from common.metrics import CommonMetrics, Metrics
from common.rpc import HEALTH_METHODS, method_names
from services.target.core.core import Core
from services.target.core.report import CoreStats
from services.target.core.request import (
    FinishReason,
    Request,
    RequestFailed,
    RequestFinished,
    TokensCommitted,
)
from services.target.edge import Edge, InProcessFront
from services.target.facts import DrafterFacts, ServedModel
from services.target.front.servicer import SERVICE, TargetServicer
from services.target.fronts import FrontPlan, Fronts
from services.target.metrics import PREFIX, TargetMetrics

MODEL = ServedModel("none", "None", vocab_size=150_000, max_len=1 << 20, eos_token_ids=(2,), dtype="bfloat16")
# What each step commits to each request: a draft block of which 3 were accepted.
TOKEN_IDS = [100_001, 90_002, 80_003, 70_004]
FROM_DRAFT = [True, True, True, False]


class IdleDevice:
    """A step loop and its roster, whose device takes `step_s` to do nothing. Requests run until aborted."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: dict[str, Request] = {}
        self._due: float | None = None
        self._woke = self._woke_cpu = 0.0
        self.measuring = threading.Event()
        # The core's thread from the end of one step's wait to the beginning of the next; of its CPU; and how
        # late it went on after the wait.
        self.host_s: list[float] = []
        self.host_cpu_s: list[float] = []
        self.late_s: list[float] = []

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def stats(self) -> CoreStats:
        return CoreStats(len(self._running), 0, 100_000, 100_000 - len(self._running), 0)

    def add(self, request: Request) -> None:
        self._running[request.request_id] = request

    def abort(self, request_id: str) -> None:
        ended = RequestFinished(FinishReason.ABORT, None, 1, 4, 1, 1, 3, 3, 0, 0.0, 0.0, 0.0)
        self._running.pop(request_id).emit(ended)

    def fail_all(self, error: Any, reason: str) -> None:
        while self._running:
            self._running.popitem()[1].emit(RequestFailed(error))

    def fail(self, request: Request, error: Any, reason: str) -> None:
        request.emit(RequestFailed(error))

    def close(self) -> None:
        """It is its own drafter, too."""

    def step(self) -> None:
        if not self._running:
            self._due = None
            return
        now = time.perf_counter()
        if self._due is not None and self.measuring.is_set():
            self.host_s.append(now - self._woke)
            self.host_cpu_s.append(time.thread_time() - self._woke_cpu)
        self._due = now + self._step_s
        time.sleep(self._step_s)
        self._woke, self._woke_cpu = time.perf_counter(), time.thread_time()
        if self.measuring.is_set():
            self.late_s.append(self._woke - self._due)
        for request in self._running.values():
            request.emit(TokensCommitted(list(TOKEN_IDS), list(FROM_DRAFT)))


class IdleTarget:
    """A core over an IdleDevice, and an edge."""

    def __init__(self, listen: Address, num_fronts: int, step_s: float) -> None:
        self.device = IdleDevice(step_s)
        metrics = Metrics(PREFIX, "none")
        calls = CommonMetrics(metrics, [*method_names(SERVICE), *HEALTH_METHODS])
        self.edge = _open_edge(listen, num_fronts, TargetMetrics(metrics), calls)
        self.core = Core(
            self.device, self.device, self.device,  # type: ignore[arg-type]
            num_known_max=1024, prepare=lambda: None, on_failure=lambda: None, announce=self.edge.announce,
        )  # fmt: skip
        self._tasks: list[asyncio.Future[None]] = []

    async def start(self) -> Address:
        """Serve; the address."""
        address = await self.edge.start(
            self.core, lambda name, work: self._tasks.append(asyncio.ensure_future(work))
        )
        self.core.start()
        await self.edge.set_serving(True)
        return address

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.to_thread(self.core.stop)
        await self.edge.stop(0.5)


def _open_edge(listen: Address, num_fronts: int, observer: TargetMetrics, calls: CommonMetrics) -> Edge:
    def make_servicer(core: Core) -> TargetServicer:
        return TargetServicer(
            core, MODEL, instance_id="life", drafter_facts=DrafterFacts,
            observe_rejected=observer.observe_rejected,
        )  # fmt: skip

    if num_fronts == 0:
        return InProcessFront(listen, make_servicer, calls)
    plan = FrontPlan(num_fronts, listen, "warning", "life", MODEL)
    return Fronts(plan, DrafterFacts, observer, calls.observe_server_call, calls.observe_event_loop_lag)


async def _serve(listen: str, num_fronts: int) -> None:
    await IdleTarget(parse_listen_address(listen, "listen"), num_fronts, 0.01).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    configure_log("warning", "target")
    asyncio.run(_serve(sys.argv[1], int(sys.argv[2])))
