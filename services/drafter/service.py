"""The drafter as a service: its parts, made in order and ended in order.

Composition only; what the parts do is said in their modules.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable

from common.address import Address
from common.lifecycle import Lifecycle, watch_event_loop
from common.log import get_log
from common.metrics import CommonMetrics, Metrics, MetricsPage, serve_metrics
from common.pb.tandem.v1 import drafter_pb2_grpc
from common.rpc import HEALTH_METHODS, RpcServer, method_names
from services.drafter.config import DrafterSettings
from services.drafter.desk import DrafterDesk
from services.drafter.device_links import DeviceLinks
from services.drafter.device_runner import DeviceRunner
from services.drafter.engine_thread import EngineThread
from services.drafter.loading import LoadedDrafter, prepare_engine_thread
from services.drafter.metrics import PREFIX, DrafterMetrics
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
        self, settings: DrafterSettings, loaded: LoadedDrafter, on_failure: Callable[[str], None]
    ) -> None:
        """on_failure is called, from any thread, when the engine or its device is broken."""
        facts, ring_work = loaded.facts, loaded.ring_work
        metrics = Metrics(PREFIX, settings.served_name)
        self._registry = metrics.registry
        self._address = settings.listen_address
        self._metrics_at = (settings.metrics_host, settings.metrics_port)
        self._page: MetricsPage | None = None
        self._calls = CommonMetrics(metrics, [*method_names(SERVICE), *HEALTH_METHODS])
        self._metrics = DrafterMetrics(
            metrics, facts.captured_width * facts.dtype.itemsize, facts.draft.num_draft_tokens
        )
        table = SessionTable(
            loaded.pool,
            num_sessions_max=settings.num_sessions_max,
            context_len_max=facts.draft.context_len_max,
            block_size=facts.draft.block_size,
            lease_s=settings.lease_s,
            clock=time.monotonic,
            observer=self._metrics,
            has_lanes=ring_work is not None,
        )
        runner = StepRunner(table, loaded.engine, facts.target.vocab_rows)
        device_runner = mapping = None
        if ring_work is not None:
            device_runner = DeviceRunner(table, ring_work.engine, facts.draft.block_size)
            mapping = ring_work.mapping
        self._desk = DrafterDesk(facts, table, runner, self._metrics, device_runner)
        prepare = functools.partial(prepare_engine_thread, loaded.device, settings.threads)
        self._engine_thread = EngineThread(on_failure, prepare)
        self._links = DeviceLinks(self._desk, self._engine_thread, mapping, on_failure)
        self._servicer = DrafterServicer(facts, self._desk, self._engine_thread, self._links)
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
        """Refresh the gauges of the engine's thread and device, also while a job or a step hangs there.
        Never returns."""
        while True:
            age_s = max(self._engine_thread.heartbeat_age_s, self._links.step_age_s)
            self._metrics.observe_engine(self._servicer.queue_depth, age_s)
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
        await self._links.close()
        self._engine_thread.close()
        if self._page is not None:
            await asyncio.to_thread(self._page.close)


async def serve(settings: DrafterSettings, loaded: LoadedDrafter) -> int:
    """Serve until a signal or a failure; the exit status. Raises ConfigError when it cannot start."""
    facts = loaded.facts
    service = DrafterService(settings, loaded, on_failure=lambda reason: life.fail(reason))
    life = Lifecycle(service, settings.grace_s)
    address = await service.start()
    life.supervise("housekeeping", service.keep_house())
    life.supervise("engine_gauges", service.watch_engine())
    life.supervise("event_loop_lag", service.watch_event_loop())
    log.info(
        "ready",
        listen=str(address),
        device=settings.device,
        instance_id=facts.instance_id,
        model=settings.served_name,
        block_size=facts.draft.block_size,
        context_len_max=facts.draft.context_len_max,
    )
    return await life.run()
