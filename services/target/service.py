"""The target as a service: its parts, made in order and ended in order.

Composition only; what the parts do is said in their modules.
"""

from __future__ import annotations

import asyncio
import functools
import uuid
from collections.abc import Callable
from pathlib import Path

from common.config import ServiceSettings
from common.errors import ConfigError
from common.lifecycle import Lifecycle, watch_event_loop
from common.log import get_log
from common.metrics import CommonMetrics, Metrics, MetricsPage, serve_metrics
from common.paged_kv import PagePool
from common.rpc import HEALTH_METHODS, method_names, open_channel
from common.threads import confine_tensor_work
from services.target import cpu_parts
from services.target.config import TargetSettings
from services.target.core.core import Core
from services.target.core_parts import CoreParts, LoadedModel, RemoteParty
from services.target.edge import Edge, InProcessFront
from services.target.facts import DrafterFacts, DrafterState, ServedModel
from services.target.front.process import FLUSH_S
from services.target.front.servicer import SERVICE, TargetServicer
from services.target.fronts import FrontPlan, Fronts
from services.target.metrics import PREFIX, TargetMetrics
from services.target.model.llama import Llama, LlamaWeights

log = get_log("target")

_IDLE_POLL_S = 0.02
# What the link calls once a connection; its stream is no call that ends.
_CALLED = ("/tandem.v1.DrafterService/Handshake", "/tandem.v1.DrafterService/CloseSessions")


class TargetService:
    """A running target; a common.lifecycle.Service."""

    def __init__(self, core: Core, edge: Edge, page: MetricsPage | None) -> None:
        self._core = core
        self._edge = edge
        self._page = page

    async def set_serving(self, serving: bool) -> None:
        """Tell health."""
        await self._edge.set_serving(serving)

    async def drain(self) -> None:
        """Refuse new requests; return when those known have ended."""
        self._core.drain()
        while not self._core.idle:
            await asyncio.sleep(_IDLE_POLL_S)

    async def stop(self) -> None:
        """Fail what is left, let the streams say so, close."""
        await asyncio.to_thread(self._core.stop)
        await self._edge.stop(FLUSH_S)
        if self._page is not None:
            self._page.close()


def load_model(settings: TargetSettings) -> LoadedModel:
    """The model, read and checked. Raises ConfigError or CheckpointError."""
    confine_tensor_work()
    if settings.device == "cpu":
        return cpu_parts.load(settings)
    # Imported where there is a GPU: it needs Triton.
    from services.target import cuda_parts

    return cuda_parts.load(settings)


async def serve(settings: TargetSettings, model: LoadedModel) -> int:
    """Serve until a signal or a failure; the exit status. Raises ConfigError when it cannot start."""
    instance_id = uuid.uuid4().hex
    pool = _open_pool(settings, model)
    served = _served_model(settings, model, pool)
    metrics = Metrics(PREFIX, served.name)
    observer = TargetMetrics(metrics)
    calls = CommonMetrics(metrics, [*method_names(SERVICE), *HEALTH_METHODS], _CALLED)

    parts = _compose(settings, model, pool, served.max_len, instance_id, observer, calls)
    edge = _open_edge(settings, served, instance_id, lambda: _facts_of(parts.remote), observer, calls)
    core = Core(
        parts.roster,
        parts.loop,
        parts.drafter,
        num_known_max=settings.num_running_max + settings.num_waiting_max,
        prepare=parts.prepare,
        on_failure=lambda: life.fail("core"),
        announce=edge.announce,
    )
    page = _open_page(settings, metrics)
    life = Lifecycle(TargetService(core, edge, page), settings.grace_s)
    address = await edge.start(core, life.supervise)
    core.start()
    life.supervise("event_loop_lag", watch_event_loop(edge.observe_event_loop_lag))
    log.info("ready", listen=str(address), instance_id=instance_id, model=served.name, max_len=served.max_len)
    return await life.run()


def _open_pool(settings: TargetSettings, model: LoadedModel) -> PagePool:
    kv_tokens = settings.kv_tokens or _choose_kv_tokens(settings, model)
    num_pages = kv_tokens // settings.page_size
    if num_pages == 0:
        raise ConfigError("kv_tokens", f"must be at least --page-size {settings.page_size}", given=kv_tokens)
    return PagePool(num_pages, settings.page_size)


def _choose_kv_tokens(settings: TargetSettings, model: LoadedModel) -> int:
    if isinstance(model, Llama):
        return cpu_parts.KV_TOKENS
    from services.target import cuda_parts

    assert isinstance(model, LlamaWeights)
    return cuda_parts.choose_kv_tokens(settings, model)


def _served_model(settings: TargetSettings, model: LoadedModel, pool: PagePool) -> ServedModel:
    """The longest request must fit the KV pool when it runs alone, or it would wait for ever."""
    limit = min(model.config.max_len, pool.num_pages * pool.page_size)
    if settings.max_len is not None and settings.max_len > limit:
        raise ConfigError(
            "max_len", f"must be at most {limit} for this model and --kv-tokens", given=settings.max_len
        )
    return ServedModel(
        name=settings.served_model_name or Path(settings.model).name,
        architecture=model.config.architecture,
        vocab_size=model.config.vocab_size,
        max_len=settings.max_len or limit,
        eos_token_ids=model.config.eos_token_ids,
        dtype=settings.dtype_name,
    )


def _compose(
    settings: TargetSettings, model: LoadedModel, pool: PagePool, max_len: int, instance_id: str,
    observer: TargetMetrics, calls: CommonMetrics,
) -> CoreParts:  # fmt: skip
    opener = functools.partial(open_channel, observe_call=calls.observe_client_call)
    if isinstance(model, Llama):
        return cpu_parts.compose(
            settings, model, pool, instance_id=instance_id, observer=observer, open_channel=opener
        )
    from services.target import cuda_parts

    assert isinstance(model, LlamaWeights)
    return cuda_parts.compose(
        settings, model, pool, max_len=max_len, instance_id=instance_id, observer=observer,
        open_channel=opener,
    )  # fmt: skip


def _open_edge(
    settings: TargetSettings,
    served: ServedModel,
    instance_id: str,
    drafter_facts: Callable[[], DrafterFacts],
    observer: TargetMetrics,
    calls: CommonMetrics,
) -> Edge:
    if settings.num_fronts:
        plan = FrontPlan(
            settings.num_fronts, settings.listen_address, settings.log_level, instance_id, served
        )
        return Fronts(
            plan, drafter_facts, observer, calls.observe_server_call, calls.observe_event_loop_lag
        )
    make_servicer = functools.partial(
        TargetServicer,
        model=served,
        instance_id=instance_id,
        drafter_facts=drafter_facts,
        observe_rejected=observer.observe_rejected,
    )
    return InProcessFront(settings.listen_address, make_servicer, calls)


def _facts_of(drafter: RemoteParty | None) -> DrafterFacts:
    if drafter is None:
        return DrafterFacts()
    return DrafterFacts(
        state=DrafterState(drafter.state.value),
        block_size=drafter.block_size or 0,
        num_sessions=drafter.num_sessions,
        mismatches=tuple(str(mismatch) for mismatch in drafter.mismatches),
    )


def _open_page(settings: ServiceSettings, metrics: Metrics) -> MetricsPage | None:
    if settings.metrics_port == 0:
        return None
    return serve_metrics(metrics.registry, settings.metrics_host, settings.metrics_port)
