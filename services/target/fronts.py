"""Fronts as processes of their own: started, listened to, started again when lost, seen off at the end.

Composes processes and the core's ends of their sockets. Each front has one of a pair of sockets, made before
it: there is no name by which anybody else could connect, and none that a killed core leaves behind.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from common import limits
from common.address import Address, TcpAddress, parse_address
from common.errors import ConfigError, TandemError
from common.log import get_log
from common.pb.tandem.v1 import core_pb2
from common.rpc import check_port_free
from services.target.core.core import Core
from services.target.core.core_socket import FrontSocket
from services.target.edge import Supervise
from services.target.facts import DrafterFacts, ServedModel
from services.target.joint.frames import BrokenJoint
from services.target.joint.messages import encode_model

log = get_log("fronts")

# Beyond the time that its streams have to end, for a front to leave before it is killed.
_LEAVE_S = 1.0


class FrontsObserver(Protocol):
    """Hears how the fronts fare."""

    def observe_rejected(self, reason: str) -> None: ...

    def observe_front_restart(self) -> None:
        """A front was lost, and will be started again."""


ObserveCall = Callable[[str, str, float], None]


@dataclass(frozen=True)
class FrontPlan:
    """What each front is told. More than one share the port, so they need a TCP address."""

    count: int
    listen: Address
    log_level: str
    instance_id: str
    model: ServedModel


class FrontFailed(TandemError):
    """A front did not start."""


@dataclass(frozen=True)
class _Front:
    number: int
    process: asyncio.subprocess.Process
    joint: FrontSocket
    address: Address
    started_at: float

    async def end(self) -> None:
        """Whatever state it is in, it is gone afterwards, and its requests are told to end."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        self.joint.close()


class Fronts:
    """The front processes of one core; an Edge."""

    def __init__(
        self, plan: FrontPlan, drafter_facts: Callable[[], DrafterFacts], observer: FrontsObserver,
        observe_call: ObserveCall, observe_lag: Callable[[float], None],
    ) -> None:  # fmt: skip
        """drafter_facts is called from any thread. observe_call and observe_lag get what fronts report."""
        self._plan = plan
        self._drafter_facts = drafter_facts
        self._observer = observer
        self._observe_call = observe_call
        self._observe_lag = observe_lag
        self._lags: dict[int | None, float] = {}
        """The last lag by front; None is the core's own."""
        self._began_at = time.monotonic()
        self._serving = False
        self._fronts: tuple[_Front, ...] = ()

    # --- services.target.edge.Edge -----------------------------------------------------------------------

    async def start(self, core: Core, supervise: Supervise) -> Address:
        """Start all fronts; the address at which they listen. Raises ConfigError when that cannot be
        listened on, FrontFailed when one does not come up; none is left then."""
        plan = self._plan
        if plan.count > 1:
            assert isinstance(plan.listen, TcpAddress), "settings see to it"
            check_port_free(plan.listen)
        try:
            first = await self._start(core, 0, plan.listen)
            self._fronts = (first,)
            # Now that the system has chosen a port, if it was to.
            self._plan = replace(plan, listen=first.address)
            others = (self._start(core, number, first.address) for number in range(1, plan.count))
            started = await asyncio.gather(*others, return_exceptions=True)
            self._fronts += tuple(front for front in started if isinstance(front, _Front))
            for front in started:
                if isinstance(front, BaseException):
                    raise front
        except BaseException:
            await asyncio.gather(*(front.end() for front in self._fronts))
            raise
        for number in range(plan.count):
            supervise(f"front_{number}", self._keep(core, number))
        return first.address

    def announce(self) -> None:
        """Send each front what the step had for it. Called on the core's thread; never waits."""
        for front in self._fronts:
            front.joint.announce()

    def observe_event_loop_lag(self, seconds: float) -> None:
        """The lag of the core's own event loop."""
        self._take_lag(None, seconds)

    async def set_serving(self, serving: bool) -> None:
        """Tell health."""
        self._serving = serving
        for front in self._fronts:
            front.joint.say_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Let streams end for so long, then end all fronts."""
        for front in self._fronts:
            front.joint.say_leave()
        await asyncio.gather(*(self._see_off(front, grace_s) for front in self._fronts))

    async def _see_off(self, front: _Front, grace_s: float) -> None:
        try:
            await asyncio.wait_for(front.process.wait(), grace_s + _LEAVE_S)
        except TimeoutError:
            log.warning("front_killed", front=front.number, reason="it did not leave")
        await front.end()

    # --- one front ---------------------------------------------------------------------------------------

    async def _start(self, core: Core, number: int, listen: Address) -> _Front:
        ours, theirs = socket.socketpair()
        joint = FrontSocket(ours, core, lambda: (core.stats(), self._drafter_facts()), _Reports(self, number))
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "services.target.front", str(theirs.fileno()),
                    pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                )  # fmt: skip
        except OSError as error:
            # No process or no memory for one: those that run go on.
            joint.close()
            raise FrontFailed(f"front {number}: did not start ({error.strerror})") from error
        try:
            joint.welcome(self._welcome(number, listen))
            async with asyncio.timeout(limits.FRONT_START_DEADLINE_S):
                address = _listening(await joint.hear())
            joint.say_serving(self._serving)
        except BaseException as error:
            await _Front(number, process, joint, listen, 0.0).end()
            if isinstance(error, TimeoutError | BrokenJoint):
                raise FrontFailed(f"front {number}: did not start ({str(error) or 'in time'})") from None
            raise
        log.info("front_started", front=number, pid=process.pid, listen=str(address))
        return _Front(number, process, joint, address, time.monotonic())

    def _welcome(self, number: int, listen: Address) -> core_pb2.Welcome:
        plan = self._plan
        return core_pb2.Welcome(
            front=number,
            listen=str(listen),
            share_port=plan.count > 1,
            log_level=plan.log_level,
            instance_id=plan.instance_id,
            uptime_s=time.monotonic() - self._began_at,
            model=encode_model(plan.model),
        )

    async def _keep(self, core: Core, number: int) -> None:
        """Start a front again whenever it is lost. Never returns."""
        delay_s = limits.FRONT_BACKOFF_MIN_S
        while True:
            front = self._fronts[number]
            reason = await _lost(front.joint)
            log.error("front_lost", front=number, reason=reason, num_requests=front.joint.num_requests)
            await front.end()
            self._observer.observe_front_restart()
            self._lags.pop(number, None)
            if time.monotonic() - front.started_at > limits.FRONT_STABLE_S:
                delay_s = limits.FRONT_BACKOFF_MIN_S
            while self._fronts[number] is front:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, limits.FRONT_BACKOFF_MAX_S)
                try:
                    again = await self._start(core, number, self._plan.listen)
                except TandemError as error:
                    log.error("front_not_started", front=number, reason=str(error))
                    continue
                self._fronts = (*self._fronts[:number], again, *self._fronts[number + 1 :])

    # --- what fronts report ------------------------------------------------------------------------------

    def take_report(self, number: int, report: core_pb2.FrontReport) -> None:
        """What a front measured, into the metrics."""
        self._take_lag(number, report.event_loop_lag_s)
        for call in report.ended_calls:
            self._observe_call(call.method, call.status, call.seconds)
        for reason in report.rejected:
            self._observer.observe_rejected(reason)

    def take_slow_front(self, number: int) -> None:
        """A request of this front was dropped because the front did not read."""
        log.warning("slow_front", front=number)
        self._observer.observe_rejected("slow_front")

    def _take_lag(self, number: int | None, seconds: float) -> None:
        """The gauge shows the longest of all event loops of this target."""
        self._lags[number] = seconds
        self._observe_lag(max(self._lags.values()))


@dataclass(frozen=True)
class _Reports:
    """A FrontObserver: what one front's socket tells, with the front's number."""

    fronts: Fronts
    number: int

    def observe_report(self, report: core_pb2.FrontReport) -> None:
        self.fronts.take_report(self.number, report)

    def observe_slow_front(self) -> None:
        self.fronts.take_slow_front(self.number)


def _listening(message: core_pb2.FromFront) -> Address:
    """Where a front listens; ConfigError when it cannot."""
    if message.HasField("start_failure"):
        failure = message.start_failure
        raise ConfigError(failure.field, failure.problem, given=failure.given)
    if not message.HasField("listening"):
        raise BrokenJoint("message: must say where the front listens")
    return parse_address(message.listening, "listen")


async def _lost(joint: FrontSocket) -> str:
    """Serve a front until it is gone, sends what is wrong, or says nothing for too long; the reason."""
    serving = asyncio.create_task(joint.run())
    try:
        while True:
            num_heard = joint.num_heard
            await asyncio.wait([serving], timeout=limits.FRONT_SILENCE_S)
            if serving.done():
                serving.result()
            if joint.num_heard == num_heard:
                return f"silent for {limits.FRONT_SILENCE_S:g} s"
    except BrokenJoint as broken:
        return str(broken)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
