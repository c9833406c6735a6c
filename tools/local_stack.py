"""Drafter and target on this machine, as real processes joined by unix sockets, for the time of a `with`.

Composition only: which flags each service gets and in which order they start and stop. The sockets and
logs lie in a private temporary directory that goes with the stack.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from tools.child_service import ChildService

# 135M parameters take some 5 s on two busy cores; an 8B checkpoint from a cold disk takes minutes.
START_DEADLINE_S = 300.0
# What is running then gets this long to end before it is killed; the tools have nothing running.
STOP_GRACE_S = 5.0
# Linux allows 107 bytes in a socket's path, macOS 103; the longest name in the directory takes 13.
_DIRECTORY_CHARS_MAX = 90

# Called with what is waited for and for how many seconds by now.
OnWait = Callable[[str, float], None]


def drafter_service(
    directory: Path,
    model_dir: Path,
    draft_dir: Path,
    *,
    metrics_port: int,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ChildService:
    """A drafter that listens in `directory`, not started."""
    address = f"unix:{directory}/drafter.sock"
    return ChildService(
        "drafter",
        ["services.drafter", "--model", str(draft_dir), "--target-model", str(model_dir),
         "--listen", address, "--metrics-port", str(metrics_port), *flags],
        address=address,
        log_path=directory / "drafter.log",
        environment=environment,
    )  # fmt: skip


def target_service(
    directory: Path,
    model_dir: Path,
    *,
    drafter_address: str,
    metrics_port: int,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ChildService:
    """A target that listens in `directory`, not started."""
    address = f"unix:{directory}/target.sock"
    return ChildService(
        "target",
        ["services.target", "--model", str(model_dir), "--drafter", drafter_address,
         "--listen", address, "--metrics-port", str(metrics_port), *flags],
        address=address,
        log_path=directory / "target.log",
        environment=environment,
    )  # fmt: skip


class LocalStack:
    """A drafter and a target.

        with LocalStack(model_dir, draft_dir) as stack:
            client = TargetClient(stack.target.address)

    Leaving the block, also by an exception or Ctrl-C, stops both and removes the directory.
    """

    def __init__(
        self,
        model_dir: Path,
        draft_dir: Path,
        *,
        target_flags: Sequence[str] = (),
        drafter_flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        on_wait: OnWait = lambda name, seconds: None,
    ) -> None:
        self._on_wait = on_wait
        self.directory = _private_directory()
        target_port, drafter_port = free_ports(2)
        self.target_metrics_url = f"http://127.0.0.1:{target_port}/metrics"
        self.drafter_metrics_url = f"http://127.0.0.1:{drafter_port}/metrics"
        self.drafter = drafter_service(
            self.directory,
            model_dir,
            draft_dir,
            metrics_port=drafter_port,
            flags=drafter_flags,
            environment=environment,
        )
        self.target = target_service(
            self.directory,
            model_dir,
            drafter_address=self.drafter.address,
            metrics_port=target_port,
            flags=target_flags,
            environment=environment,
        )

    @property
    def services(self) -> list[ChildService]:
        """In the order of starting: the drafter first, so that the target's first probe finds it."""
        return [self.drafter, self.target]

    def __enter__(self) -> LocalStack:
        try:
            # Both load their weights at the same time.
            for service in self.services:
                service.start()
            for service in self.services:
                service.wait_serving(START_DEADLINE_S, functools.partial(self._on_wait, service.name))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop what runs and remove the directory. Whatever interrupts it, each part still ends: a service
        that is waited for when a second Ctrl-C comes is killed."""
        with contextlib.ExitStack() as ending:  # last in, first out
            ending.callback(shutil.rmtree, self.directory, ignore_errors=True)
            for service in self.services:
                ending.callback(service.stop, STOP_GRACE_S)
            # Both are asked before one is waited for; a drafter waits for its target's sessions by itself.
            for service in reversed(self.services):
                service.ask_to_end()


def _private_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="tandem-")
    if len(directory) > _DIRECTORY_CHARS_MAX:
        shutil.rmtree(directory)
        directory = tempfile.mkdtemp(prefix="tandem-", dir="/tmp")
    return Path(directory)


def free_ports(count: int) -> list[int]:
    """Different TCP ports of the loopback on which nobody listens."""
    # Free now and almost surely a second later; a service that loses one says so and ends. All are held
    # until the last is found, so that no two are the same.
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
