"""How this product speaks gRPC: options, a channel, a server with health, the addresses it takes.

Knows grpc; nothing of what the services do. There is no reflection and no debug service.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common import limits
from common.address import Address, TcpAddress, UnixAddress
from common.errors import ConfigError
from common.rpc_calls import ClientCalls, ObserveCall, ServerCalls

HEALTH_METHODS = ("/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")

_SIZES = (
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
)

SERVER_OPTIONS = (
    *_SIZES,
    # A second process on the same port must fail, not share it silently.
    ("grpc.so_reuseport", 0),
    # Gateways ping every 30 s, also while nothing runs; the default tolerates one ping in 5 minutes and
    # then ends long silent generations with GOAWAY. (The name differs from that of gRPC's own constant;
    # an option that gRPC does not know is ignored in silence.)
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Finds callers whose machine vanished, so that their requests end.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

CHANNEL_OPTIONS = (
    *_SIZES,
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # With the default back-off a peer that was away for 20 s was found 4 to 7 s late; so 0.04 to 0.4 s.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
    # This is how long one attempt to connect may take: a stopped peer accepts and then says nothing.
    ("grpc.min_reconnect_backoff_ms", 1_000),
    # Two channels to one address must not share a connection and its back-off.
    ("grpc.use_local_subchannel_pool", 1),
    # Loopback never goes through a proxy, whatever the environment says.
    ("grpc.enable_http_proxy", 0),
    # A repeated step would be answered twice; who calls decides what to repeat.
    ("grpc.enable_retries", 0),
)


def open_channel(address: Address, observe_call: ObserveCall | None = None) -> grpc.aio.Channel:
    """An asyncio channel to a service of ours. Connects when first used.

    observe_call is told of the end of each call that has one answer; a stream's length says nothing.
    """
    interceptors = [ClientCalls(observe_call)] if observe_call else []
    return grpc.aio.insecure_channel(str(address), options=CHANNEL_OPTIONS, interceptors=interceptors)


def method_names(service: Any) -> list[str]:
    """`/package.Service/Method` for each method of a service descriptor, for metrics."""
    return [f"/{service.full_name}/{method.name}" for method in service.methods]


class RpcServer:
    """A gRPC server with health. Servicers are registered on `server` before `start`.

    `service_names` are the full names that health answers for, beside the empty one of the process.
    All are NOT_SERVING until `set_serving(True)`. `observe_call` is told of each call's end.
    """

    def __init__(
        self, service_names: Sequence[str], observe_call: ObserveCall, *, share_port: bool = False
    ) -> None:
        """share_port: others that say so, too, may listen at the same host and port, and the kernel deals out
        connections. Without it a second process on a port fails."""
        self.server = grpc.aio.server(
            interceptors=[ServerCalls(observe_call)],
            options=[*(dict(SERVER_OPTIONS) | {"grpc.so_reuseport": int(share_port)}).items()],
            maximum_concurrent_rpcs=limits.RPCS_MAX,
        )
        self._names = ["", *service_names]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)

    async def start(self, address: Address) -> Address:
        """Listen and answer. Returns the address in use (a port 0 is replaced by the real one).

        Raises ConfigError when the address cannot be listened on.
        """
        await self.set_serving(False)
        bound = _bind(self.server, address)
        await self.server.start()
        return bound

    async def set_serving(self, serving: bool) -> None:
        """Tell health's callers and watchers."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s`, then cancel them."""
        await self.server.stop(grace_s)


def _bind(server: grpc.aio.Server, address: Address) -> Address:
    if isinstance(address, UnixAddress):
        _check_socket_free(address)
    # The socket is made inside the call with the rights that umask leaves: 0660, owner and group.
    before = os.umask(0o117) if isinstance(address, UnixAddress) else None
    try:
        port = server.add_insecure_port(str(address))
    except RuntimeError:
        raise ConfigError("listen", "cannot be listened on", given=str(address)) from None
    finally:
        if before is not None:
            os.umask(before)
    return TcpAddress(address.host, port) if isinstance(address, TcpAddress) else address


def check_port_free(address: TcpAddress) -> None:
    """Raise ConfigError when somebody listens there, be it one that would share the port."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        # Only those who listen count, not connections that have just ended.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError:
            raise ConfigError("listen", "cannot be listened on", given=str(address)) from None


def _check_socket_free(address: UnixAddress) -> None:
    """gRPC would replace whatever is at the path, also the socket of a service that lives."""
    path = Path(address.path)
    if not path.parent.is_dir():
        raise ConfigError("listen", "must be in a folder that exists", given=str(address))
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError("listen", "must not be an existing file", given=str(address))
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(address.path)
        except ConnectionRefusedError:
            return  # left behind by a service that was killed
        except OSError as error:
            raise ConfigError("listen", f"cannot be checked ({error.strerror})", given=str(address)) from None
    raise ConfigError("listen", "is in use by another process", given=str(address))
