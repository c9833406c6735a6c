"""The hand-over by flags: one GPU stream waits for a word that another one writes, and no host does.

The words lie in host memory that both processes map and both have registered with CUDA. So whoever gives up
on its peer lets its own stream go on by a plain store. A write from another stream would not do: it may share
the hardware queue of the stream that waits, and then never runs. `>=` is the driver's cyclic comparison
of 32 bits, so a sequence may wrap. Knows no ring and no protocol.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from typing import NamedTuple

import numpy as np
import torch

from common import limits
from common.errors import TandemError
from common.handoff.cuda_driver import checked, load_driver

# Connections that have flags of their own before the first pair is used again: whoever was given up may
# still write the flags of its own connection, and must not be taken for its successor.
FLAG_SLOTS = 64
# Words on lines of their own, so that polling one disturbs no other.
_LINE_BYTES = 256
_LINE_WORDS = _LINE_BYTES // 4
FLAG_BYTES = FLAG_SLOTS * 2 * _LINE_BYTES
_WORD = 0xFFFF_FFFF
# Of a size that nobody can change: a page that is cut off under a mapping kills whoever touches it.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class FlagsRefused(TandemError):
    """A descriptor is not of such memory."""


class FlagMemory:
    """All flags that a target has, mapped in this process; zero at first."""

    def __init__(self, descriptor: int) -> None:
        """Map another process's. The descriptor stays the caller's. Raises FlagsRefused."""
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            size = os.fstat(descriptor).st_size
        except OSError as error:
            raise FlagsRefused("not memory that can be sealed") from error
        if seals & _SEALS != _SEALS or size != FLAG_BYTES:
            raise FlagsRefused(f"must be sealed and of {FLAG_BYTES} bytes, got {size}")
        try:
            mapped = mmap.mmap(descriptor, FLAG_BYTES)
        except OSError as error:
            raise FlagsRefused("not memory that can be written") from error
        self._words = np.frombuffer(mapped, dtype=np.uint32)
        self._device_address: int | None = None

    @classmethod
    def create(cls) -> tuple[FlagMemory, int]:
        """New memory, and its descriptor, which is the caller's."""
        descriptor = os.memfd_create("tandem-flags", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, FLAG_BYTES)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return cls(descriptor), descriptor

    def register(self) -> FlagMemory:
        """Let the GPUs of this process use the words. Raises DriverError."""
        driver, address = load_driver(), self._words.ctypes.data
        flags = int(driver.CU_MEMHOSTREGISTER_PORTABLE) | int(driver.CU_MEMHOSTREGISTER_DEVICEMAP)
        checked("cuMemHostRegister", driver.cuMemHostRegister(address, FLAG_BYTES, flags))
        # Not at the process's end, where the driver takes all back anyway.
        weakref.finalize(self, driver.cuMemHostUnregister, address).atexit = False
        self._device_address = int(
            checked("cuMemHostGetDevicePointer", driver.cuMemHostGetDevicePointer(address, 0))
        )
        return self

    def pair(self, slot: int) -> FlagPair:
        """The flags of the connection that was given this slot."""
        limits.check_range("flag_slot", slot, 0, FLAG_SLOTS - 1)
        return FlagPair(Flag(self, 2 * slot), Flag(self, 2 * slot + 1))

    def store(self, line: int, sequence: int) -> None:
        """Write a word from the host, at once."""
        self._words[line * _LINE_WORDS] = sequence & _WORD

    def load(self, line: int) -> int:
        """Read a word."""
        return int(self._words[line * _LINE_WORDS])

    def device_pointer(self, line: int) -> int:
        """Where the GPU finds a word."""
        assert self._device_address is not None, "registered before a GPU uses it"
        return self._device_address + line * _LINE_BYTES


class Flag(NamedTuple):
    """One word."""

    memory: FlagMemory
    line: int

    def store(self, sequence: int) -> None:
        """Write it from the host, at once. From any thread."""
        self.memory.store(self.line, sequence)

    def load(self) -> int:
        """Its low 32 bits."""
        return self.memory.load(self.line)

    def enqueue_wait(self, sequence: int, stream: torch.cuda.Stream) -> None:
        """Later work of the stream waits until the word is >= sequence."""
        driver = load_driver()
        geq = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        handle, pointer = driver.CUstream(stream.cuda_stream), self.memory.device_pointer(self.line)
        checked("cuStreamWaitValue32", driver.cuStreamWaitValue32(handle, pointer, sequence & _WORD, geq))

    def enqueue_write(self, sequence: int, stream: torch.cuda.Stream) -> None:
        """After the earlier work of the stream, and what it wrote, the word becomes sequence."""
        driver = load_driver()
        default = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
        handle, pointer = driver.CUstream(stream.cuda_stream), self.memory.device_pointer(self.line)
        checked(
            "cuStreamWriteValue32", driver.cuStreamWriteValue32(handle, pointer, sequence & _WORD, default)
        )


class FlagPair(NamedTuple):
    """A connection's two flags."""

    ready: Flag
    """Written by the target's stream: the states of this sequence are in the ring."""
    done: Flag
    """Written by the drafter's stream: its drafts are."""
