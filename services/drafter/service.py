"""The drafter as a service: its parts, made in order and ended in order.

Composition only; what the parts do is said in their modules.
"""

from __future__ import annotations

import asyncio
import functools
import time
import uuid
from collections.abc import Callable

from common.address import Address
from common.embedding import load_shared_weights
from common.lifecycle import Lifecycle, watch_event_loop
from common.log import get_log
from common.metrics import CommonMetrics, Metrics, MetricsPage, serve_metrics
from common.model_dir import resolve_model_dir
from common.paged_kv import PagePool
from common.pb.tandem.v1 import drafter_pb2_grpc
from common.rpc import HEALTH_METHODS, RpcServer, method_names
from common.threads import confine_tensor_work, spread_tensor_work
from common.wire import dtype_from_name
from services.drafter.config import DrafterSettings
from services.drafter.desk import DrafterDesk, DrafterFacts
from services.drafter.engine import DraftEngine
from services.drafter.engine_thread import EngineThread
from services.drafter.metrics import PREFIX, DrafterMetrics
from services.drafter.model.dflash import DFlash
from services.drafter.servicer import SERVICE, DrafterServicer
from services.drafter.session_table import SessionTable
from services.drafter.step import StepRunner

log = get_log("drafter")

# How often leases are looked at and gauges refreshed; small beside the lease.
HOUSEKEEPING_INTERVAL_S = 1.0
# For streams that are being answered when the service stops.
_FLUSH_S = 1.0


class DrafterService:
    """All parts of a drafter; a common.lifecycle.Service. Made on the event loop."""

    def __init__(
        self, settings: DrafterSettings, model: DFlash, facts: DrafterFacts, on_failure: Callable[[str], None]
    ) -> None:
        """on_failure is called, on the engine's thread, when the engine is broken."""
        metrics = Metrics(PREFIX, settings.served_name)
        self._registry = metrics.registry
        self._address = settings.listen_address
        self._metrics_at = (settings.metrics_host, settings.metrics_port)
        self._page: MetricsPage | None = None
        self._calls = CommonMetrics(metrics, [*method_names(SERVICE), *HEALTH_METHODS])
        self._metrics = DrafterMetrics(
            metrics, facts.captured_width * facts.dtype.itemsize, facts.draft.num_draft_tokens
        )
        pool = PagePool(settings.kv_tokens // settings.page_size, settings.page_size)
        table = SessionTable(
            pool,
            num_sessions_max=settings.num_sessions_max,
            context_len_max=facts.draft.context_len_max,
            block_size=facts.draft.block_size,
            lease_s=settings.lease_s,
            clock=time.monotonic,
            observer=self._metrics,
        )
        runner = StepRunner(table, DraftEngine(model, pool), facts.target.vocab_rows)
        self._desk = DrafterDesk(facts, table, runner, self._metrics)
        prepare = functools.partial(spread_tensor_work, settings.threads)
        self._engine_thread = EngineThread(on_failure, prepare)
        self._servicer = DrafterServicer(facts, self._desk, self._engine_thread)
        self._rpc = RpcServer([SERVICE.full_name], self._calls.observe_server_call)
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self._servicer, self._rpc.server)

    async def start(self) -> Address:
        """Listen, NOT_SERVING as yet. Raises ConfigError when an address is taken."""
        host, port = self._metrics_at
        self._page = serve_metrics(self._registry, host, port) if port else None
        return await self._rpc.start(self._address)

    async def keep_house(self) -> None:
        """End expired sessions, again and again. Never returns."""
        while True:
            await self._engine_thread.run(self._desk.keep_house)
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)

    async def watch_engine(self) -> None:
        """Refresh the gauges of the engine's thread, also while a job hangs there. Never returns."""
        while True:
            self._metrics.observe_engine(self._servicer.queue_depth, self._engine_thread.heartbeat_age_s)
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)

    async def watch_event_loop(self) -> None:
        """Measure the event loop's lag. Never returns."""
        await watch_event_loop(self._calls.observe_event_loop_lag)

    async def set_serving(self, serving: bool) -> None:
        """Tell health."""
        await self._rpc.set_serving(serving)

    async def drain(self) -> None:
        """Refuse new sessions; return when no connected target holds one."""
        await self._servicer.drain()

    async def stop(self) -> None:
        """End the streams with an error, close."""
        self._servicer.end_streams()
        await self._rpc.stop(_FLUSH_S)
        self._engine_thread.close()
        if self._page is not None:
            await asyncio.to_thread(self._page.close)


def load_model(settings: DrafterSettings) -> tuple[DFlash, DrafterFacts]:
    """Read and check both checkpoints. Raises ConfigError or CheckpointError."""
    confine_tensor_work()
    draft_dir = resolve_model_dir(settings.model, field="model")
    target_dir = resolve_model_dir(settings.target_model, field="target_model")
    shared, target = load_shared_weights(target_dir, dtype_from_name(settings.dtype))
    model = DFlash.load(draft_dir, shared, target)
    settings.check_capacity(model.contract.block_size)
    return model, DrafterFacts(
        instance_id=uuid.uuid4().hex,
        target=target,
        draft=model.contract,
        dtype=model.dtype,
        num_sessions_max=settings.num_sessions_max,
        lease_s=settings.lease_s,
    )


async def serve(settings: DrafterSettings, model: DFlash, facts: DrafterFacts) -> int:
    """Serve until a signal or a failure; the exit status. Raises ConfigError when it cannot start."""
    service = DrafterService(settings, model, facts, on_failure=lambda reason: life.fail(reason))
    life = Lifecycle(service, settings.grace_s)
    address = await service.start()
    life.supervise("housekeeping", service.keep_house())
    life.supervise("engine_gauges", service.watch_engine())
    life.supervise("event_loop_lag", service.watch_event_loop())
    log.info(
        "ready",
        listen=str(address),
        instance_id=facts.instance_id,
        model=settings.served_name,
        block_size=facts.draft.block_size,
        context_len_max=facts.draft.context_len_max,
    )
    return await life.run()
