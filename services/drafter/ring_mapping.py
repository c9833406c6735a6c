"""Maps the hand-off ring that a target offers, and drives the drafter's side of its flags.

One ring at a time. Must not know streams, sessions or the engine; what CUDA does is asked of a MappingDevice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from common import limits
from common.contract import Mismatch
from common.errors import InvalidRequest
from common.handoff.cuda_driver import DriverError, gpu_uuid
from common.handoff.descriptor_socket import DescriptorsRefused, close_all, fetch_descriptors
from common.handoff.device_memory import import_memory
from common.handoff.flags import FlagMemory, FlagPair, FlagsRefused
from common.handoff.ring import Ring, RingShape
from common.handoff.ring_offer import RingOffer
from common.log import get_log
from services.drafter.device_link import Mark, RingFlags

log = get_log("ring_mapping")

# Added to the last sequence that was waited for: past all that can still be put on the stream, and less than
# half of the 32 bits in which flags compare.
_FAR_AHEAD = 1 << 30


class RingRefused(Exception):
    """An offer cannot be taken up; the field says why."""

    def __init__(self, mismatch: Mismatch) -> None:
        super().__init__(str(mismatch))
        self.mismatch = mismatch


@dataclass(frozen=True)
class MappedRing:
    """What one connection uses of the ring: its tensors, and its two flags."""

    ring: Ring
    flags: RingFlags


class MappingDevice(Protocol):
    """What mapping needs of the device that the engine runs on."""

    @property
    def gpu_uuid(self) -> bytes: ...

    def import_memory(self, descriptor: int, num_bytes: int) -> torch.Tensor:
        """Another process's memory `[num_bytes]` uint8. Raises DriverError."""

    def register(self, flags: FlagMemory) -> None:
        """Let the device use the flags. Raises DriverError."""

    def flags(self, pair: FlagPair) -> RingFlags:
        """A connection's flags, as the engine's stream uses them."""


class RingMapping:
    """The ring that is mapped now, if any. On one thread at a time."""

    def __init__(self, on: MappingDevice, largest: RingShape) -> None:
        """largest: what the engine can work over. Rows may be fewer; all else must be equal."""
        self._on = on
        self._largest = largest
        self._ring_id = b""
        self._mapped: tuple[Ring, FlagMemory] | None = None

    def map(self, offer: RingOffer) -> MappedRing:
        """Map what is offered, or use what is mapped when it is the same piece of memory; graphs over it stay
        good then. The ring of before is let go. Waits for the socket at most HANDSHAKE_DEADLINE_S.

        Raises RingRefused; then the ring of before is mapped still.
        """
        self._check(offer)
        mapped = self._mapped
        if mapped is None or (self._ring_id, mapped[0].shape) != (offer.ring_id, offer.shape):
            mapped = self._fetch(offer)
            self._mapped, self._ring_id = mapped, offer.ring_id
            log.info("ring_mapped", num_bytes=offer.num_bytes, num_rows=offer.shape.num_rows)
        ring, flags = mapped
        return MappedRing(ring, self._on.flags(flags.pair(offer.flag_slot)))

    def unmap(self) -> None:
        """Let the ring go. The memory stays mapped as long as anything else has tensors over it."""
        self._mapped, self._ring_id = None, b""

    def _check(self, offer: RingOffer) -> None:
        if offer.gpu_uuid != self._on.gpu_uuid:
            raise RingRefused(Mismatch("gpu_uuid", self._on.gpu_uuid.hex(), offer.gpu_uuid.hex()))
        ours, theirs = self._largest, offer.shape
        for field in ("block_size", "num_draft_tokens", "captured_width", "dtype"):
            if getattr(ours, field) != getattr(theirs, field):
                raise RingRefused(
                    Mismatch("ring", f"{field} {getattr(ours, field)}", getattr(theirs, field))
                )  # fmt: skip
        for field in ("num_rows", "extend_rows_max"):
            if getattr(theirs, field) > getattr(ours, field):
                raise RingRefused(
                    Mismatch("ring", f"{field} at most {getattr(ours, field)}", getattr(theirs, field))
                )

    def _fetch(self, offer: RingOffer) -> tuple[Ring, FlagMemory]:
        try:
            descriptors = fetch_descriptors(
                offer.socket_path, offer.token, 2, limits.HANDSHAKE_DEADLINE_S
            )  # fmt: skip
        except DescriptorsRefused as error:
            log.warning("ring_not_fetched", reason=str(error))
            raise RingRefused(Mismatch("socket_path", "reachable", "no descriptor came")) from error
        try:
            flags = FlagMemory(descriptors[1])
            self._on.register(flags)
            return Ring.over(offer.shape, self._on.import_memory(descriptors[0], offer.num_bytes)), flags
        except (DriverError, FlagsRefused, InvalidRequest) as error:
            log.warning("ring_not_mapped", reason=str(error))
            raise RingRefused(Mismatch("ring", "memory of the offered size", "not to be mapped")) from error
        finally:
            close_all(descriptors)


class CudaMappingDevice:
    """A MappingDevice on the engine's GPU and stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._device = stream.device

    @property
    def gpu_uuid(self) -> bytes:
        return gpu_uuid(self._device)

    def import_memory(self, descriptor: int, num_bytes: int) -> torch.Tensor:
        """See MappingDevice.import_memory."""
        return import_memory(descriptor, num_bytes, self._device)

    def register(self, flags: FlagMemory) -> None:
        """See MappingDevice.register."""
        # Mapping runs on a thread of its own, which has no CUDA context before torch gives it one.
        torch.cuda.synchronize(self._device)
        flags.register()

    def flags(self, pair: FlagPair) -> RingFlags:
        """See MappingDevice.flags."""
        return StreamFlags(pair, self._stream)


class StreamFlags:
    """RingFlags of the engine's stream; see device_link.RingFlags."""

    def __init__(self, pair: FlagPair, stream: torch.cuda.Stream) -> None:
        self._pair = pair
        self._stream = stream
        self._awaited = 0

    def await_ready(self, sequence: int) -> Mark:
        """See RingFlags.await_ready."""
        self._awaited = sequence
        self._pair.ready.enqueue_wait(sequence, self._stream)
        return self._mark()

    def write_done(self, sequence: int) -> Mark:
        """See RingFlags.write_done."""
        self._pair.done.enqueue_write(sequence, self._stream)
        return self._mark()

    def release(self) -> None:
        """See RingFlags.release."""
        self._pair.ready.store(self._awaited + _FAR_AHEAD)

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event
