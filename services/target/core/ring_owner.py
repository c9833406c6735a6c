"""The target's hand-off ring: allocated when a draft's shape is known, offered to whoever connects.

One piece of memory serves all connections of the same shape, each with flags of its own. Knows no grpc and
no sessions. Used by the link's thread; `ring_for` also by the core's.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from common.contract import DraftContract, TargetContract
from common.device import is_out_of_memory
from common.errors import InvalidRequest
from common.handoff.cuda_driver import DriverError, gpu_uuid
from common.handoff.descriptor_socket import giving_descriptors
from common.handoff.device_memory import DeviceMemory
from common.handoff.flags import FLAG_SLOTS, FlagMemory, FlagPair
from common.handoff.ring import Ring, RingShape
from common.handoff.ring_offer import RingOffer
from common.log import get_log
from common.wire import dtype_from_name
from services.target.core.draft_fit import too_wide
from services.target.core.ring_flags import RingFlags, StreamFlags

log = get_log("ring_owner")


class RingUnavailable(Exception):
    """No ring can be offered; `reason` is a label of handoff_fallbacks_total."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ExportableMemory(Protocol):
    """See common.handoff.device_memory.DeviceMemory."""

    num_bytes: int
    tensor: torch.Tensor

    def export(self) -> int: ...


@dataclass(frozen=True)
class OfferedRing:
    """What one connection uses of the ring."""

    ring: Ring
    flags: RingFlags


@dataclass(frozen=True)
class Offering:
    """An offer to send, and what the connection uses if it is taken."""

    offer: RingOffer
    offered: OfferedRing


class RingDevice(Protocol):
    """What the owner needs of a device."""

    device: torch.device

    @property
    def gpu_uuid(self) -> bytes: ...

    def allocate(self, num_bytes: int) -> ExportableMemory:
        """Zeroed memory. Raises RingUnavailable."""

    def register(self, flags: FlagMemory) -> None:
        """Let the device use the flags. Raises RingUnavailable."""

    def flags(self, pair: FlagPair) -> RingFlags:
        """A connection's flags, as the device's current stream uses them."""


class CudaRingDevice:
    """A RingDevice on a GPU; makes no driver call before the first ring."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def gpu_uuid(self) -> bytes:
        return gpu_uuid(self.device)

    def allocate(self, num_bytes: int) -> ExportableMemory:
        """See RingDevice.allocate."""
        try:
            return DeviceMemory(num_bytes, self.device)
        except DriverError as error:
            log.warning("ring_unavailable", num_bytes=num_bytes, problem=str(error))
            raise RingUnavailable("no_memory" if "OUT_OF_MEMORY" in str(error) else "unsupported") from error

    def register(self, flags: FlagMemory) -> None:
        """See RingDevice.register."""
        try:
            flags.register()
        except DriverError as error:
            log.warning("flags_unavailable", problem=str(error))
            raise RingUnavailable("unsupported") from error

    def flags(self, pair: FlagPair) -> RingFlags:
        """See RingDevice.flags."""
        return StreamFlags(pair, self.device)


@dataclass(frozen=True)
class _Owned:
    """A ring, its flags, and the descriptor of those."""

    memory: ExportableMemory
    ring: Ring
    ring_id: bytes
    flags: FlagMemory
    flags_descriptor: int


class RingOwner:
    """Makes rings and offers of them."""

    def __init__(
        self,
        on: RingDevice,
        target: TargetContract,
        *,
        num_rows: int,
        extend_rows_max: int,
        socket_parent: Path,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """num_rows, extend_rows_max: of a step at most. socket_parent: a directory that the drafter sees,
        too, under the same path."""
        self._on = on
        self._target = target
        self._num_rows = num_rows
        self._extend_rows_max = extend_rows_max
        self._socket_parent = socket_parent
        self._random_bytes = random_bytes
        self._lock = threading.Lock()
        self._owned: _Owned | None = None
        self._local: Ring | None = None
        self._num_connections = 0

    def ring_for(self, draft: DraftContract) -> Ring:
        """Where the target captures for this draft when nobody maps it: the ring that was offered, if it
        fits, so that graphs over it stay good; or one of this process alone. Raises DraftDoesNotFit."""
        try:
            shape = self._shape(draft)
        except InvalidRequest as error:
            raise too_wide(draft, f"a ring within limits ({error})") from error
        with self._lock:
            if self._owned is not None and self._owned.ring.shape == shape:
                return self._owned.ring
            if self._local is None or self._local.shape != shape:
                self._local = None
                try:
                    self._local = Ring.local(shape, self._on.device)
                except RuntimeError as error:
                    if not is_out_of_memory(error):
                        raise
                    ours = f"a ring that fits, not of {shape.num_bytes >> 20} MiB"
                    raise too_wide(draft, ours) from None
            return self._local

    @contextlib.asynccontextmanager
    async def offering(self, draft: DraftContract) -> AsyncIterator[Offering]:
        """An offer that can be taken up until the block ends. Raises RingUnavailable."""
        try:
            shape = self._shape(draft)
        except InvalidRequest as error:
            log.warning("ring_unavailable", problem=str(error))
            raise RingUnavailable("no_memory") from error
        owned = self._own(shape)
        slot = self._num_connections % FLAG_SLOTS
        self._num_connections += 1
        pair = owned.flags.pair(slot)
        # The last connection that had this pair may have left any value there.
        pair.ready.store(0)
        pair.done.store(0)
        try:
            descriptor = owned.memory.export()
        except DriverError as error:
            log.warning("ring_not_exported", problem=str(error))
            raise RingUnavailable("unsupported") from error
        try:
            async with contextlib.AsyncExitStack() as stack:
                try:
                    descriptors = [descriptor, owned.flags_descriptor]
                    giving = giving_descriptors(descriptors, self._socket_parent)
                    path, token = await stack.enter_async_context(giving)
                except OSError as error:
                    log.warning("ring_socket_unavailable", problem=type(error).__name__)
                    raise RingUnavailable("no_socket") from error
                offer = RingOffer(
                    socket_path=path,
                    token=token,
                    ring_id=owned.ring_id,
                    gpu_uuid=self._on.gpu_uuid,
                    num_bytes=owned.memory.num_bytes,
                    shape=owned.ring.shape,
                    flag_slot=slot,
                )
                yield Offering(offer, OfferedRing(owned.ring, self._on.flags(pair)))
        finally:
            os.close(descriptor)

    def _own(self, shape: RingShape) -> _Owned:
        """The ring of this shape. One of another shape goes when nothing uses it any more."""
        with self._lock:
            if self._owned is None or self._owned.ring.shape != shape:
                memory = self._on.allocate(shape.num_bytes)
                try:
                    flags, descriptor = FlagMemory.create()
                except OSError as error:
                    log.warning("flags_unavailable", problem=error.strerror)
                    raise RingUnavailable("unsupported") from error
                weakref.finalize(flags, os.close, descriptor)
                self._on.register(flags)
                ring = Ring.over(shape, memory.tensor)
                self._owned = _Owned(memory, ring, self._random_bytes(16), flags, descriptor)
                self._local = None
                log.info("ring_allocated", num_bytes=memory.num_bytes, num_rows=shape.num_rows)
            return self._owned

    def _shape(self, draft: DraftContract) -> RingShape:
        return RingShape(
            num_rows=self._num_rows,
            block_size=draft.block_size,
            num_draft_tokens=draft.num_draft_tokens,
            captured_width=len(draft.captured_layer_ids) * self._target.hidden_size,
            dtype=dtype_from_name(self._target.dtype),
            extend_rows_max=self._extend_rows_max,
        )
