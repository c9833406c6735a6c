"""What callers reach, as the service sees it; and the simpler of its two kinds, a front in this process.

The other is services.target.fronts. Knows gRPC's server and the core; nothing of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from common.address import Address
from common.metrics import CommonMetrics
from common.pb.tandem.v1 import target_pb2_grpc
from common.rpc import RpcServer
from services.target.core.core import Core
from services.target.front.servicer import SERVICE, TargetServicer

Supervise = Callable[[str, Coroutine[Any, Any, None]], None]
"""common.lifecycle.Lifecycle.supervise"""


class Edge(Protocol):
    """Serves callers with what a core does."""

    async def start(self, core: Core, supervise: Supervise) -> Address:
        """Listen, and serve once health says so; the address in use. Raises ConfigError."""

    def announce(self) -> None:
        """The core has emitted a step's events. On its thread; never waits."""

    def observe_event_loop_lag(self, seconds: float) -> None:
        """The lag of this process's event loop, for the metric that it is part of."""

    async def set_serving(self, serving: bool) -> None:
        """Tell health."""

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones end for so long, then cancel them."""


class InProcessFront:
    """A front on this process's event loop: its streams share an interpreter with the step loop."""

    def __init__(
        self, listen: Address, make_servicer: Callable[[Core], TargetServicer], calls: CommonMetrics
    ) -> None:
        self._listen = listen
        self._make_servicer = make_servicer
        self._calls = calls
        self._rpc = RpcServer([SERVICE.full_name], calls.observe_server_call)

    async def start(self, core: Core, supervise: Supervise) -> Address:
        """See Edge. Nothing of it needs to be supervised."""
        target_pb2_grpc.add_TargetServiceServicer_to_server(self._make_servicer(core), self._rpc.server)
        return await self._rpc.start(self._listen)

    def announce(self) -> None:
        """Each stream was woken by its event."""

    def observe_event_loop_lag(self, seconds: float) -> None:
        """See Edge."""
        self._calls.observe_event_loop_lag(seconds)

    async def set_serving(self, serving: bool) -> None:
        """See Edge."""
        await self._rpc.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """See Edge."""
        await self._rpc.stop(grace_s)
