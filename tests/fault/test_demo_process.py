"""The demo and the bench as a person runs them: results, exit statuses, and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.builders import build_tiny_draft_dir, build_tiny_llama_dir
from tests.builders_chat import write_tokenizer
from tests.fault.crowd import eventually

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name a tiny target that can chat, and its draft."""
    directory = tmp_path_factory.mktemp("chat")
    model_dir = build_tiny_llama_dir(directory / "model", vocab_size=320, max_len=2048, favourite_token=70)
    write_tokenizer(model_dir)
    draft_dir = build_tiny_draft_dir(directory / "draft", model_dir)
    return ["--model", str(model_dir), "--draft", str(draft_dir)]


def _tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_the_demo_prints_answers_and_a_table_and_writes_the_promised_json(
    checkpoints: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "demo.json"
    run = _tandem(
        "demo", *checkpoints, "--prompt", "the cat", "--prompt", "on the mat", "--max-new-tokens", "40",
        "--rounds", "1", "--temperature", "0.8", "--json", str(out),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "> the cat" in run.stdout and "tandem" in run.stdout
    assert "\x1b" not in run.stdout, "no colour codes outside a terminal"
    result = json.loads(out.read_text())
    assert set(result) == {"prompts", "accept_length", "speedup", "same_tokens"}
    assert [p["prompt"] for p in result["prompts"]] == ["the cat", "on the mat"]
    assert result["same_tokens"] is True
    assert result["accept_length"] > 1
    assert result["speedup"] > 0
    for prompt in result["prompts"]:
        assert set(prompt) == {
            "prompt", "tokens", "accept_length", "plain_tok_s", "tandem_tok_s", "same_tokens",
        }  # fmt: skip


def test_the_bench_measures_transformers_beside_plain_and_drafted_decoding(
    checkpoints: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "bench.json"
    run = _tandem(
        # Long enough that two requests at once always meet: a rate is taken while both decode.
        "bench", *checkpoints, "--peer", "transformers", "--rounds", "1", "--max-new-tokens", "96",
        "--concurrency", "1,2", "--threads", "1", "--json", str(out),
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "same tokens as transformers: yes" in run.stdout
    result = json.loads(out.read_text())
    assert [(r["mode"], r["concurrency"]) for r in result["rows"]] == [
        ("plain", 1), ("inline", 1), ("plain", 2), ("inline", 2), ("transformers", 1),
    ]  # fmt: skip
    assert all(row["tok_s"] > 0 and row["step_ms"] > 0 for row in result["rows"])
    assert result["accept"]["kind"] == "real" and result["accept"]["length"] > 1
    assert {"verify", "drafter_draft"} <= set(result["rows"][1]["phases_ms"])


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--model", "/no/such/model"), "error: model: "),
        (("--draft", "/no/such/draft"), "error: draft: "),
        (("--json", "/no/such/folder/out.json"), "error: json: "),
        (("--max-new-tokens", "5000"), "max_new_tokens: must be"),
    ],
)
def test_a_wrong_option_is_one_error_with_field_limit_and_value(
    checkpoints: list[str], flags: tuple[str, str], error: str
) -> None:
    run = _tandem("demo", *checkpoints, *flags)
    assert run.returncode == 2
    assert error in run.stderr and flags[1] in run.stderr.replace("\n", "")
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_an_interrupted_demo_leaves_no_process_behind(
    checkpoints: list[str], number: signal.Signals, status: int
) -> None:
    with _running_demo(checkpoints) as demo:
        services = psutil.Process(demo.pid).children(recursive=True)
        assert len(services) == 2
        # Ctrl-C in a terminal goes to the whole foreground group.
        os.killpg(demo.pid, number)
        assert demo.wait(20) == status
        eventually(lambda: not any(s.is_running() for s in services), "both services are gone")


@contextmanager
def _running_demo(checkpoints: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A demo that has begun to answer and would go on for long."""
    demo = subprocess.Popen(
        [sys.executable, "-m", "tools.cli", "demo", *checkpoints, "--prompt", "the cat",
         "--max-new-tokens", "1900", "--rounds", "9"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert demo.stdout is not None
        lines = iter(demo.stdout.readline, "")
        assert any(line.startswith("> the cat") for line in lines), "the demo ended before it answered"
        yield demo
    finally:
        demo.kill()
        demo.wait()
        assert demo.stdout is not None
        demo.stdout.close()
