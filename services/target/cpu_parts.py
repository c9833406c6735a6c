"""The core's parts on a CPU: each step is read before the next, drafts come by messages. Composition only."""

from __future__ import annotations

import functools

from common.model_dir import resolve_model_dir
from common.paged_kv import PagePool
from common.threads import spread_tensor_work
from common.wire import dtype_from_name
from services.target.config import TargetSettings
from services.target.core.draft_source import DraftSource, NoDrafts
from services.target.core.drafter_link import OpenChannel
from services.target.core.engine import Engine
from services.target.core.remote_drafter import RemoteDrafter
from services.target.core.scheduler import Scheduler
from services.target.core.step import StepLoop
from services.target.core_parts import CoreParts
from services.target.metrics import TargetMetrics
from services.target.model.llama import Llama

# 0.4 GB of a 135M model in float32.
KV_TOKENS = 16384


def load(settings: TargetSettings) -> Llama:
    """Raises ConfigError or CheckpointError."""
    return Llama.load(resolve_model_dir(settings.model), dtype_from_name(settings.dtype_name))


def compose(
    settings: TargetSettings, model: Llama, pool: PagePool, *, instance_id: str, observer: TargetMetrics,
    open_channel: OpenChannel,
) -> CoreParts:  # fmt: skip
    """Looks for the drafter from now on."""
    remote = None
    if settings.drafter_address is not None:
        remote = RemoteDrafter.connect(
            settings.drafter_address, model.contract, instance_id, settings.draft_deadline_s, observer,
            open_channel,
        )  # fmt: skip
    source: DraftSource = remote or NoDrafts()
    scheduler = Scheduler(
        pool, num_running_max=settings.num_running_max, extend_rows_max=settings.num_extend_rows_max
    )
    loop = StepLoop(scheduler, Engine(model, pool, settings.device), source, observer)
    prepare = functools.partial(spread_tensor_work, settings.threads)
    return CoreParts(scheduler, loop, source, remote, prepare)
