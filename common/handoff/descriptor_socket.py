"""Hands file descriptors to one process of the same user, once, by a unix socket.

The socket lies in a directory that only its user may enter; whoever connects must run as that user and say
the one-time token, and gets the descriptors then; nobody else gets anything, not even an answer. Knows
nothing of what the descriptors are.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import struct
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from common import limits
from common.errors import TandemError
from common.log import get_log

log = get_log("descriptor_socket")

# struct ucred: pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")
_HERE_THEY_ARE = b"\x01"


class DescriptorsRefused(TandemError):
    """The descriptors could not be had. The text tells no path."""


class DescriptorSocket(NamedTuple):
    """Where the descriptors wait, and what must be said there."""

    path: str
    token: bytes


@contextlib.asynccontextmanager
async def giving_descriptors(descriptors: list[int], parent: Path) -> AsyncIterator[DescriptorSocket]:
    """Listen below the directory `parent` until the block ends. The descriptors stay the caller's.

    Raises OSError when nothing can be made there.
    """
    token = secrets.token_bytes(limits.HANDOFF_TOKEN_BYTES)
    with (
        tempfile.TemporaryDirectory(prefix="tandem-", dir=parent, ignore_cleanup_errors=True) as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        path = os.path.join(directory, "ring")
        listener.bind(path)
        listener.listen(limits.DESCRIPTOR_TRIES_MAX)
        listener.setblocking(False)
        giving = asyncio.create_task(_give_once(listener, token, descriptors))
        try:
            yield DescriptorSocket(path, token)
        finally:
            giving.cancel()
            await asyncio.gather(giving, return_exceptions=True)


def fetch_descriptors(path: str, token: bytes, count: int, deadline_s: float) -> list[int]:
    """Connect, say the token, and take `count` descriptors, which are the caller's then.

    Waits at most deadline_s in all. Raises DescriptorsRefused.
    """
    deadline = time.monotonic() + deadline_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            _allow_until(deadline, peer)
            peer.connect(path)
            # The token is told to nobody else than the user that this process runs as.
            if _peer_uid(peer) != os.geteuid():
                raise DescriptorsRefused("the socket belongs to another user")
            _allow_until(deadline, peer)
            peer.sendall(token)
            _allow_until(deadline, peer)
            said, descriptors, _, _ = socket.recv_fds(peer, len(_HERE_THEY_ARE), count)
        except OSError as error:
            raise DescriptorsRefused(f"the socket could not be used: {type(error).__name__}") from error
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if said != _HERE_THEY_ARE or len(descriptors) != count:
        close_all(descriptors)
        raise DescriptorsRefused("the socket gave no descriptors")
    return descriptors


def close_all(descriptors: list[int]) -> None:
    """Close every one."""
    for descriptor in descriptors:
        os.close(descriptor)


def _allow_until(deadline: float, peer: socket.socket) -> None:
    """Let the socket's next call wait for what is left. TimeoutError when that is nothing."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    peer.settimeout(left_s)


async def _give_once(listener: socket.socket, token: bytes, descriptors: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for _ in range(limits.DESCRIPTOR_TRIES_MAX):
        peer, _ = await loop.sock_accept(listener)
        with peer:
            if await _may_have_them(peer, token):
                try:
                    # A byte must travel with them, and one that fits the socket's buffer never blocks.
                    socket.send_fds(peer, [_HERE_THEY_ARE], descriptors)
                    return
                except OSError as error:
                    # Byte and descriptors go together or not at all: nobody has them, and the token is good.
                    log.warning("descriptors_not_given", problem=type(error).__name__)


async def _may_have_them(peer: socket.socket, token: bytes) -> bool:
    if _peer_uid(peer) != os.geteuid():
        return False
    loop, said = asyncio.get_running_loop(), b""
    try:
        async with asyncio.timeout(limits.DESCRIPTOR_PEER_DEADLINE_S):
            while len(said) < len(token):
                piece = await loop.sock_recv(peer, len(token) - len(said))
                if not piece:
                    return False
                said += piece
    except (TimeoutError, OSError):
        return False
    return hmac.compare_digest(said, token)


def _peer_uid(peer: socket.socket) -> int:
    """The user of the process at the other end, as the kernel knows it."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])
