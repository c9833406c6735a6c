"""The offer of a hand-off ring, between protobuf and Python. Every number is bounded before it is used.

Knows the messages and the ring's shape; opens no socket and maps nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common import limits
from common.errors import InvalidRequest
from common.handoff.flags import FLAG_SLOTS
from common.handoff.ring import RingShape
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.wire import dtype_from_number, dtype_number

_ID_BYTES = 16


@dataclass(frozen=True)
class RingOffer:
    """Memory that a target owns and a drafter may map; see the message of this name."""

    socket_path: str
    token: bytes = field(repr=False)
    ring_id: bytes
    gpu_uuid: bytes
    num_bytes: int
    shape: RingShape
    flag_slot: int


def encode_ring_offer(offer: RingOffer) -> pb.RingOffer:
    """The message of an offer."""
    shape = offer.shape
    return pb.RingOffer(
        socket_path=offer.socket_path,
        token=offer.token,
        ring_id=offer.ring_id,
        gpu_uuid=offer.gpu_uuid,
        num_bytes=offer.num_bytes,
        num_rows=shape.num_rows,
        block_size=shape.block_size,
        num_draft_tokens=shape.num_draft_tokens,
        captured_width=shape.captured_width,
        dtype=dtype_number(shape.dtype),
        extend_rows_max=shape.extend_rows_max,
        flag_slot=offer.flag_slot,
    )


def decode_ring_offer(message: pb.RingOffer) -> RingOffer:
    """Check a message and read it. InvalidRequest names the field that cannot be."""
    path_bytes = len(message.socket_path.encode())
    if not message.socket_path.startswith("/") or "\0" in message.socket_path:
        raise InvalidRequest("socket_path", limit="an absolute path", given="another text")
    limits.check_range("socket_path bytes", path_bytes, 1, limits.SOCKET_PATH_BYTES_MAX)
    _check_length("token", message.token, limits.HANDOFF_TOKEN_BYTES)
    _check_length("ring_id", message.ring_id, _ID_BYTES)
    _check_length("gpu_uuid", message.gpu_uuid, _ID_BYTES)
    limits.check_range("flag_slot", message.flag_slot, 0, FLAG_SLOTS - 1)
    shape = RingShape(
        num_rows=message.num_rows,
        block_size=message.block_size,
        num_draft_tokens=message.num_draft_tokens,
        captured_width=message.captured_width,
        dtype=dtype_from_number("ring dtype", message.dtype),
        extend_rows_max=message.extend_rows_max,
    )
    # The allocator rounds up to whole pages, 2 MiB on a GPU of today.
    limits.check_range("num_bytes", message.num_bytes, shape.num_bytes, limits.RING_BYTES_MAX)
    return RingOffer(
        socket_path=message.socket_path,
        token=message.token,
        ring_id=message.ring_id,
        gpu_uuid=message.gpu_uuid,
        num_bytes=message.num_bytes,
        shape=shape,
        flag_slot=message.flag_slot,
    )


def _check_length(name: str, content: bytes, num_bytes: int) -> None:
    if len(content) != num_bytes:
        raise InvalidRequest(name, limit=f"{num_bytes} bytes", given=len(content))
