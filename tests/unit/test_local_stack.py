"""Child processes are started, watched and never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.child_service import ChildService, ServiceFailed, is_serving
from tools.local_stack import LocalStack

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def directory() -> Iterator[Path]:
    # tmp_path may be longer than a socket's path can be.
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _child(directory: Path, *flags: str) -> ChildService:
    address = f"unix:{directory}/s.sock"
    return ChildService(
        "sample", ["tests.sample_service", address, *flags], address=address, log_path=directory / "log"
    )


def _exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_gone(pid: int, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while _exists(pid):
        assert time.monotonic() < deadline, f"{pid} still exists"
        time.sleep(0.01)


def test_a_service_is_waited_for_and_stopped(directory: Path) -> None:
    child = _child(directory)
    child.start()
    try:
        child.wait_serving(30)
        assert child.running and is_serving(child.address)
    finally:
        child.stop(grace_s=5)
    assert child.wait_ended(0) == 0
    assert not is_serving(child.address)


def test_a_service_that_ends_while_starting_is_reported_with_its_last_words(directory: Path) -> None:
    child = _child(directory, "--fail")
    child.start()
    with pytest.raises(
        ServiceFailed, match=r"sample ended while starting:(.|\n)*threads: must be 1 to 9, got 0"
    ):
        child.wait_serving(30)


def test_a_service_that_never_serves_is_given_up(directory: Path) -> None:
    child = _child(directory, "--not-serving")
    child.start()
    try:
        with pytest.raises(ServiceFailed, match="sample does not serve after 0.2 s"):
            child.wait_serving(0.2)
    finally:
        child.stop(grace_s=5)


@pytest.mark.parametrize("deaf", [signal.SIGSTOP, None], ids=["stopped", "ignoring SIGTERM"])
def test_a_service_that_does_not_end_when_asked_is_killed(
    directory: Path, deaf: signal.Signals | None
) -> None:
    child = _child(directory, *([] if deaf else ["--ignore-sigterm"]))
    child.start()
    child.wait_serving(30)
    if deaf:
        child.send(deaf)
    child.stop(grace_s=0.1)
    assert child.wait_ended(0) == -signal.SIGKILL


def test_a_service_serves_again_on_the_same_socket_after_a_kill(directory: Path) -> None:
    child = _child(directory)
    child.start()
    try:
        child.wait_serving(30)
        child.send(signal.SIGKILL)
        assert child.wait_ended(5) == -signal.SIGKILL
        child.start()
        child.wait_serving(30)
    finally:
        child.stop(grace_s=5)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a process to its parent's life")
def test_a_service_dies_when_its_owner_is_killed(directory: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", f"""
import time
from pathlib import Path
from tools.child_service import ChildService
child = ChildService("sample", ["tests.sample_service", "unix:{directory}/s.sock"],
                     address="unix:{directory}/s.sock", log_path=Path("{directory}/log"))
child.start()
child.wait_serving(30)
print(child.pid, flush=True)
time.sleep(60)
"""],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert _exists(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _wait_gone(pid)


def test_a_stack_that_cannot_start_leaves_no_process_and_no_directory(tmp_path: Path) -> None:
    stack = LocalStack(tmp_path / "no-model", tmp_path / "no-draft")
    with pytest.raises(ServiceFailed, match="ended while starting"), stack:
        pass
    assert not any(service.running for service in stack.services)
    assert not stack.directory.exists()


def test_the_stack_directory_is_private() -> None:
    stack = LocalStack(Path("model"), Path("draft"))
    try:
        assert stack.directory.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(stack.target.address)) < 107
    finally:
        stack.stop()
