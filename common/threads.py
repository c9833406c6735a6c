"""Which thread of a process does the tensor work: one, and with all the CPU threads it is given.

libgomp keeps a pool for each thread that ever ran a parallel region. Once all pools together hold more
threads than there are CPUs, it sends waiting threads to sleep instead of letting them spin, and each
region costs 60 µs more: 70 ms a step of SmolLM2 on two cores instead of 45. So whatever runs before the
thread that serves, such as loading, must run on one CPU thread.
"""

from __future__ import annotations

import torch

# Read before anything below changes it: the CPUs, or OMP_NUM_THREADS.
_LIBRARY_CHOICE = torch.get_num_threads()


def confine_tensor_work() -> None:
    """Let the calling thread work on one CPU thread."""
    torch.set_num_threads(1)


def spread_tensor_work(num_threads: int) -> None:
    """Let the calling thread, the only one that ever asks, work on so many CPU threads; 0 leaves the
    number to the library."""
    torch.set_num_threads(num_threads or _LIBRARY_CHOICE)
