"""GPU memory that another process can map, by a file descriptor.

Allocates, exports, imports and maps with the driver's virtual memory calls, and gives a torch tensor over
it. A descriptor can be guessed by nobody and works between containers that share no PID namespace, where
legacy IPC handles do not. Must not know what lies in the memory.

The memory stays mapped as long as any tensor over it lives: views, and graphs that keep them, need no
other owner. When that goes, its thread waits for the device's work; so first end what waits there for a peer.
A process that ends gives up its mapping, and the memory itself goes with the last one.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from common.handoff.cuda_driver import DriverError, checked, load_driver


class DeviceMemory:
    """Exportable memory of this process, zeroed. num_bytes is what was asked for, rounded up to whole
    pages of the driver; tensor is all of it `[num_bytes]` uint8."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises DriverError when the memory is not there."""
        driver, prop = load_driver(), _properties(device)
        granularity = checked(
            "cuMemGetAllocationGranularity",
            driver.cuMemGetAllocationGranularity(
                prop, driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            ),
        )
        self.num_bytes = -(-num_bytes // granularity) * granularity
        # The primary context, which torch makes.
        torch.cuda.synchronize(device)
        self._handle = checked("cuMemCreate", driver.cuMemCreate(self.num_bytes, prop, 0))
        # The mapping keeps the memory; this handle is kept to export it, and goes with this object.
        weakref.finalize(self, _release, self._handle).atexit = False
        self.tensor = _mapped_tensor(self._handle, self.num_bytes, device)
        self.tensor.zero_()
        torch.cuda.synchronize(device)

    def export(self) -> int:
        """A new file descriptor of the memory, which the caller closes."""
        driver = load_driver()
        descriptor = checked(
            "cuMemExportToShareableHandle",
            driver.cuMemExportToShareableHandle(self._handle, _posix(driver), 0),
        )
        os.set_inheritable(int(descriptor), False)
        return int(descriptor)


def import_memory(descriptor: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Map another process's memory: all of it `[num_bytes]` uint8. The descriptor stays the caller's.

    Raises DriverError when the descriptor is not of such memory, or of less of it.
    """
    driver = load_driver()
    torch.cuda.synchronize(device)
    handle = checked(
        "cuMemImportFromShareableHandle",
        driver.cuMemImportFromShareableHandle(descriptor, _posix(driver)),
    )
    try:
        return _mapped_tensor(handle, num_bytes, device)
    finally:
        checked("cuMemRelease", driver.cuMemRelease(handle))


class _Exposed:
    """Shows a mapping to torch, which keeps this object as long as any tensor over it lives."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


def _mapped_tensor(handle: Any, num_bytes: int, device: torch.device) -> torch.Tensor:
    driver = load_driver()
    address = checked("cuMemAddressReserve", driver.cuMemAddressReserve(num_bytes, 0, 0, 0))
    try:
        checked("cuMemMap", driver.cuMemMap(address, num_bytes, 0, handle, 0))
        try:
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = device.index
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            checked("cuMemSetAccess", driver.cuMemSetAccess(address, num_bytes, [access], 1))
        except DriverError:
            checked("cuMemUnmap", driver.cuMemUnmap(address, num_bytes))
            raise
    except DriverError:
        checked("cuMemAddressFree", driver.cuMemAddressFree(address, num_bytes))
        raise
    exposed = _Exposed(int(address), num_bytes)
    # Not at the process's end: other threads may still use it then, and the driver takes all back anyway.
    weakref.finalize(exposed, _unmap, address, num_bytes, device).atexit = False
    return torch.as_tensor(exposed, device=device)


def _unmap(address: Any, num_bytes: int, device: torch.device) -> None:
    """In the order that the driver wants: work over the memory ends, the mapping goes, the address goes."""
    driver = load_driver()
    torch.cuda.synchronize(device)
    checked("cuMemUnmap", driver.cuMemUnmap(address, num_bytes))
    checked("cuMemAddressFree", driver.cuMemAddressFree(address, num_bytes))


def _release(handle: Any) -> None:
    checked("cuMemRelease", load_driver().cuMemRelease(handle))


def _properties(device: torch.device) -> Any:
    """Memory on one GPU that can leave the process as a descriptor."""
    driver = load_driver()
    assert device.type == "cuda" and device.index is not None
    prop = driver.CUmemAllocationProp()
    prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    # CUDA's own numbering, which CUDA_VISIBLE_DEVICES changes for torch and driver alike.
    prop.location.id = device.index
    prop.requestedHandleTypes = _posix(driver)
    return prop


def _posix(driver: Any) -> Any:
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
