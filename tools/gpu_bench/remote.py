"""A drafter in a process of its own, for one mode of the bench: started, waited for, asked for its times.

Composition only. Each mode gets a process: one that fails cannot disturb the other.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import torch

from common.address import parse_address
from common.model_dir import resolve_model_dir
from services.target.core.device_drafter import DeviceDrafter
from services.target.core.drafter_status import LinkState
from services.target.core.handoff_choice import HandoffChoice
from services.target.core.ring_owner import CudaRingDevice, RingOwner
from tools.child_service import ChildService
from tools.gpu_bench.core_load import BenchFailed, StepRunner
from tools.gpu_bench.pair import Pair
from tools.gpu_bench.plan import GpuPlan, Mode
from tools.gpu_bench.sizes import DRAFT_PAGE_SIZE, Sizes
from tools.local_stack import START_DEADLINE_S, STOP_GRACE_S, drafter_service, free_ports
from tools.scrape import Scrape, mean_ms, scrape

_DRAFTER_STEP = "tandem_drafter_draft_time_seconds"
# So long that only a drafter that is lost misses it: a miss shows as undrafted steps, not as a slow one.
_DRAFT_DEADLINE_S = 5.0
# A handshake, the ring's graphs, and on the target those of verification.
_LINK_DEADLINE_S = 120.0
_LOG_TAIL_LINES = 12
# The drafter refreshes these each second.
_SETTLE_S = 3.0
_MUST_BE_ZERO = ("num_sessions", "pages_unaccounted", "kv_cache_usage_perc")


@dataclass
class LinkEvents:
    """A DeviceObserver that counts what must not happen during a measurement."""

    counts: dict[str, int] = field(default_factory=dict)

    def observe_drafter(self, up: bool, breaker: str) -> None: ...

    def observe_mismatches(self, fields: list[str]) -> None: ...

    def observe_transport(self, transport: str | None) -> None: ...

    def observe_resync(self, kind: str) -> None:
        self._count(f"resync: {kind}")

    def observe_watchdog_release(self) -> None:
        self._count("watchdog released the device")

    def observe_fallback(self, reason: str) -> None:
        self._count(f"fell back to inline: {reason}")

    def _count(self, event: str) -> None:
        self.counts[event] = self.counts.get(event, 0) + 1


def private_directory(ending: contextlib.ExitStack) -> Path:
    """A directory that goes when `ending` closes. Its path is short, since sockets lie in it."""
    return Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="tandem-", dir="/tmp")))


class DrafterProcess:
    """The drafter of one mode. `start` returns at once; `close` ends it and removes what it left."""

    def __init__(self, plan: GpuPlan, sizes: Sizes) -> None:
        self._ending = contextlib.ExitStack()
        self.directory = directory = private_directory(self._ending)
        (port,) = free_ports(1)
        self._metrics_url = f"http://127.0.0.1:{port}/metrics"
        flags = [
            "--device", plan.device, "--page-size", str(DRAFT_PAGE_SIZE),
            # A lane and its pages are held while steps that name them are in flight.
            "--num-sessions-max", str(2 * sizes.num_lanes), "--kv-tokens", str(2 * sizes.draft_kv_tokens),
            "--extend-rows-max", str(sizes.extend_rows_max),
        ]  # fmt: skip
        if plan.random_shape is not None:
            address = f"unix:{directory}/drafter.sock"
            module = ["tools.gpu_bench.random_drafter", plan.random_shape, "--listen", address]
            self.service = ChildService(
                "drafter",
                [*module, "--metrics-port", str(port), *flags],
                address=address,
                log_path=directory / "drafter.log",
            )
        else:
            assert plan.model is not None and plan.draft is not None
            model_dir, draft_dir = resolve_model_dir(plan.model), resolve_model_dir(plan.draft)
            self.service = drafter_service(directory, model_dir, draft_dir, metrics_port=port, flags=flags)
        self._ending.callback(self.service.stop, STOP_GRACE_S)
        self._before: Scrape | None = None

    def start(self) -> None:
        self.service.start()

    def wait_serving(self) -> None:
        """ServiceFailed when it does not come up."""
        self.service.wait_serving(START_DEADLINE_S)
        self._before = scrape(self._metrics_url)

    def close(self) -> None:
        self._ending.close()

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        text = self.service.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def take_drafting_ms(self) -> dict[str, float]:
        """Mean milliseconds a message by phase since the last call: `ingest` and `draft` are the device's."""
        assert self._before is not None
        now = scrape(self._metrics_url)
        means = mean_ms(self._before, now, _DRAFTER_STEP, "phase")
        self._before = now
        named = {"queue": "drafter_queue", "total": "drafter_total"}
        return {named.get(phase, phase): ms for phase, ms in means.items()}

    def leftovers(self) -> list[str]:
        """What it still holds although no request is left; waits a little for what is on its way."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            now = scrape(self._metrics_url)
            held = {name: now.value(f"tandem_drafter_{name}") for name in _MUST_BE_ZERO}
            wrong = [f"drafter: {name} is {value:g}" for name, value in held.items() if value]
            if not wrong or time.monotonic() > deadline:
                return wrong
            time.sleep(0.1)


def connect_drafter(
    pair: Pair, sizes: Sizes, mode: Mode, process: DrafterProcess, device: torch.device, events: LinkEvents
) -> DeviceDrafter:
    """A pipelined drafter that looks for the process, over the device or by messages as the mode says."""
    contract = pair.weights.contract
    rings = RingOwner(
        CudaRingDevice(device),
        contract,
        num_rows=sizes.num_lanes,
        extend_rows_max=sizes.extend_rows_max,
        socket_parent=process.directory,
    )
    return DeviceDrafter.connect(
        parse_address(process.service.address, "drafter"),
        contract,
        uuid.uuid4().hex,
        _DRAFT_DEADLINE_S,
        events,
        HandoffChoice.DEVICE if mode is Mode.DEVICE else HandoffChoice.INLINE,
        rings,
    )


def await_link(drafter: DeviceDrafter, loop: StepRunner, process: DrafterProcess) -> None:
    """Idle steps until the loop has taken the drafter over. BenchFailed when that does not happen."""
    deadline = time.monotonic() + _LINK_DEADLINE_S
    while drafter.draft is None:
        if drafter.state is LinkState.MISMATCH:
            differences = "; ".join(str(mismatch) for mismatch in drafter.mismatches)
            raise BenchFailed(f"the drafter does not fit: {differences}")
        if not process.service.running or time.monotonic() > deadline:
            raise BenchFailed(f"no link to the drafter:\n{process.log_tail()}")
        loop.step()
        time.sleep(0.01)
