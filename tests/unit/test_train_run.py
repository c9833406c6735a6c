"""`tandem train` on a tiny target: it learns, it resumes, and the drafter loads what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from common.embedding import load_shared_weights
from common.errors import CheckpointError, ConfigError
from common.weights import Checkpoint
from services.drafter.model.dflash import DFlash
from services.drafter.model.dflash_config import DFlashConfig
from services.drafter.model.dflash_weights import take_weights
from tests.builders import build_tiny_llama_dir
from tests.builders_chat import write_tokenizer
from tools.train.checkpoint import load_checkpoint, save_checkpoint
from tools.train.command import app
from tools.train.corpus import Corpus, load_shards, save_shard
from tools.train.dense_target import DenseTarget
from tools.train.draft_weights import (
    draft_config_json,
    export_draft,
    named_weights,
    new_weights,
    spread_layers,
)
from tools.train.generate import ANSWER
from tools.train.run import DraftShape, RunSettings, run_training
from tools.train.synthesis import SynthesisSettings, read_prompts
from tools.train.trainer import Trainer, TrainingSettings

SEED = 20261205
CPU = torch.device("cpu")
VOCAB, LENGTH = 300, 64


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    print(f"seed {SEED}")
    directory = build_tiny_llama_dir(tmp_path / "target", SEED, vocab_size=VOCAB, num_layers=6)
    return write_tokenizer(directory)


def _draft_json(target_dir: Path, block_size: int = 4) -> dict[str, object]:
    target = json.loads((target_dir / "config.json").read_text())
    return draft_config_json(
        target, num_layers=2, block_size=block_size, mask_token_id=0, captured_layer_ids=(1, 3)
    )


def _random_corpus(rows: int) -> Corpus:
    rng = torch.Generator().manual_seed(SEED)
    tokens = torch.randint(3, VOCAB, (rows, LENGTH), generator=rng, dtype=torch.int32)
    roles = torch.full((rows, LENGTH), ANSWER, dtype=torch.int8)
    return Corpus(tokens, roles, torch.full((rows,), LENGTH), torch.zeros(rows))


def _trainer(target_dir: Path, corpus: Corpus, **changes: object) -> Trainer:
    raw = _draft_json(target_dir)
    settings = TrainingSettings(**{"batch_rows": 4, "num_anchors": 16, "seed": SEED, **changes})  # type: ignore[arg-type]
    target = DenseTarget(target_dir, CPU, torch.float32)
    return Trainer(target, DFlashConfig.from_json(raw), raw, settings, corpus)


def test_a_draft_overfits_eight_random_sequences(target_dir: Path) -> None:
    corpus = _random_corpus(8)
    trainer = _trainer(target_dir, corpus, num_steps=400, learning_rate=4e-3)
    before = trainer.measure(corpus).accept_length
    losses = [float(trainer.train_step()) for _ in range(400)]
    after = trainer.measure(corpus)
    print(losses[0], losses[-1], before, after)
    assert before < 1.1
    # Random tokens can only be learned by heart: all of K = 3 drafts then fit, so 4 a verify.
    assert after.accept_length > 3.0


def test_a_resumed_run_is_the_run_that_never_stopped(target_dir: Path, tmp_path: Path) -> None:
    corpus = _random_corpus(8)
    whole = _trainer(target_dir, corpus, num_steps=12)
    for _ in range(12):
        whole.train_step()
    first = _trainer(target_dir, corpus, num_steps=12)
    for _ in range(5):
        first.train_step()
    save_checkpoint(first, {"name": "a"}, tmp_path / "checkpoint.safetensors")
    second = _trainer(target_dir, corpus, num_steps=12)
    load_checkpoint(second, {"name": "a"}, tmp_path / "checkpoint.safetensors")
    assert second.step == 5
    for _ in range(7):
        second.train_step()
    expected = named_weights(whole.weights)
    for name, weight in named_weights(second.weights).items():
        assert torch.equal(weight, expected[name]), name


def test_a_checkpoint_of_another_run_is_refused_by_name(target_dir: Path, tmp_path: Path) -> None:
    trainer = _trainer(target_dir, _random_corpus(8))
    save_checkpoint(trainer, {"block_size": 8}, tmp_path / "checkpoint.safetensors")
    with pytest.raises(CheckpointError, match="block_size.*8.*16"):
        load_checkpoint(trainer, {"block_size": 16}, tmp_path / "checkpoint.safetensors")


def test_more_rows_a_step_than_there_are_is_an_error(target_dir: Path) -> None:
    with pytest.raises(ConfigError, match="batch_rows"):
        _trainer(target_dir, _random_corpus(3))


def test_an_exported_draft_is_loaded_by_the_drafter_with_the_same_weights(
    target_dir: Path, tmp_path: Path
) -> None:
    raw = _draft_json(target_dir)
    config = DFlashConfig.from_json(raw)
    weights = new_weights(config, torch.Generator().manual_seed(SEED))
    export_draft(weights, raw, tmp_path / "draft")
    loaded, _ = take_weights(Checkpoint(tmp_path / "draft"), config, torch.float32)
    expected = named_weights(weights)
    for name, weight in named_weights(loaded).items():
        assert torch.equal(weight, expected[name].bfloat16().float()), name
    draft = DFlash.load(tmp_path / "draft", *load_shared_weights(target_dir, torch.float32))
    assert draft.contract.block_size == 4 and draft.contract.captured_layer_ids == (1, 3)


def test_layers_to_capture_are_spread_as_published_drafts_have_them() -> None:
    assert spread_layers(30, 5) == (1, 7, 14, 20, 27)
    assert spread_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spread_layers(32, 5) == (1, 8, 15, 22, 29)
    assert spread_layers(24, 5) == (1, 6, 11, 16, 21)


def _run(target_dir: Path, tmp_path: Path, steps: int) -> RunSettings:
    run = RunSettings(
        model_dir=target_dir, run_dir=tmp_path / "run", out=tmp_path / "draft", prompts=None, device="cpu",
        measure_every_steps=4,
    )  # fmt: skip
    run_training(
        run,
        DraftShape(2, 4, 0, (1, 3)),
        SynthesisSettings(
            num_rows=8, held_out_rows=4, rows_at_once=8, max_len=128, user_len_max=10, seed=SEED
        ),
        TrainingSettings(num_steps=steps, batch_rows=2, num_anchors=16, seed=SEED),
        Console(quiet=True),
    )
    return run


def test_a_run_writes_text_trains_and_exports_and_does_no_stage_twice(
    target_dir: Path, tmp_path: Path
) -> None:
    run = _run(target_dir, tmp_path, steps=6)
    curves = [json.loads(line) for line in (run.run_dir / "curves.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in curves] == [4, 6]
    assert {"greedy", "sampled"} <= curves[0].keys() and "loss" in curves[1]
    exported = load_file(run.out / "model.safetensors")
    written = {path: path.stat().st_mtime_ns for path in run.run_dir.glob("*.safetensors")}
    assert len(written) == 3

    _run(target_dir, tmp_path, steps=6)
    assert (run.run_dir / "curves.jsonl").read_text().count("\n") == 2
    shards = {path: time for path, time in written.items() if "checkpoint" not in path.name}
    assert all(path.stat().st_mtime_ns == time for path, time in shards.items())
    again = load_file(run.out / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in exported.items())


def test_an_interrupted_run_keeps_what_it_had(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_step = Trainer.train_step

    def interrupted(self: Trainer) -> torch.Tensor:
        if self.step == 3:
            raise KeyboardInterrupt
        return train_step(self)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _run(target_dir, tmp_path, steps=6)
    monkeypatch.undo()
    trainer = _trainer(target_dir, _random_corpus(8))
    checkpoint = tmp_path / "run" / "checkpoint.safetensors"
    with pytest.raises(CheckpointError):
        load_checkpoint(trainer, {"draft": "another"}, checkpoint)
    load_checkpoint(trainer, {}, checkpoint)
    assert trainer.step == 3
    _run(target_dir, tmp_path, steps=6)


def test_a_shard_survives_the_disk(tmp_path: Path) -> None:
    corpus = _random_corpus(5)
    save_shard(corpus, tmp_path / "a" / "shard.safetensors")
    both = load_shards([tmp_path / "a" / "shard.safetensors"] * 2)
    assert torch.equal(both.tokens, torch.cat([corpus.tokens] * 2)) and both.num_answer_tokens == 10 * LENGTH


def test_an_epoch_holds_each_row_once_and_is_the_same_for_the_same_seed() -> None:
    corpus = _random_corpus(23)
    corpus.lengths[:] = torch.randint(1, LENGTH + 1, (23,), generator=torch.Generator().manual_seed(SEED))
    batches = corpus.epoch(SEED, 0, 4)
    rows = [row for picked, _ in batches for row in picked.tolist()]
    assert len(rows) == len(set(rows)) == 20
    assert [picked.tolist() for picked, _ in corpus.epoch(SEED, 0, 4)] == [p.tolist() for p, _ in batches]
    assert [picked.tolist() for picked, _ in corpus.epoch(SEED, 1, 4)] != [p.tolist() for p, _ in batches]
    assert all(length >= int(corpus.lengths[picked].max()) for picked, length in batches)


def test_a_bad_line_of_prompts_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(path)
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    assert read_prompts(path) == ["one", "two"]


def test_the_command_names_a_bad_option(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["--model", str(tmp_path / "nothing"), "--run-dir", str(tmp_path)])
    assert isinstance(result.exception, ConfigError)
    result = CliRunner().invoke(app, ["--anchors", "0"])
    assert result.exit_code == 2
