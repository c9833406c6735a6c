"""The hand-over by flags in GPU memory: one GPU stream waits for what another one writes, no host does.

`>=` is the driver's cyclic comparison of 32 bits, so a sequence may wrap. Knows no ring and no protocol.
"""

from __future__ import annotations

import threading

import torch

from common.handoff.cuda_driver import checked, load_driver

_WORD = 0xFFFF_FFFF


def wait_value(pointer: int, sequence: int, stream: torch.cuda.Stream) -> None:
    """Later work of the stream waits until the word at `pointer` >= sequence."""
    driver = load_driver()
    geq = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    checked(
        "cuStreamWaitValue32",
        driver.cuStreamWaitValue32(driver.CUstream(stream.cuda_stream), pointer, sequence & _WORD, geq),
    )


def write_value(pointer: int, sequence: int, stream: torch.cuda.Stream) -> None:
    """After the earlier work of the stream, and what it wrote, sequence is written to the word at
    `pointer`."""
    _write(load_driver().CUstream(stream.cuda_stream), pointer, sequence)


class SideStream:
    """A stream that writes words past whatever the process's other streams wait for. Any thread."""

    def __init__(self, device: torch.device) -> None:
        """Of the highest priority, since streams of other priorities use other hardware queues, where a
        waiting stream would hold it up; and not one of torch's, which hands the same ones out again."""
        driver = load_driver()
        self._device = device
        self._lock = threading.Lock()
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            _, highest = checked("cuCtxGetStreamPriorityRange", driver.cuCtxGetStreamPriorityRange())
            non_blocking = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._stream = checked(
                "cuStreamCreateWithPriority", driver.cuStreamCreateWithPriority(non_blocking, highest)
            )

    def write(self, pointer: int, sequence: int) -> None:
        """Write sequence to the word at `pointer`, soon; does not wait for it."""
        with self._lock, torch.cuda.device(self._device):
            _write(self._stream, pointer, sequence)

    def synchronize(self) -> None:
        """Wait until all that was written is there."""
        driver = load_driver()
        with torch.cuda.device(self._device):
            checked("cuStreamSynchronize", driver.cuStreamSynchronize(self._stream))


def _write(stream: object, pointer: int, sequence: int) -> None:
    driver = load_driver()
    default = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
    checked(
        "cuStreamWriteValue32",
        driver.cuStreamWriteValue32(stream, pointer, sequence & _WORD, default),
    )
