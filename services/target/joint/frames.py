"""Frames over a stream of bytes: 4 bytes of length, then a message. Knows no message.

Both ends are on one machine and from one start, so a frame that is wrong is a bug of ours; it costs the
connection, never memory.
"""

from __future__ import annotations

import struct

from common import limits
from common.errors import TandemError

_LENGTH = struct.Struct("<I")


class BrokenJoint(TandemError):
    """What came over the joint is no frame or no message."""


def framed(content: bytes) -> bytes:
    """The frame that holds `content`."""
    assert len(content) <= limits.JOINT_FRAME_BYTES_MAX, "whoever makes a message bounds it"
    return _LENGTH.pack(len(content)) + content


class FrameReader:
    """Cuts a stream of bytes into what its frames hold."""

    def __init__(self) -> None:
        self._unread = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Take in what came."""
        self._unread += chunk

    def take(self) -> bytes | None:
        """What the next frame holds; None until it is complete. Raises BrokenJoint for a length above the
        limit, as soon as that is known."""
        if len(self._unread) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._unread)
        if length > limits.JOINT_FRAME_BYTES_MAX:
            raise BrokenJoint(f"frame: limit is {limits.JOINT_FRAME_BYTES_MAX} bytes, have {length}")
        stop = _LENGTH.size + length
        if len(self._unread) < stop:
            return None
        content = bytes(self._unread[_LENGTH.size : stop])
        # From the front of a bytearray, this moves nothing.
        del self._unread[:stop]
        return content
