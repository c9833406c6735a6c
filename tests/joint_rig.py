"""Both ends of the joint on the test's event loop: a core's socket, a front's client, real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from common.pb.tandem.v1 import core_pb2
from services.target.core.core_socket import FrontSocket
from services.target.core.front_outbox import FrontOutbox
from services.target.core.report import CoreStats
from services.target.facts import DrafterFacts
from services.target.front.core_client import CoreClient
from tests.fakes import ScriptedCore


@dataclass
class RecordedFront:
    """A FrontObserver that remembers."""

    reports: list[core_pb2.FrontReport] = field(default_factory=list)
    num_slow: int = 0

    def observe_report(self, report: core_pb2.FrontReport) -> None:
        self.reports.append(report)

    def observe_slow_front(self) -> None:
        self.num_slow += 1


@dataclass
class Joint:
    """The two ends, and the task that reads the core's."""

    core_end: FrontSocket
    front_end: CoreClient
    heard: RecordedFront
    running: asyncio.Task[None]


@asynccontextmanager
async def joined(
    core: ScriptedCore, facts: Callable[[], tuple[CoreStats, DrafterFacts]], outbox: FrontOutbox | None = None
) -> AsyncIterator[Joint]:
    """A joint to that core, which announces over it."""
    ours, theirs = socket.socketpair()
    heard = RecordedFront()
    core_end = FrontSocket(ours, core, facts, heard, outbox)
    _, front_end = await asyncio.get_running_loop().create_connection(CoreClient, sock=theirs)
    joint = Joint(core_end, front_end, heard, asyncio.ensure_future(core_end.run()))
    core.announce = core_end.announce
    core_end.welcome(core_pb2.Welcome(front=3))
    assert (await front_end.welcome).front == 3
    yield joint
    joint.running.cancel()
    await asyncio.gather(joint.running, return_exceptions=True)
    core_end.close()
    await until(lambda: front_end.is_lost)


async def until(condition: Callable[[], Any]) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)
