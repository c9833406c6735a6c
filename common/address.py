"""Addresses of the services: a unix socket or a host and port. No grpc, no torch.

What may be listened on is narrower than what may be called: without TLS a service is reachable from
its own machine only.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from common.errors import ConfigError

# sockaddr_un holds 108 bytes with the closing zero.
UNIX_PATH_BYTES_MAX = 107

_HOST_PORT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})")
_FORM = "must be unix:/absolute/path or host:port"


@dataclass(frozen=True)
class UnixAddress:
    """A unix socket at an absolute path."""

    path: str

    def __str__(self) -> str:
        """The form that both gRPC and a person at a shell write."""
        return f"unix:{self.path}"


@dataclass(frozen=True)
class TcpAddress:
    """A host (name, IPv4, or IPv6 without brackets) and a port; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        """host:port, with brackets round an IPv6 host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


Address = UnixAddress | TcpAddress


def parse_address(text: str, field: str) -> Address:
    """The address of a peer. Raises ConfigError naming `field`."""
    if text.startswith("unix:"):
        return _parse_unix(text, field)
    match = _HOST_PORT.fullmatch(text)
    if match is None:
        raise ConfigError(field, _FORM, given=text)
    port = int(match["port"])
    if port > 65535:
        raise ConfigError(field, "port must be at most 65535", given=text)
    return TcpAddress(match["host"].strip("[]"), port)


def parse_listen_address(text: str, field: str) -> Address:
    """An address to listen on: a unix socket or loopback. Raises ConfigError naming `field`."""
    address = parse_address(text, field)
    if isinstance(address, TcpAddress):
        check_loopback(address.host, field)
    return address


def check_loopback(host: str, field: str) -> None:
    """Raise ConfigError unless `host` can be reached from this machine only.

    A name is refused, except localhost: what it resolves to may change after the check.
    """
    if host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(field, "must be a loopback address (there is no TLS) or a unix socket", given=host)


def _parse_unix(text: str, field: str) -> UnixAddress:
    path = text.removeprefix("unix:")
    # unix:///path is the same address in URI form; gRPC accepts both.
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ConfigError(field, _FORM, given=text)
    if len(path.encode()) > UNIX_PATH_BYTES_MAX:
        raise ConfigError(field, f"socket path must have at most {UNIX_PATH_BYTES_MAX} bytes", given=text)
    return UnixAddress(path)
