"""The device hand-off's edges for a CPU: memory by memfd, flags as plain numbers."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import torch

from common.handoff.cuda_driver import DriverError
from common.handoff.flags import FlagMemory, FlagPair

GPU_UUID = bytes(range(16))


class MemfdMemory:
    """ExportableMemory that another process, or another mapping, really shares."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._descriptor = os.memfd_create("ring")
        os.ftruncate(self._descriptor, self.num_bytes)
        self.tensor = map_memfd(self._descriptor, self.num_bytes)

    def __del__(self) -> None:
        os.close(self._descriptor)

    def export(self) -> int:
        return os.dup(self._descriptor)


def map_memfd(descriptor: int, num_bytes: int) -> torch.Tensor:
    """The bytes of a memfd; DriverError when it is shorter, as a GPU's driver says."""
    if os.fstat(descriptor).st_size < num_bytes:
        raise DriverError("cuMemMap", "CUDA_ERROR_INVALID_VALUE")
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


class FakeRingFlags:
    """RingFlags of a device whose stream is a list; the test says how far it has come."""

    def __init__(self) -> None:
        self.enqueued: list[tuple[str, int]] = []
        self.released: list[int] = []
        self.has_come_to = 0
        self.has_passed = 0
        self.is_stuck = False

    def write_ready(self, sequence: int) -> Callable[[], bool]:
        self.enqueued.append(("ready", sequence))
        return lambda: self.has_come_to >= sequence

    def await_done(self, sequence: int) -> Callable[[], bool]:
        self.enqueued.append(("await", sequence))
        return lambda: self.has_passed >= sequence

    def release(self, sequence: int) -> None:
        """The stream goes on, unless the test says that something keeps it."""
        self.released.append(sequence)
        if not self.is_stuck:
            self.has_passed = sequence


class FakeRingDevice:
    """A RingDevice: memory by memfd, flags that are remembered."""

    device = torch.device("cpu")
    gpu_uuid = GPU_UUID

    def __init__(self) -> None:
        self.allocated: list[MemfdMemory] = []
        self.num_registered = 0
        self.fails_with: Exception | None = None

    def allocate(self, num_bytes: int) -> MemfdMemory:
        if self.fails_with is not None:
            raise self.fails_with
        self.allocated.append(MemfdMemory(num_bytes))
        return self.allocated[-1]

    def register(self, flags: FlagMemory) -> None:
        self.num_registered += 1

    def flags(self, pair: FlagPair) -> FakeRingFlags:
        return FakeRingFlags()
