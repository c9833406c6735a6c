"""The offer of a hand-off ring, between protobuf and Python. Every number is bounded before it is used.

Knows the messages and the ring's shape; opens no socket and maps nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from common import limits
from common.errors import InvalidRequest
from common.handoff.ring import ALIGNMENT_BYTES, FLAG_SLOTS, RingShape
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.wire import dtype_from_number, dtype_number

_ID_BYTES = 16


@dataclass(frozen=True)
class SharedTensor:
    """A tensor inside shared memory: `offset` bytes from its start."""

    name: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SharedWeights:
    """Weights of the target in a second piece of memory, which the drafter may read."""

    num_bytes: int
    tensors: tuple[SharedTensor, ...]


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
    shared: SharedWeights | None = None


def encode_ring_offer(offer: RingOffer) -> pb.RingOffer:
    """The message of an offer."""
    shape = offer.shape
    message = pb.RingOffer(
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
    if offer.shared is not None:
        message.shared.num_bytes = offer.shared.num_bytes
        for tensor in offer.shared.tensors:
            message.shared.tensors.add(
                name=tensor.name, offset=tensor.offset, dtype=dtype_number(tensor.dtype), shape=tensor.shape
            )
    return message


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
        shared=_decode_shared(message.shared) if message.HasField("shared") else None,
    )


def _decode_shared(message: pb.SharedWeights) -> SharedWeights:
    limits.check_range("shared num_bytes", message.num_bytes, 1, limits.SHARED_WEIGHTS_BYTES_MAX)
    limits.check_range("shared tensors", len(message.tensors), 1, limits.SHARED_TENSORS_MAX)
    tensors = tuple(_decode_shared_tensor(tensor, message.num_bytes) for tensor in message.tensors)
    if len({tensor.name for tensor in tensors}) < len(tensors):
        raise InvalidRequest("shared tensors", limit="one of each name", given="more")
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise InvalidRequest("shared tensors", limit="without overlap", given="overlapping ones")
        end = tensor.offset + tensor.num_bytes
    return SharedWeights(message.num_bytes, tensors)


def _decode_shared_tensor(message: pb.SharedTensor, num_bytes: int) -> SharedTensor:
    limits.check_range(
        "shared tensor name characters", len(message.name), 1, limits.SHARED_TENSOR_NAME_CHARS_MAX
    )
    limits.check_range("shared tensor rank", len(message.shape), 1, limits.TENSOR_RANK_MAX)
    for size in message.shape:
        limits.check_range("shared tensor dimension", size, 1, limits.TENSOR_DIM_MAX)
    dtype = dtype_from_number("shared tensor dtype", message.dtype)
    tensor = SharedTensor(message.name, message.offset, dtype, tuple(message.shape))
    limits.check_range("shared tensor bytes", tensor.num_bytes, 1, num_bytes)
    limits.check_range("shared tensor offset", tensor.offset, 0, num_bytes - tensor.num_bytes)
    if tensor.offset % ALIGNMENT_BYTES:
        raise InvalidRequest(
            "shared tensor offset", limit=f"a multiple of {ALIGNMENT_BYTES}", given=tensor.offset
        )
    return tensor


def _check_length(name: str, content: bytes, num_bytes: int) -> None:
    if len(content) != num_bytes:
        raise InvalidRequest(name, limit=f"{num_bytes} bytes", given=len(content))
