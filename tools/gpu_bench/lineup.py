"""Puts the modes of a plan together over one pair of weights: an engine, a loop and a drafter for each.

Composition only. Engines are built one by one and share the model's buffers: they run one after another.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator

import torch

from common.handoff.ring import Ring, RingShape
from common.paged_kv import PagePool
from services.drafter.device_engine import DeviceDraftEngine
from services.drafter.model.kernel_dflash import KernelDFlash
from services.target.core.device_engine import DeviceEngine, positions_max
from services.target.core.lanes_scheduler import LanesScheduler
from services.target.core.pipelined_source import NoPipelinedDrafter, PipelinedDrafter
from services.target.core.pipelined_step import PipelinedStepLoop
from services.target.model.kernel_llama import KernelLlama
from tools.gpu_bench.contender import Contender
from tools.gpu_bench.core_load import CoreLoad
from tools.gpu_bench.inprocess_drafter import InprocessDrafter
from tools.gpu_bench.oracle_drafter import OracleDrafter
from tools.gpu_bench.pair import Pair
from tools.gpu_bench.plan import GpuPlan, Job, Mode
from tools.gpu_bench.remote import DrafterProcess, LinkEvents, await_link, connect_drafter
from tools.gpu_bench.sizes import DRAFT_PAGE_SIZE, TARGET_PAGE_SIZE, Sizes
from tools.gpu_bench.step_log import StepLog
from tools.gpu_bench.sync_watch import SyncWatch
from tools.gpu_bench.timed_engine import TimedEngine

# Called with what is captured, how many graphs of it are done, and of how many.
OnCaptured = Callable[[str, int, int], None]


class Lineup:
    """All modes of a plan, ready to run; `close` ends what they started."""

    def __init__(
        self,
        plan: GpuPlan,
        pair: Pair,
        sizes: Sizes,
        device: torch.device,
        stopping: Callable[[], bool],
        on_captured: OnCaptured,
    ) -> None:
        """Captures graphs; drafter processes load meanwhile. ServiceFailed or BenchFailed when one does not
        come up."""
        self._plan, self._pair, self._sizes, self._device = plan, pair, sizes, device
        self._stopping = stopping
        self._on_captured = on_captured
        self._ending = contextlib.ExitStack()
        self.events = LinkEvents()
        self.oracle: OracleDrafter | None = None
        self.contenders: list[Contender] = []
        try:
            processes = {mode: self._start_process() for mode in plan.modes if mode in _REMOTE}
            num_positions = positions_max(sizes.max_len)
            self._model = KernelLlama(
                pair.weights,
                page_size=TARGET_PAGE_SIZE,
                num_rows_max=sizes.num_rows_max,
                num_keys_max=num_positions,
                max_positions=num_positions,
                row_independent=plan.row_independent,
            )
            for mode in plan.modes:
                self.contenders.append(self._contender(mode, processes.get(mode)))
        except BaseException:
            self._ending.close()
            raise

    def __enter__(self) -> Lineup:
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.close()

    def learn(self, prompt: list[int], output: list[int]) -> None:
        """Tell the drafter that knows all, if there is one, what plain decoding gave."""
        if self.oracle is not None:
            self.oracle.learn(prompt, output)

    def _start_process(self) -> DrafterProcess:
        process = DrafterProcess(self._plan, self._sizes)
        self._ending.callback(process.close)
        process.start()
        return process

    def _contender(self, mode: Mode, process: DrafterProcess | None) -> Contender:
        plan, sizes = self._plan, self._sizes
        engine = DeviceEngine(
            self._model,
            num_pages=sizes.num_pages,
            page_size=TARGET_PAGE_SIZE,
            num_lanes=sizes.num_lanes,
            max_len=sizes.max_len,
            extend_rows_max=sizes.extend_rows_max,
            extends_max=sizes.extends_max,
            synthetic_accept=None if mode is Mode.PLAIN else plan.synthetic_accept_length,
            lane_buckets=sizes.lane_buckets,
            extend_buckets=sizes.extend_buckets,
            on_captured=functools.partial(self._on_captured, mode),
        )
        scheduler = LanesScheduler(
            PagePool(sizes.num_pages, TARGET_PAGE_SIZE),
            num_running_max=sizes.num_lanes,
            extend_rows_max=sizes.extend_rows_max,
            extends_max=sizes.extends_max,
        )
        log = StepLog()

        def compose(drafter: PipelinedDrafter) -> Contender:
            loop = PipelinedStepLoop(scheduler, TimedEngine(engine, log), drafter, log)
            self._ending.callback(drafter.close)
            watch = SyncWatch()
            contender = Contender(
                mode, loop, CoreLoad(loop, scheduler, self._stopping), log,
                functools.partial(_on_stream, engine.stream, watch), syncs=watch.found,
            )  # fmt: skip
            with contender.on_stream():
                # An idle step adopts the drafter's contract, if it has one: graphs are captured here.
                loop.step()
            watch.found.clear()
            return contender

        if process is not None:
            return self._remote(mode, process, compose)
        if mode is Mode.PLAIN:
            return compose(NoPipelinedDrafter())
        if plan.job is Job.IDENTITY and plan.random_shape is not None:
            return self._oracle(compose, scheduler)
        return self._inprocess(compose, engine.stream)

    def _remote(
        self, mode: Mode, process: DrafterProcess, compose: Callable[[PipelinedDrafter], Contender]
    ) -> Contender:
        process.wait_serving()
        drafter = connect_drafter(self._pair, self._sizes, mode, process, self._device, self.events)
        contender = compose(drafter)
        with contender.on_stream():
            await_link(drafter, contender.loop, process)
        contender.syncs.clear()
        contender.take_drafting_ms = process.take_drafting_ms
        contender.leftovers = process.leftovers
        contender.drafter_pid = process.service.pid
        return contender

    def _oracle(
        self, compose: Callable[[PipelinedDrafter], Contender], scheduler: LanesScheduler
    ) -> Contender:
        assert self._pair.draft is not None
        self.oracle = OracleDrafter(
            self._pair.draft.contract,
            self._local_ring(),
            scheduler,
            num_lanes=self._sizes.num_lanes,
            max_len=self._sizes.max_len,
            vocab_rows=self._model.vocab_rows,
        )
        return compose(self.oracle)

    def _inprocess(
        self, compose: Callable[[PipelinedDrafter], Contender], stream: torch.cuda.Stream | None
    ) -> Contender:
        draft, sizes = self._pair.draft, self._sizes
        assert draft is not None
        # As the drafter's service sizes them, so that kernels split the keys alike.
        num_positions = draft.contract.context_len_max + draft.config.block_size
        model = KernelDFlash(
            draft,
            self._pair.weights.shared,
            page_size=DRAFT_PAGE_SIZE,
            num_rows_max=sizes.num_rows_max,
            num_keys_max=num_positions,
            max_positions=num_positions,
        )
        engine = DeviceDraftEngine(
            model,
            num_pages=sizes.num_draft_pages,
            page_size=DRAFT_PAGE_SIZE,
            num_lanes=sizes.num_lanes,
            num_rows_max=sizes.num_lanes,
            extend_rows_max=sizes.extend_rows_max,
            context_len_max=draft.contract.context_len_max,
            on_captured=functools.partial(self._on_captured, "draft"),
            stream=stream,
        )
        ring = self._local_ring()
        engine.attach(ring)
        pool = PagePool(sizes.num_draft_pages, DRAFT_PAGE_SIZE)
        drafter = InprocessDrafter(engine, draft.contract, ring, pool)
        contender = compose(drafter)
        contender.take_drafting_ms = functools.partial(_median_drafting_ms, drafter)
        contender.leftovers = functools.partial(_leftovers, drafter, pool)
        return contender

    def _local_ring(self) -> Ring:
        draft = self._pair.draft
        assert draft is not None
        shape = RingShape(
            num_rows=self._sizes.num_lanes,
            block_size=draft.config.block_size,
            num_draft_tokens=draft.contract.num_draft_tokens,
            captured_width=len(draft.contract.captured_layer_ids) * self._model.config.hidden_size,
            dtype=self._model.dtype,
            extend_rows_max=self._sizes.extend_rows_max,
        )
        return Ring.local(shape, self._device)


_REMOTE = (Mode.INLINE, Mode.DEVICE)


@contextlib.contextmanager
def _on_stream(stream: torch.cuda.Stream | None, watch: SyncWatch) -> Iterator[None]:
    """What is enqueued in the block goes to this stream; before and after it the device is idle."""
    if stream is None:
        yield
        return
    torch.cuda.synchronize(stream.device)
    with torch.cuda.stream(stream), watch.watching():
        yield
    torch.cuda.synchronize(stream.device)


def _median_drafting_ms(drafter: InprocessDrafter) -> dict[str, float]:
    times = drafter.take_times()
    phases_s = {"ingest": times.ingest_s, "draft": times.draft_s}
    return {phase: 1000 * statistics.median(seconds) for phase, seconds in phases_s.items() if seconds}


def _leftovers(drafter: InprocessDrafter, pool: PagePool) -> list[str]:
    held = {"sessions": drafter.num_sessions, "pages that are not free": pool.num_pages - pool.num_free}
    return [f"drafter: {count} {what}" for what, count in held.items() if count]
