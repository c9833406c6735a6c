"""A connection on which nothing happens lives on, as long as its keepalive pings are far enough apart."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc

from common import rpc

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7


def _frame(kind: int, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, 0, 0, 0, 0, 0]) + content


@contextmanager
def _served(path: Path, interval_ms: int) -> Iterator[None]:
    """A server with the product's options, but for a shorter least interval between pings."""
    options = dict(rpc.SERVER_OPTIONS)
    options |= {name: interval_ms for name in options if "ping_interval" in name}
    server = grpc.server(ThreadPoolExecutor(1), options=list(options.items()))
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield
    finally:
        server.stop(None)


def _frames_after_pings(path: Path, num_pings: int, pause_s: float) -> set[int]:
    """Which kinds of frames the server sends to a client that has no call and only pings."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(PREFACE + _frame(SETTINGS))
        for _ in range(num_pings):
            time.sleep(pause_s)
            try:
                client.sendall(_frame(PING, bytes(8)))
            except BrokenPipeError:
                break  # what it sent before it hung up can still be read
        time.sleep(0.2)
        received = client.recv(1 << 16)
    kinds = set()
    while received:
        length = int.from_bytes(received[:3], "big")
        kinds.add(received[3])
        received = received[9 + length :]
    return kinds


def test_pings_at_the_permitted_pace_never_end_an_idle_connection(tmp_path: Path) -> None:
    """Regression: the option had a name that gRPC ignores, so that the default of 5 minutes held, and
    the target lost its idle drafter every two minutes."""
    path = tmp_path / "service"
    with _served(path, interval_ms=20):
        kinds = _frames_after_pings(path, num_pings=8, pause_s=0.05)
    assert PING in kinds
    assert GOAWAY not in kinds


def test_pings_without_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "service"
    with _served(path, interval_ms=60_000):
        kinds = _frames_after_pings(path, num_pings=8, pause_s=0.05)
    assert GOAWAY in kinds
