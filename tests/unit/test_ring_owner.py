"""The ring that the target captures into while nobody maps it: which one, and where there is no memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from common.contract import DraftContract, TargetContract
from common.device import is_out_of_memory
from common.handoff.cuda_driver import DriverError
from common.handoff.ring import Ring
from services.target.core.draft_fit import DraftDoesNotFit
from services.target.core.ring_owner import RingOwner, RingUnavailable

TARGET = TargetContract(
    hidden_size=1 << 13, num_layers=40, vocab_rows=100, dtype="bfloat16", weights_fingerprint="w"
)
DRAFT = DraftContract((1, 3), 4, 3, 99, 4096, "d")
# Within all of a contract's bounds, and a ring of 17 GB.
HOSTILE = replace(DRAFT, captured_layer_ids=tuple(range(32)), block_size=64, num_draft_tokens=63)


class NoMemory:
    """A RingDevice."""

    device = torch.device("cpu")
    gpu_uuid = bytes(16)

    def allocate(self, num_bytes: int) -> Any:
        raise RingUnavailable("no_memory")


def owner() -> RingOwner:
    return RingOwner(NoMemory(), TARGET, num_rows=256, extend_rows_max=64, socket_parent=Path("/none"))  # type: ignore[arg-type]


def test_a_ring_of_this_process_is_made_once_for_a_shape() -> None:
    rings = owner()
    ring = rings.ring_for(DRAFT)
    assert rings.ring_for(replace(DRAFT, weights_fingerprint="e")) is ring


def test_a_ring_beyond_all_limits_is_the_drafts_fault() -> None:
    with pytest.raises(DraftDoesNotFit, match="^block_size: ours a ring within limits .*64, of 32 layers"):
        owner().ring_for(HOSTILE)


def test_a_ring_beyond_all_limits_is_not_offered() -> None:
    async def offer() -> None:
        async with owner().offering(HOSTILE):
            pytest.fail("it was offered")

    with pytest.raises(RingUnavailable, match="no_memory"):
        asyncio.run(offer())


def test_a_ring_that_finds_no_memory_is_the_drafts_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Ring, "local", fail)
    with pytest.raises(DraftDoesNotFit, match="^block_size: ours a ring that fits, not of"):
        owner().ring_for(DRAFT)


def test_lack_of_memory_is_told_from_other_errors_also_behind_the_end_of_a_capture() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("Triton Error [CUDA]: out of memory"))
    assert is_out_of_memory(DriverError("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    try:
        try:
            raise torch.OutOfMemoryError("x")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")
    except RuntimeError as error:
        assert is_out_of_memory(error)
