"""Drafter and target on this machine, as real processes joined by unix sockets, for the time of a `with`.

Composition only: which flags each service gets and in which order they start and stop. The sockets and
logs lie in a private temporary directory that goes with the stack.
"""

from __future__ import annotations

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


class LocalStack:
    """A drafter (unless draft_dir is None) and a target.

        with LocalStack(model_dir, draft_dir) as stack:
            client = TargetClient(stack.target.address)

    Leaving the block, also by an exception or Ctrl-C, stops the target, then the drafter, then removes
    the directory.
    """

    def __init__(
        self,
        model_dir: Path | str,
        draft_dir: Path | str | None,
        *,
        target_flags: Sequence[str] = (),
        drafter_flags: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        on_wait: OnWait = lambda name, seconds: None,
    ) -> None:
        self._on_wait = on_wait
        self.directory = _private_directory()
        self.target_metrics_url, target_port = _metrics_address()
        self.drafter_metrics_url, drafter_port = _metrics_address()
        drafter_address = f"unix:{self.directory}/drafter.sock"
        self.drafter: ChildService | None = None
        if draft_dir is not None:
            self.drafter = ChildService(
                "drafter",
                ["services.drafter", "--model", str(draft_dir), "--target-model", str(model_dir),
                 "--listen", drafter_address, "--metrics-port", str(drafter_port), *drafter_flags],
                address=drafter_address,
                log_path=self.directory / "drafter.log",
                environment=environment,
            )  # fmt: skip
        drafter_flag = ["--drafter", drafter_address] if self.drafter else []
        self.target = ChildService(
            "target",
            ["services.target", "--model", str(model_dir), "--listen", f"unix:{self.directory}/target.sock",
             "--metrics-port", str(target_port), *drafter_flag, *target_flags],
            address=f"unix:{self.directory}/target.sock",
            log_path=self.directory / "target.log",
            environment=environment,
        )  # fmt: skip

    @property
    def services(self) -> list[ChildService]:
        """In the order of starting: the drafter first, so that the target's first probe finds it."""
        return [service for service in (self.drafter, self.target) if service is not None]

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
        """Stop what runs and remove the directory. A second Ctrl-C only makes it less patient."""
        grace_s = STOP_GRACE_S
        interrupted: KeyboardInterrupt | None = None
        # The target first: it gives its sessions back while the drafter still listens.
        for service in reversed(self.services):
            try:
                service.stop(grace_s)
            except KeyboardInterrupt as error:
                grace_s, interrupted = 0.0, error
                service.stop(grace_s)
        shutil.rmtree(self.directory, ignore_errors=True)
        if interrupted is not None:
            raise interrupted


def _private_directory() -> Path:
    directory = tempfile.mkdtemp(prefix="tandem-")
    if len(directory) > _DIRECTORY_CHARS_MAX:
        shutil.rmtree(directory)
        directory = tempfile.mkdtemp(prefix="tandem-", dir="/tmp")
    return Path(directory)


def _metrics_address() -> tuple[str, int]:
    # The port is free now and almost surely a second later; a service that loses it says so and ends.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return f"http://127.0.0.1:{port}/metrics", port
