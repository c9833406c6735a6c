"""The core's parts on a GPU: graphs, a loop that launches ahead, drafts in shared memory. Composition only.

Imports Triton: whoever serves on a CPU must not import this.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import torch

from common import limits
from common.device import find_device, is_out_of_memory
from common.errors import ConfigError
from common.graphs import MemoryReport
from common.log import get_log
from common.model_dir import resolve_model_dir
from common.paged_kv import PagePool
from common.wire import dtype_from_name
from services.target import kv_budget
from services.target.config import TargetSettings
from services.target.core.device_drafter import DeviceDrafter
from services.target.core.device_engine import DeviceEngine, positions_max
from services.target.core.drafter_link import OpenChannel
from services.target.core.handoff_choice import HandoffChoice
from services.target.core.lanes_scheduler import LanesScheduler
from services.target.core.pipelined_source import NoPipelinedDrafter, PipelinedDrafter
from services.target.core.pipelined_step import PipelinedStepLoop
from services.target.core.ring_owner import CudaRingDevice, RingOwner
from services.target.core.step_buffers import buffer_bytes
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


def choose_kv_tokens(
    settings: TargetSettings, weights: LlamaWeights, free_bytes: Callable[[torch.device], int] | None = None
) -> int:
    """Tokens that the KV pool shall hold: what fits beside all that will be allocated, whatever drafter may
    come. Raises ConfigError when nothing does."""
    config, device = weights.config, weights.final_norm.device
    max_len, num_lanes = settings.max_len or config.max_len, settings.num_running_max
    try:
        # For the memory that it takes; given back before the one that serves is made.
        model = _make_model(settings, weights, settings.page_size, max_len)
    except torch.OutOfMemoryError:
        raise ConfigError("num_running_max", "must leave memory for K/V", given=num_lanes) from None
    free = (free_bytes or _free_bytes)(device)
    num_verify_rows = num_lanes * kv_budget.BLOCK_SIZE if settings.drafter else 0
    num_buffer_bytes = buffer_bytes(
        model, num_lanes=num_lanes, num_pages_each=-(-positions_max(max_len) // settings.page_size),
        extend_rows_max=settings.num_extend_rows_max, extends_max=_extends_max(settings),
        num_verify_rows=num_verify_rows,
    )  # fmt: skip
    num_captured_rows = num_verify_rows + settings.num_extend_rows_max if settings.drafter else 0
    num_ring_bytes = (
        num_captured_rows * kv_budget.NUM_CAPTURED_LAYERS * config.hidden_size * model.dtype.itemsize
    )
    num_layers, num_kv_heads, head_dim = model.kv_shape
    other_bytes = num_buffer_bytes + num_ring_bytes + kv_budget.GRAPH_BYTES
    kv_tokens = kv_budget.kv_tokens_that_fit(
        free_bytes=free,
        other_bytes=other_bytes,
        token_bytes=2 * num_layers * num_kv_heads * head_dim * model.dtype.itemsize,
        page_size=settings.page_size,
        tokens_useful=num_lanes * -(-max_len // settings.page_size) * settings.page_size,
    )
    log.info("kv_tokens_chosen", kv_tokens=kv_tokens, free_bytes=free, other_bytes=other_bytes)
    return kv_tokens


def compose(
    settings: TargetSettings, weights: LlamaWeights, pool: PagePool, *, max_len: int, instance_id: str,
    observer: TargetMetrics, open_channel: OpenChannel,
) -> CoreParts:  # fmt: skip
    """Captures the graphs of plain decoding, some seconds, and looks for the drafter from then on. max_len:
    tokens of a request. Raises ConfigError when memory does not suffice."""
    device = weights.final_norm.device
    num_lanes, extends_max = settings.num_running_max, _extends_max(settings)
    try:
        model = _make_model(settings, weights, pool.page_size, max_len)
        engine = DeviceEngine(
            model,
            num_pages=pool.num_pages,
            page_size=pool.page_size,
            num_lanes=num_lanes,
            max_len=max_len,
            extend_rows_max=settings.num_extend_rows_max,
            extends_max=extends_max,
            on_captured=log_captured,
            on_memory=functools.partial(_log_memory, model),
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        num_tokens = pool.num_pages * pool.page_size
        raise ConfigError(
            "kv_tokens", "must fit the GPU's memory beside the weights", given=num_tokens
        ) from None
    remote = None
    if settings.drafter_address is not None:
        rings = RingOwner(
            CudaRingDevice(device), weights.contract, num_rows=num_lanes,
            extend_rows_max=settings.num_extend_rows_max, socket_parent=settings.handoff_parent,
        )  # fmt: skip
        remote = DeviceDrafter.connect(
            settings.drafter_address, weights.contract, instance_id, settings.draft_deadline_s, observer,
            HandoffChoice(settings.handoff), rings, open_channel,
        )  # fmt: skip
    drafter: PipelinedDrafter = remote or NoPipelinedDrafter()
    scheduler = LanesScheduler(
        pool,
        num_running_max=num_lanes,
        extend_rows_max=settings.num_extend_rows_max,
        extends_max=extends_max,
    )
    loop = PipelinedStepLoop(scheduler, engine, drafter, observer)
    return CoreParts(scheduler, loop, drafter, remote, functools.partial(_prepare, engine.stream))


def log_captured(done: int, total: int) -> None:
    """A line each quarter: there are some 40 graphs, and all of them take up to a minute."""
    if done * 4 // total > (done - 1) * 4 // total:
        log.info("graphs_captured", done=done, total=total)


def _log_memory(model: KernelLlama, of_engine: MemoryReport) -> None:
    """All that the GPU holds for the target but the hand-off ring, which says so itself."""
    report = [*model.memory_report(), *of_engine]
    device = model.device
    if device.type == "cuda":
        report.append(("free", _free_bytes(device)))
    log.info("device_memory", **{name.replace(" ", "_"): size for name, size in report})


def _make_model(
    settings: TargetSettings, weights: LlamaWeights, page_size: int, max_len: int
) -> KernelLlama:
    num_positions = positions_max(max_len)
    return KernelLlama(
        weights,
        page_size=page_size,
        # The drafter says how wide a block is, once there is one.
        num_rows_max=max(settings.num_extend_rows_max, settings.num_running_max * limits.BLOCK_SIZE_MAX),
        num_keys_max=num_positions,
        max_positions=num_positions,
        row_independent=settings.row_independent,
    )


def _extends_max(settings: TargetSettings) -> int:
    return min(_EXTENDS_MAX, settings.num_running_max)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]


def _prepare(stream: torch.cuda.Stream | None) -> None:
    """Let whatever the core's thread enqueues, the hand-off's flags included, follow the engine's work."""
    if stream is not None:
        torch.cuda.set_device(stream.device)
        torch.cuda.set_stream(stream)
    # A full pass of the collector over what was loaded takes 0.2 s, 30 steps.
    gc.collect()
    gc.freeze()
