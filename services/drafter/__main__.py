"""`python -m services.drafter`: reads settings and weights, composes the service, runs one life of it."""

from __future__ import annotations

import asyncio
import sys
import time
import uuid

import torch

from common.config import load_settings_or_exit
from common.embedding import load_shared_weights
from common.errors import TandemError
from common.lifecycle import Lifecycle, watch_event_loop
from common.log import configure_log, get_log
from common.metrics import CommonMetrics, Metrics, serve_metrics
from common.model_dir import resolve_model_dir
from common.paged_kv import PagePool
from common.pb.tandem.v1 import drafter_pb2, drafter_pb2_grpc
from common.rpc import HEALTH_METHODS, RpcServer, method_names
from services.drafter.config import DrafterSettings
from services.drafter.desk import DrafterDesk, DrafterFacts
from services.drafter.engine import DraftEngine
from services.drafter.engine_thread import EngineThread
from services.drafter.metrics import PREFIX, DrafterMetrics
from services.drafter.model.dflash import DFlash
from services.drafter.servicer import DrafterServicer
from services.drafter.session_table import SessionTable
from services.drafter.step import StepRunner

log = get_log("drafter")

SERVICE = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"]
# How often leases are looked at and gauges refreshed; small beside the lease.
HOUSEKEEPING_INTERVAL_S = 1.0


class DrafterService:
    """The service as its lifecycle sees it."""

    def __init__(self, rpc: RpcServer, servicer: DrafterServicer, engine_thread: EngineThread) -> None:
        self._rpc = rpc
        self._servicer = servicer
        self._engine_thread = engine_thread

    async def set_serving(self, serving: bool) -> None:
        await self._rpc.set_serving(serving)

    async def drain(self) -> None:
        await self._servicer.drain()

    async def stop(self) -> None:
        self._servicer.end_streams()
        # Streams end by themselves once they are told; this is for one that is being answered.
        await self._rpc.stop(1.0)
        self._engine_thread.close()


async def serve(settings: DrafterSettings, model: DFlash, facts: DrafterFacts, metrics: Metrics) -> int:
    """Run one life of the service; its exit status."""
    common_metrics = CommonMetrics(metrics, [*method_names(SERVICE), *HEALTH_METHODS])
    drafter_metrics = DrafterMetrics(metrics, facts.captured_width * facts.dtype.itemsize)
    pool = PagePool(settings.kv_tokens // settings.page_size, settings.page_size)
    table = SessionTable(
        pool,
        num_sessions_max=settings.num_sessions_max,
        context_len_max=facts.draft.context_len_max,
        block_size=facts.draft.block_size,
        lease_s=settings.lease_s,
        clock=time.monotonic,
        observer=drafter_metrics,
    )
    runner = StepRunner(table, DraftEngine(model, pool), facts.target.vocab_rows)
    desk = DrafterDesk(facts, table, runner, drafter_metrics)
    rpc = RpcServer([SERVICE.full_name], common_metrics.observe_server_call)
    engine_thread = EngineThread(on_failure=lambda reason: lifecycle.fail(reason))
    servicer = DrafterServicer(facts, desk, engine_thread)
    lifecycle = Lifecycle(DrafterService(rpc, servicer, engine_thread), settings.grace_s)
    drafter_pb2_grpc.add_DrafterServiceServicer_to_server(servicer, rpc.server)

    async def keep_house() -> None:
        while True:
            drafter_metrics.observe_engine(servicer.queue_depth, engine_thread.heartbeat_age_s)
            await engine_thread.run(desk.keep_house)
            await asyncio.sleep(HOUSEKEEPING_INTERVAL_S)

    page = None
    if settings.metrics_port:
        page = serve_metrics(metrics.registry, settings.metrics_host, settings.metrics_port)
    try:
        address = await rpc.start(settings.listen_address)
        log.info("listening", address=str(address), instance_id=facts.instance_id)
        lifecycle.supervise("housekeeping", keep_house())
        lifecycle.supervise("event loop lag", watch_event_loop(common_metrics.observe_event_loop_lag))
        return await lifecycle.run()
    finally:
        if page is not None:
            page.close()


def load(settings: DrafterSettings) -> tuple[DFlash, DrafterFacts]:
    """Read the checkpoints; TandemError when they do not fit each other or the settings."""
    draft_dir = resolve_model_dir(settings.model, field="model")
    target_dir = resolve_model_dir(settings.target_model, field="target_model")
    shared, target = load_shared_weights(target_dir, torch.float32)
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


def main() -> None:
    """Exit status: 0 after a clean stop, 1 after a failure, 2 for a wrong setting or checkpoint."""
    settings = load_settings_or_exit(DrafterSettings, "services.drafter")
    configure_log(settings.log_level, "drafter")
    log.info("configuration", **settings.model_dump())
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        model, facts = load(settings)
        metrics = Metrics(PREFIX, settings.served_name)
        sys.exit(asyncio.run(serve(settings, model, facts, metrics)))
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
