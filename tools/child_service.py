"""One service as a child process: start it, wait until it serves, stop it, never leave it behind.

Knows gRPC health and signals; must not know which service it is or what its flags mean.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import TandemError

# The services import from where this checkout lies, whatever the caller's directory is.
_ROOT = Path(__file__).resolve().parents[1]
_POLL_S = 0.05
_LOG_TAIL_LINES = 12


class ServiceFailed(TandemError):
    """A service ended or did not come up; the text holds the last lines of its log."""


class ChildService:
    """A service process of its own group, so that Ctrl-C in a terminal reaches only its owner.

    It is killed when the owner dies (Linux; see die_with_parent). Start it from a thread that lives as
    long as it should: the kernel counts the death of that thread as the owner's.
    """

    def __init__(
        self,
        name: str,
        module_argv: Sequence[str],
        *,
        address: str,
        log_path: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """module_argv: what follows `python -m`. environment: variables beside the inherited ones."""
        self.name, self.address, self.log_path = name, address, log_path
        self._argv = [sys.executable, "-m", "tools.die_with_parent", sys.executable, "-m", *module_argv]
        self._environment = dict(environment or {})
        self._child: subprocess.Popen[bytes] | None = None
        self._asked_to_end = False

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._child is not None, "start it first"
        return self._child.pid

    def start(self) -> None:
        """Start it, or start it again after it ended. Its log is appended to log_path."""
        assert not self.running, f"{self.name} runs already"
        self._asked_to_end = False
        with self.log_path.open("ab") as log:
            self._child = subprocess.Popen(
                self._argv,
                cwd=_ROOT,
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether the process exists, be it stopped."""
        return self._child is not None and self._child.poll() is None

    def wait_serving(self, timeout_s: float, on_wait: Callable[[float], None] = lambda _: None) -> None:
        """Return once gRPC health says SERVING. `on_wait` gets the seconds waited, every now and then.

        Raises ServiceFailed when the process ends first, or after timeout_s.
        """
        started = time.monotonic()
        while not is_serving(self.address):
            waited = time.monotonic() - started
            if not self.running:
                raise ServiceFailed(f"{self.name} ended while starting:\n{self._log_tail()}")
            if waited > timeout_s:
                raise ServiceFailed(f"{self.name} does not serve after {timeout_s:g} s:\n{self._log_tail()}")
            on_wait(waited)
            time.sleep(_POLL_S)

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens when it has ended."""
        if self.running:
            assert self._child is not None
            self._child.send_signal(number)

    def wait_ended(self, timeout_s: float) -> int:
        """Its exit status (minus the signal's number when one ended it); ServiceFailed after timeout_s."""
        assert self._child is not None, "start it first"
        try:
            return self._child.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise ServiceFailed(
                f"{self.name} still runs after {timeout_s:g} s:\n{self._log_tail()}"
            ) from error

    def ask_to_end(self) -> None:
        """SIGTERM, once: services take a second one for impatience."""
        if not self._asked_to_end:
            self._asked_to_end = True
            self.send(signal.SIGTERM)

    def stop(self, grace_s: float) -> None:
        """Ask it to end, then make it; afterwards the process is gone."""
        if self._child is None:
            return
        try:
            self.ask_to_end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(grace_s)
        finally:
            if self.running:
                self._child.kill()
            self._child.wait()

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL_LINES:]) or "(it wrote no log)"


def is_serving(address: str) -> bool:
    """Whether a service at `unix:/path` or `host:port` answers gRPC health with SERVING.

    Uses a channel of its own each time: one made before the socket exists would sit out a back-off.
    """
    with grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1.0)
        except grpc.RpcError:
            return False
    return reply.status == health_pb2.HealthCheckResponse.SERVING
