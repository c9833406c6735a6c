"""The core's parts on a GPU: graphs, a loop that launches ahead, drafts in shared memory. Composition only.

Imports Triton: whoever serves on a CPU must not import this.
"""

from __future__ import annotations

import functools
import gc

import torch

from common import limits
from common.device import find_device
from common.errors import ConfigError
from common.log import get_log
from common.model_dir import resolve_model_dir
from common.paged_kv import PagePool
from common.wire import dtype_from_name
from services.target.config import TargetSettings
from services.target.core.device_drafter import DeviceDrafter
from services.target.core.device_engine import DeviceEngine, positions_max
from services.target.core.drafter_link import OpenChannel
from services.target.core.handoff_choice import HandoffChoice
from services.target.core.lanes_scheduler import LanesScheduler
from services.target.core.pipelined_source import NoPipelinedDrafter, PipelinedDrafter
from services.target.core.pipelined_step import PipelinedStepLoop
from services.target.core.ring_owner import CudaRingDevice, RingOwner
from services.target.core_parts import CoreParts
from services.target.metrics import TargetMetrics
from services.target.model.kernel_llama import KernelLlama
from services.target.model.llama import LlamaWeights

log = get_log("target")

# Prompts that share a step: more would hardly be short enough to.
_EXTENDS_MAX = 32


def load(settings: TargetSettings) -> LlamaWeights:
    """Raises ConfigError or CheckpointError."""
    dtype = dtype_from_name(settings.dtype_name)
    device = find_device(settings.device, dtype)
    return LlamaWeights.load(resolve_model_dir(settings.model), dtype, device)


def compose(
    settings: TargetSettings, weights: LlamaWeights, pool: PagePool, *, max_len: int, instance_id: str,
    observer: TargetMetrics, open_channel: OpenChannel,
) -> CoreParts:  # fmt: skip
    """Captures the graphs of plain decoding, some seconds, and looks for the drafter from then on. max_len:
    tokens of a request. Raises ConfigError when memory does not suffice."""
    device = weights.final_norm.device
    num_positions = positions_max(max_len)
    num_lanes, extends_max = settings.num_running_max, min(_EXTENDS_MAX, settings.num_running_max)
    try:
        model = KernelLlama(
            weights,
            page_size=pool.page_size,
            # The drafter says how wide a block is, once there is one.
            num_rows_max=max(settings.extend_rows_max, num_lanes * limits.BLOCK_SIZE_MAX),
            num_keys_max=num_positions,
            max_positions=num_positions,
            row_independent=settings.row_independent,
        )
        engine = DeviceEngine(
            model,
            num_pages=pool.num_pages,
            page_size=pool.page_size,
            num_lanes=num_lanes,
            max_len=max_len,
            extend_rows_max=settings.extend_rows_max,
            extends_max=extends_max,
            on_captured=_log_captured,
        )
    except torch.OutOfMemoryError:
        raise ConfigError(
            "kv_tokens", "must fit the GPU's memory beside the weights", given=settings.kv_tokens
        ) from None
    log.info("device_memory", **{name.replace(" ", "_"): size for name, size in engine.memory_report()})
    remote = None
    if settings.drafter_address is not None:
        rings = RingOwner(
            CudaRingDevice(device), weights.contract, num_rows=num_lanes,
            extend_rows_max=settings.extend_rows_max, socket_parent=settings.handoff_parent,
        )  # fmt: skip
        remote = DeviceDrafter.connect(
            settings.drafter_address, weights.contract, instance_id, settings.draft_deadline_s, observer,
            HandoffChoice(settings.handoff), rings, open_channel,
        )  # fmt: skip
    drafter: PipelinedDrafter = remote or NoPipelinedDrafter()
    scheduler = LanesScheduler(
        pool,
        num_running_max=num_lanes,
        extend_rows_max=settings.extend_rows_max,
        extends_max=extends_max,
    )
    loop = PipelinedStepLoop(scheduler, engine, drafter, observer)
    return CoreParts(scheduler, loop, drafter, remote, functools.partial(_prepare, engine.stream))


def _log_captured(done: int, total: int) -> None:
    log.debug("graph_captured", done=done, total=total)
    if done == total:
        log.info("graphs_captured", total=total)


def _prepare(stream: torch.cuda.Stream | None) -> None:
    """Let whatever the core's thread enqueues, the hand-off's flags included, follow the engine's work."""
    if stream is not None:
        torch.cuda.set_device(stream.device)
        torch.cuda.set_stream(stream)
    # A full pass of the collector over what was loaded takes 0.2 s, 30 steps.
    gc.collect()
    gc.freeze()
