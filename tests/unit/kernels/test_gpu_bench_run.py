"""Runs of the GPU bench from their plan to the file of results, over the CPU's step loop."""

from __future__ import annotations

import io
import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from common.errors import ConfigError
from tests.unit.test_gpu_bench_jobs import PLAN, PROMPTS, contender
from tools.gpu_bench.contender import Contender
from tools.gpu_bench.interruption import Interrupted, Interruption
from tools.gpu_bench.pair import Pair, check_shape
from tools.gpu_bench.plan import GpuPlan, Job, Mode
from tools.gpu_bench.remote import LinkEvents
from tools.gpu_bench.run import Run


class Ready:
    """A Lineup of contenders that are there."""

    def __init__(self, contenders: Sequence[Contender]) -> None:
        self.contenders = contenders
        self.events = LinkEvents()

    def __enter__(self) -> Ready:
        return self

    def __exit__(self, *error: object) -> None: ...

    def learn(self, prompt: list[int], output: list[int]) -> None: ...


def run_of(plan: GpuPlan, json_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, io.StringIO]:
    shown = io.StringIO()
    pair = Pair.of(plan, torch.float32, torch.device("cpu"))
    run = Run(
        Console(file=shown, width=200), plan, pair, torch.device("cpu"), "a machine", 1e9, Interruption(),
        json_path,
    )  # fmt: skip
    ready = Ready([contender(mode)[0] for mode in plan.modes])
    monkeypatch.setattr(run, "lineup", lambda: ready)
    # Prompts that the counting model knows, whatever the pair's vocabulary.
    monkeypatch.setattr(run, "_prompts", lambda: PROMPTS)
    return run, shown


def test_rows_are_shown_and_written_with_all_that_was_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(PLAN, concurrency=(2,), num_rounds=1, synthetic_accept_length=3.0, row_independent=True)
    run, shown = run_of(plan, tmp_path / "rows.json", monkeypatch)
    assert run.rows() is False
    result = json.loads((tmp_path / "rows.json").read_text())
    assert set(result) == {"date", "commit", "device", "model", "block_size", "accept", "rows"}
    assert result["accept"]["kind"] == "synthetic"
    assert result["block_size"] == 4 and result["model"] == "tiny (random weights)"
    for row, mode in zip(result["rows"], ("plain", "inprocess"), strict=True):
        assert row["mode"] == mode and row["concurrency"] == 2
        assert {"tok_s", "step_ms", "phases_ms", "floor_fraction"} <= set(row)
        assert (row["prompt_tokens"], row["max_new_tokens"], row["row_independent"]) == (5, 40, True)
        # The floor is of the weights that the pair really has.
        assert row["floor_fraction"] * row["step_ms"] == pytest.approx(row["floor_ms"])
        assert row["floor_ms"] == pytest.approx(run.pair.floor(1e9).weights_ms(Mode(mode)))
    assert "synthetic" in shown.getvalue()


def test_an_interrupted_run_shows_and_writes_what_was_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, shown = run_of(PLAN, tmp_path / "rows.json", monkeypatch)
    rounds = iter(range(100))

    def check() -> None:
        if next(rounds) == 3:
            raise Interrupted

    monkeypatch.setattr(run.interruption, "check", check)
    with pytest.raises(Interrupted):
        run.rows()
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (row["mode"], row["concurrency"]) == ("plain", 1)
    assert "closed loop" in shown.getvalue()


def test_identity_and_soak_say_what_they_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(PLAN, job=Job.IDENTITY, concurrency=(2,), amount=3)
    run, shown = run_of(plan, tmp_path / "identity.json", monkeypatch)
    assert run.identity() is False
    found = json.loads((tmp_path / "identity.json").read_text())["identity"]
    assert [(c["mode"], c["concurrency"], c["prompts_that_differ"]) for c in found] == [
        ("plain", 2, 0), ("inprocess", 1, 0), ("inprocess", 2, 0),
    ]  # fmt: skip
    assert "0 of 3" in shown.getvalue()

    plan = replace(PLAN, job=Job.SOAK, modes=(Mode.PLAIN,), concurrency=(2,), amount=30)
    run, shown = run_of(plan, tmp_path / "soak.json", monkeypatch)
    assert run.soak() is False
    assert json.loads((tmp_path / "soak.json").read_text())["soak"]["num_steps"] >= 30
    assert "every page accounted for" in shown.getvalue()


def test_a_signal_is_a_wish_and_a_second_one_is_not() -> None:
    with Interruption() as interruption:
        interruption.check()
        signal.raise_signal(signal.SIGINT)
        assert interruption.is_wanted()
        with pytest.raises(Interrupted):
            interruption.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_unknown_shape_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match="random: must be one of qwen3-8b, tiny, got 'nosuch-8b'"):
        check_shape("nosuch-8b")


def test_what_the_pair_cannot_do_is_refused() -> None:
    pair = Pair.of(PLAN, torch.float32, torch.device("cpu"))
    pair.check(replace(PLAN, synthetic_accept_length=4.0))
    with pytest.raises(ConfigError, match="synthetic_accept_length: must be at most 4"):
        pair.check(replace(PLAN, synthetic_accept_length=4.5))
    with pytest.raises(ConfigError, match="max_new_tokens: with the prompt must be at most 256"):
        pair.check(replace(PLAN, prompt_tokens=200, max_new_tokens=57))
