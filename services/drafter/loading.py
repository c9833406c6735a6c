"""What a drafter computes with, from its settings: weights, cache, and the engine that fits the device.

Composition only. What only a GPU needs is imported when there is one.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from common import limits
from common.contract import DraftContract, TargetContract
from common.device import find_device, is_out_of_memory
from common.embedding import SharedWeights, load_shared_weights
from common.errors import ConfigError
from common.handoff.ring import RingShape
from common.log import get_log
from common.model_dir import resolve_model_dir
from common.paged_kv import PagePool
from common.threads import confine_tensor_work, spread_tensor_work
from common.wire import dtype_from_name
from services.drafter.config import DrafterSettings
from services.drafter.desk import DrafterFacts
from services.drafter.device_links import RingSource
from services.drafter.device_runner import DeviceEngine
from services.drafter.engine import DraftEngine
from services.drafter.model.dflash import DFlash
from services.drafter.model.dflash_weights import Draft
from services.drafter.step import InlineEngine

log = get_log("loading")


@dataclass(frozen=True)
class RingWork:
    """What work over hand-off rings is done with."""

    engine: DeviceEngine
    mapping: RingSource


@dataclass(frozen=True)
class LoadedDrafter:
    """All that is made once from settings and checkpoints. engine serves inline messages; ring_work is None
    where there is no hand-off ring."""

    device: torch.device
    facts: DrafterFacts
    pool: PagePool
    engine: InlineEngine
    ring_work: RingWork | None = None


def load_drafter(settings: DrafterSettings) -> LoadedDrafter:
    """Read and check both checkpoints, allocate the cache. Raises ConfigError or CheckpointError."""
    confine_tensor_work()
    dtype = dtype_from_name(settings.dtype_name)
    device = find_device(settings.device, dtype)
    draft_dir = resolve_model_dir(settings.model, field="model")
    target_dir = resolve_model_dir(settings.target_model, field="target_model")
    with _memory_for_weights(settings):
        shared, target = load_shared_weights(target_dir, dtype, device)
    load = _load_for_gpu if device.type == "cuda" else _load_for_cpu
    return load(settings, draft_dir, shared, target)


def _load_for_cpu(
    settings: DrafterSettings, draft_dir: Path, shared: SharedWeights, target: TargetContract
) -> LoadedDrafter:
    model = DFlash.load(draft_dir, shared, target)
    settings.check_capacity(model.contract.block_size)
    pool = _open_pool(settings)
    facts = _facts(settings, target, model.contract, model.dtype)
    return LoadedDrafter(torch.device("cpu"), facts, pool, DraftEngine(model, pool))


def _load_for_gpu(
    settings: DrafterSettings, draft_dir: Path, shared: SharedWeights, target: TargetContract
) -> LoadedDrafter:
    with _memory_for_weights(settings):
        draft = Draft.load(draft_dir, shared, target)
    return drafter_on_gpu(settings, draft, shared, target)


def drafter_on_gpu(
    settings: DrafterSettings, draft: Draft, shared: SharedWeights, target: TargetContract
) -> LoadedDrafter:
    """A drafter of weights that lie on the GPU. Captures the graphs that need no ring: some seconds. Raises
    ConfigError."""
    from services.drafter.device_engine import DeviceDraftEngine
    from services.drafter.model.kernel_dflash import KernelDFlash
    from services.drafter.ring_mapping import CudaMappingDevice, RingMapping

    contract, dtype = draft.contract, shared.embedding.dtype
    settings.check_capacity(contract.block_size)
    ring = largest_ring(settings, target, contract, dtype)
    pool = _open_pool(settings)
    positions_max = contract.context_len_max + contract.block_size
    problem = "must fit the GPU's memory beside the weights"
    with _memory_for("kv_tokens", problem, given=settings.kv_tokens):
        model = KernelDFlash(
            draft,
            shared,
            page_size=settings.page_size,
            num_rows_max=max(ring.num_rows * ring.block_size, ring.extend_rows_max),
            num_keys_max=positions_max,
            max_positions=positions_max,
        )
        engine = DeviceDraftEngine(
            model,
            num_pages=pool.num_pages,
            page_size=pool.page_size,
            num_lanes=settings.num_sessions_max,
            num_rows_max=ring.num_rows,
            extend_rows_max=ring.extend_rows_max,
            context_len_max=contract.context_len_max,
            on_captured=_log_captured,
        )
    log.info("device_memory", **{name.replace(" ", "_"): size for name, size in engine.memory})
    stream = engine.stream
    assert stream is not None
    mapping = RingMapping(CudaMappingDevice(stream), ring)
    facts = _facts(settings, target, contract, dtype, ring)
    return LoadedDrafter(stream.device, facts, pool, engine, RingWork(engine, mapping))


def prepare_engine_thread(device: torch.device, num_threads: int) -> None:
    """Let the calling thread do the tensor work: on this device, and on so many CPU threads (0: the library's
    choice)."""
    spread_tensor_work(num_threads)
    if device.type == "cuda":
        # Threads begin on the first GPU.
        torch.cuda.set_device(device)


def largest_ring(
    settings: DrafterSettings, target: TargetContract, contract: DraftContract, dtype: torch.dtype
) -> RingShape:
    """The largest hand-off ring that these settings allow: a batch row for each session."""
    return RingShape(
        num_rows=min(settings.num_sessions_max, limits.REQUESTS_RUNNING_MAX),
        block_size=contract.block_size,
        num_draft_tokens=contract.num_draft_tokens,
        captured_width=len(contract.captured_layer_ids) * target.hidden_size,
        dtype=dtype,
        extend_rows_max=settings.extend_rows_max,
    )


def _memory_for_weights(settings: DrafterSettings) -> contextlib.AbstractContextManager[None]:
    return _memory_for("device", "must have memory for the weights", given=settings.device)


@contextlib.contextmanager
def _memory_for(field: str, problem: str, *, given: object) -> Iterator[None]:
    """ConfigError when there is no memory for what is done inside."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(field, problem, given=given) from None


def _open_pool(settings: DrafterSettings) -> PagePool:
    return PagePool(settings.kv_tokens // settings.page_size, settings.page_size)


def _facts(
    settings: DrafterSettings, target: TargetContract, draft: DraftContract, dtype: torch.dtype,
    ring: RingShape | None = None,
) -> DrafterFacts:  # fmt: skip
    return DrafterFacts(
        instance_id=uuid.uuid4().hex,
        target=target,
        draft=draft,
        dtype=dtype,
        num_sessions_max=settings.num_sessions_max,
        lease_s=settings.lease_s,
        ring=ring,
    )


def _log_captured(done: int, total: int) -> None:
    if done == total:
        log.info("graphs_captured", total=total)
