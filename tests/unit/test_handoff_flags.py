"""Flags in memory that two processes share: whose word is whose, and what memory is taken for them."""

from __future__ import annotations

import fcntl
import os

import pytest

from common.errors import InvalidRequest
from common.handoff.flags import FLAG_BYTES, FLAG_SLOTS, FlagMemory, FlagsRefused


def test_what_one_mapping_stores_the_other_loads() -> None:
    ours, descriptor = FlagMemory.create()
    theirs = FlagMemory(descriptor)
    os.close(descriptor)
    ours.pair(3).ready.store(7)
    theirs.pair(3).done.store(8)
    assert (theirs.pair(3).ready.load(), ours.pair(3).done.load()) == (7, 8)


def test_each_connection_has_words_of_its_own() -> None:
    memory, descriptor = FlagMemory.create()
    os.close(descriptor)
    flags = [flag for slot in range(FLAG_SLOTS) for flag in memory.pair(slot)]
    assert [flag.load() for flag in flags] == [0] * 128
    for i, flag in enumerate(flags):
        flag.store(i + 1)
    assert [flag.load() for flag in flags] == list(range(1, 129))


def test_a_sequence_wraps_at_32_bits() -> None:
    memory, descriptor = FlagMemory.create()
    os.close(descriptor)
    memory.pair(0).done.store((1 << 32) + 5)
    assert memory.pair(0).done.load() == 5


@pytest.mark.parametrize("slot", [-1, FLAG_SLOTS])
def test_a_slot_that_does_not_exist_has_no_flags(slot: int) -> None:
    memory, descriptor = FlagMemory.create()
    os.close(descriptor)
    with pytest.raises(InvalidRequest, match="flag_slot"):
        memory.pair(slot)


def test_its_size_can_be_changed_by_nobody() -> None:
    _, descriptor = FlagMemory.create()
    for size in (0, FLAG_BYTES // 2, 2 * FLAG_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


def _memory(size: int, seals: int) -> int:
    descriptor = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


ALL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    ("size", "seals"),
    [(FLAG_BYTES, 0), (FLAG_BYTES, fcntl.F_SEAL_GROW), (FLAG_BYTES - 1, ALL), (0, ALL), (1 << 20, ALL)],
)
def test_memory_that_can_shrink_or_is_of_another_size_is_refused(size: int, seals: int) -> None:
    descriptor = _memory(size, seals)
    with pytest.raises(FlagsRefused):
        FlagMemory(descriptor)
    os.close(descriptor)


def test_memory_that_nobody_may_write_is_refused() -> None:
    descriptor = _memory(FLAG_BYTES, ALL | fcntl.F_SEAL_WRITE)
    with pytest.raises(FlagsRefused, match="written"):
        FlagMemory(descriptor)
    os.close(descriptor)


def test_memory_that_was_opened_to_be_read_only_is_refused() -> None:
    descriptor = _memory(FLAG_BYTES, ALL)
    reader = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
    with pytest.raises(FlagsRefused, match="written"):
        FlagMemory(reader)
    os.close(reader)
    os.close(descriptor)


def test_what_is_no_memory_is_refused() -> None:
    reader, writer = os.pipe()
    with pytest.raises(FlagsRefused):
        FlagMemory(reader)
    os.close(reader)
    os.close(writer)
