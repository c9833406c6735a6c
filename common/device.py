"""The device that a service computes on: from the setting's text to a torch device that is really there."""

from __future__ import annotations

import re

import torch

from common.errors import ConfigError

# As torch and Triton say it; as the driver names it.
_NO_MEMORY = re.compile("out of memory|CUDA_ERROR_OUT_OF_MEMORY")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU, or the host for pinned memory, had no memory left: torch, the driver under a capture
    and Triton's loader say so in different types. The device is as good as before."""
    if isinstance(error, torch.OutOfMemoryError) or _NO_MEMORY.search(str(error)):
        return True
    # A capture that is broken off tells of its own end first.
    return error.__context__ is not None and is_out_of_memory(error.__context__)


def find_device(text: str, dtype: torch.dtype) -> torch.device:
    """`cpu`, `cuda` (the first one) or `cuda:N`, made the current device of the calling thread.

    Raises ConfigError when this host has no such device, or when the kernels do not serve dtype on it.
    """
    device = torch.device(text)
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.index or 0
    if index >= count:
        raise ConfigError("device", f"must be on this host, which has {count} CUDA devices", given=text)
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError("dtype", "must be bfloat16 on a CUDA device", given=name)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
