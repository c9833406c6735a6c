"""The device that a service computes on: from the setting's text to a torch device that is really there."""

from __future__ import annotations

import torch

from common.errors import ConfigError


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
