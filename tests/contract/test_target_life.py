"""A target that cannot start says why in one clear error; one that breaks ends, and says so to all."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.config import load_settings
from common.errors import CheckpointError, ConfigError
from common.pb.tandem.v1 import target_pb2 as pb
from common.pb.tandem.v1 import target_pb2_grpc
from common.rpc import open_channel
from services.target.config import TargetSettings
from services.target.service import load_model, serve
from tests.builders import build_tiny_llama_dir

ROOT = Path(__file__).parents[2]
FRONTS = pytest.mark.parametrize("fronts", ["0", "1"], ids=["one process", "a front of its own"])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama_dir(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def socket_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="td") as folder:
        yield f"{folder}/t.sock"


async def start(model_dir: Path, socket_path: str, *flags: str) -> int:
    needed = ["--model", str(model_dir), "--listen", f"unix:{socket_path}"]
    settings = load_settings(TargetSettings, "services.target", [*needed, *flags])
    return await serve(settings, load_model(settings))


def test_a_wrong_model_ends_the_process_with_one_line_and_status_2(socket_path: str) -> None:
    flags = ["--model", "no/such/model/dir", "--listen", f"unix:{socket_path}"]
    ended = subprocess.run(
        [sys.executable, "-m", "services.target", *flags],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 2
    said = [line for line in ended.stderr.splitlines() if not line.startswith("{")]
    assert said == [
        "error: model: must be a model directory or a Hugging Face id org/name, got 'no/such/model/dir'"
    ]


@FRONTS
async def test_an_address_that_cannot_be_listened_on_is_named(
    model_dir: Path, socket_path: str, fronts: str
) -> None:
    Path(socket_path).write_text("a file")
    with pytest.raises(ConfigError, match=r"^listen: must not be an existing file, got 'unix:/"):
        await start(model_dir, socket_path, "--fronts", fronts)


async def test_fronts_do_not_share_a_port_that_somebody_else_listens_on(
    model_dir: Path, socket_path: str
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"^listen: cannot be listened on, got '{address}'"):
            await start(model_dir, socket_path, "--listen", address, "--fronts", "2")


async def test_a_context_limit_beyond_the_models_is_named(model_dir: Path, socket_path: str) -> None:
    with pytest.raises(ConfigError, match=r"^max_len: must be at most 256 .* got 257$"):
        await start(model_dir, socket_path, "--max-len", "257")


async def test_a_context_limit_beyond_the_pools_is_named(model_dir: Path, socket_path: str) -> None:
    with pytest.raises(ConfigError, match=r"^max_len: must be at most 64 .* got 65$"):
        await start(model_dir, socket_path, "--max-len", "65", "--kv-tokens", "79")


async def test_a_pool_smaller_than_a_page_is_named(model_dir: Path, socket_path: str) -> None:
    with pytest.raises(ConfigError, match=r"^kv_tokens: must be at least --page-size 16, got 8$"):
        await start(model_dir, socket_path, "--kv-tokens", "8")


async def test_corrupted_weights_are_named_by_file(tmp_path: Path, socket_path: str) -> None:
    broken = build_tiny_llama_dir(tmp_path / "broken")
    (weights,) = broken.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=rf"^safetensors: .*{weights.name}"):
        await start(broken, socket_path)


@FRONTS
async def test_a_core_that_breaks_fails_each_request_once_and_ends_the_service_with_status_1(
    model_dir: Path, socket_path: str, monkeypatch: pytest.MonkeyPatch, fronts: str
) -> None:
    flags = ["--model", str(model_dir), "--listen", f"unix:{socket_path}", "--fronts", fronts]
    settings = load_settings(TargetSettings, "services.target", flags)
    model = load_model(settings)
    forward, num_steps = model.forward, 0

    def breaking(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 5:
            raise RuntimeError("device lost")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", breaking)
    serving = asyncio.create_task(serve(settings, model))
    async with open_channel(settings.listen_address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        requests = [
            pb.GenerateRequest(request_id=name, input_ids=[1, 5], max_new_tokens=50, ignore_eos=True)
            for name in ("a", "b")
        ]
        calls = [stub.Generate(request, wait_for_ready=True, timeout=30) for request in requests]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for message in call:
                    assert message.WhichOneof("event") == "delta"
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert caught.value.details() == "service failed"
    assert await asyncio.wait_for(serving, 20) == 1


@FRONTS
async def test_requests_that_outlast_the_grace_end_unavailable_with_the_tokens_they_had(
    model_dir: Path, socket_path: str, monkeypatch: pytest.MonkeyPatch, fronts: str
) -> None:
    needed = ["--model", str(model_dir), "--listen", f"unix:{socket_path}"]
    flags = [*needed, "--grace-s", "0.3", "--fronts", fronts]
    settings = load_settings(TargetSettings, "services.target", flags)
    model = load_model(settings)
    forward = model.forward

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", slow)
    serving = asyncio.create_task(serve(settings, model))
    async with open_channel(settings.listen_address) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        request = pb.GenerateRequest(request_id="long", input_ids=[1, 5], ignore_eos=True)
        call = stub.Generate(request, wait_for_ready=True, timeout=60)
        received = [await anext(aiter(call))]
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for message in call:
                received.append(message)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "stopped" in (caught.value.details() or "")
        assert {message.WhichOneof("event") for message in received} == {"delta"}
        assert len(received) < 254, "it had not ended by itself"
    assert await asyncio.wait_for(serving, 20) == 0
    assert not Path(socket_path).exists()
