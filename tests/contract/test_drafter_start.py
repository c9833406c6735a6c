"""`python -m services.drafter` as a process: how it starts, refuses to start, and stops."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.builders import build_tiny_draft_dir, build_tiny_llama_dir
from tests.builders_drafter import build_draft_pair

COMMAND = [sys.executable, "-m", "services.drafter"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_draft_pair(tmp_path_factory.mktemp("pair"), seed=61)


@pytest.fixture
def socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        yield f"unix:{directory}/d.sock"


def flags(checkpoints: tuple[Path, Path], socket: str, *more: str) -> list[str]:
    target_dir, draft_dir = checkpoints
    return [
        *COMMAND, "--model", str(draft_dir), "--target-model", str(target_dir), "--listen", socket,
        "--threads", "1", *more,
    ]  # fmt: skip


def refused(command: list[str]) -> str:
    """The one line of a start that fails; the exit status is 2 and there is no traceback."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert ended.returncode == 2, ended.stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), ended.stderr
    return lines[0]


def wait_serving(socket: str, process: subprocess.Popen[str]) -> None:
    request = health_pb2.HealthCheckRequest(service="tandem.v1.DrafterService")
    with grpc.insecure_channel(socket) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            try:
                answer = stub.Check(request, timeout=2, wait_for_ready=True)
            except grpc.RpcError:
                continue
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
    pytest.fail("the drafter never served")


def test_it_serves_then_stops_at_sigterm_with_status_0_and_logs_its_configuration_once(
    checkpoints: tuple[Path, Path], socket: str
) -> None:
    process = subprocess.Popen(flags(checkpoints, socket), stderr=subprocess.PIPE, text=True)
    try:
        wait_serving(socket, process)
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0, logged
    events = [json.loads(line) for line in logged.splitlines()]
    configured = [event for event in events if event["event"] == "configuration"]
    assert [(event["listen"], event["dtype"]) for event in configured] == [(socket, "float32")]
    states = [event["state"] for event in events if event["event"] == "service_state"]
    assert states == ["serving", "draining", "stopped"]


def test_its_metrics_page_names_the_model(checkpoints: tuple[Path, Path], socket: str) -> None:
    port = _free_port()
    process = subprocess.Popen(
        flags(checkpoints, socket, "--metrics-port", str(port)), stderr=subprocess.PIPE, text=True
    )
    try:
        wait_serving(socket, process)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            text = page.read().decode()
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert 'tandem_drafter_num_sessions{model_name="draft"} 0.0' in text
    assert 'tandem_rpc_server_call_duration_seconds_count{model_name="draft"' in text
    assert "tandem_build_info" in text


def test_a_draft_for_another_target_is_refused_by_field(
    checkpoints: tuple[Path, Path], socket: str, tmp_path: Path
) -> None:
    other = build_tiny_llama_dir(tmp_path / "other", num_layers=6)
    draft = build_tiny_draft_dir(tmp_path / "draft", other)
    line = refused(flags((checkpoints[0], draft), socket))
    assert line == "error: num_target_layers: must equal the target's 4, got 6"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        (["--kv-tokens", "32"], "kv_tokens"),
        (["--num-sessions-max", "0"], "num_sessions_max"),
        (["--lease-s", "nan"], "lease_s"),
        (["--listen", "0.0.0.0:50052"], "listen"),
        (["--model", "/nowhere/draft"], "model"),
        (["--target-model", "/nowhere/target"], "target_model"),
        (["--device", "cuda"], "device"),
    ],
)
def test_a_wrong_setting_is_refused_by_field(
    checkpoints: tuple[Path, Path], socket: str, more: list[str], field: str
) -> None:
    command = flags(checkpoints, socket)
    if more[0] in command:
        command[command.index(more[0]) + 1] = more[1]
    else:
        command += more
    assert refused(command).startswith(f"error: {field}: must ")


def _free_port() -> int:
    import socket as sockets

    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
