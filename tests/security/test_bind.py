"""Without TLS nothing listens where another machine could reach it."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.address import TcpAddress, UnixAddress, parse_address, parse_listen_address
from common.errors import ConfigError
from common.metrics import Metrics, serve_metrics
from common.rpc import RpcServer


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's must fit 107 bytes, which pytest's own folders may not."""
    with tempfile.TemporaryDirectory(prefix="td") as path:
        yield Path(path)


def make_server() -> RpcServer:
    return RpcServer([], lambda method, status, seconds: None)


@pytest.mark.parametrize(
    "text",
    ["0.0.0.0:50051", "[::]:50051", "192.168.1.7:50051", "10.0.0.1:1", "example.org:50051",
     "[::ffff:10.0.0.1]:50051", "0:50051", "localhost.example.org:1"],
)  # fmt: skip
def test_an_address_that_others_can_reach_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^listen: must be a loopback address"):
        parse_listen_address(text, "listen")


@pytest.mark.parametrize(
    "text",
    ["", "50051", ":50051", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:123456", "unix:",
     "unix:relative", "unix:/", "unix:/a/", "http://127.0.0.1:1", "127.0.0.1:1 ", "unix:/" + "x" * 107],
)  # fmt: skip
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^drafter: "):
        parse_address(text, "drafter")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", TcpAddress("127.0.0.1", 0)),
        ("127.8.8.8:65535", TcpAddress("127.8.8.8", 65535)),
        ("[::1]:50051", TcpAddress("::1", 50051)),
        ("localhost:1", TcpAddress("localhost", 1)),
        ("unix:/run/t.sock", UnixAddress("/run/t.sock")),
        ("unix:///run/t.sock", UnixAddress("/run/t.sock")),
    ],
)
def test_loopback_and_unix_sockets_are_allowed(text: str, address: object) -> None:
    assert parse_listen_address(text, "listen") == address


async def test_a_socket_is_open_to_owner_and_group_only(folder: Path) -> None:
    server = make_server()
    mask = os.umask(0)
    try:
        await server.start(UnixAddress(str(folder / "s")))
        assert stat.S_IMODE((folder / "s").stat().st_mode) == 0o660
        assert os.umask(0) == 0, "the process's own mask is back"
    finally:
        os.umask(mask)
        await server.stop(0)


async def test_a_port_in_use_is_refused_instead_of_shared() -> None:
    first, second = make_server(), make_server()
    bound = await first.start(TcpAddress("127.0.0.1", 0))
    try:
        with pytest.raises(ConfigError, match=r"^listen: "):
            await second.start(bound)
    finally:
        await first.stop(0)


async def test_the_socket_of_a_living_service_is_never_replaced(folder: Path) -> None:
    address = UnixAddress(str(folder / "s"))
    first = make_server()
    await first.start(address)
    try:
        with pytest.raises(ConfigError, match=r"^listen: is in use"):
            await make_server().start(address)
    finally:
        await first.stop(0)


async def test_the_socket_of_a_killed_service_is_replaced(folder: Path) -> None:
    left_behind = socket.socket(socket.AF_UNIX)
    left_behind.bind(str(folder / "s"))
    left_behind.close()
    server = make_server()
    await server.start(UnixAddress(str(folder / "s")))
    await server.stop(0)


async def test_a_file_is_never_replaced_by_a_socket(folder: Path) -> None:
    (folder / "s").write_text("precious")
    with pytest.raises(ConfigError, match=r"^listen: must not be an existing file"):
        await make_server().start(UnixAddress(str(folder / "s")))
    assert (folder / "s").read_text() == "precious"


async def test_a_missing_folder_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"^listen: must be in a folder that exists"):
        await make_server().start(UnixAddress(str(folder / "no" / "s")))


def test_a_taken_metrics_port_is_named() -> None:
    registry = Metrics("tandem_test", "m").registry
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^metrics_port: .*{port}"):
            serve_metrics(registry, "127.0.0.1", port)
