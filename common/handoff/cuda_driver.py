"""The CUDA driver's calls, as the hand-off makes them: loaded when first needed, errors raised.

Knows no ring and no protocol. A host without CUDA can import this module; what needs the driver raises
DriverError there.
"""

from __future__ import annotations

import uuid
from typing import Any

import torch


class DriverError(Exception):
    """The driver refused, or is not there. Names the call, never an address.

    No TandemError: where nobody expects it, it is a CUDA error like torch's, and ends the service."""

    def __init__(self, call: str, problem: str) -> None:
        super().__init__(f"{call}: {problem}")


def load_driver() -> Any:
    """The module cuda.bindings.driver. It is imported here since a CPU host has no use for it, and an
    installation without the extra `cuda` does not have it."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError("cuda.bindings", "not installed; it comes with the extra `cuda`") from error
    return driver


def checked(call: str, result: tuple[Any, ...]) -> Any:
    """What a driver call returned without its status: None, the value, or a tuple of values."""
    status, *values = result
    if int(status) != 0:
        raise DriverError(call, getattr(status, "name", str(int(status))))
    return values[0] if len(values) == 1 else tuple(values) or None


def gpu_uuid(device: torch.device) -> bytes:
    """The 16 bytes that name a GPU in every process of the host."""
    return uuid.UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes
