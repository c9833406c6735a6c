"""A whole training run: the stages in order, what is shown of them, and where each leaves off.

The run directory holds shards of text, one checkpoint and `curves.jsonl`; starting again with the same
arguments goes on where it stopped.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)

from common.errors import ConfigError
from common.weights import read_config
from services.drafter.model.dflash import DFlashConfig
from tools.chat import ChatTokenizer
from tools.train.acceptance import Acceptance
from tools.train.checkpoint import load_checkpoint, save_checkpoint
from tools.train.corpus import Corpus
from tools.train.dense_target import DenseTarget
from tools.train.draft_weights import draft_config_json, export_draft, map_weights, spread_layers
from tools.train.synthesis import ChatFrame, SynthesisSettings, read_prompts, special_ids, synthesize
from tools.train.trainer import Trainer, TrainingSettings

CHECKPOINT, CURVES = "checkpoint.safetensors", "curves.jsonl"
LOSS_EVERY_STEPS = 50


@dataclass(frozen=True)
class DraftShape:
    """What kind of draft is trained. captured_layer_ids empty: five, evenly spread."""

    num_layers: int
    block_size: int
    mask_token_id: int
    captured_layer_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class RunSettings:
    """Where, on what, and how often to save and measure."""

    model_dir: Path
    run_dir: Path
    out: Path
    prompts: Path | None
    device: str
    measure_every_steps: int = 2000
    save_every_steps: int = 2000
    # A lease ends before a run does: save, export and stop.
    stop_after_s: float = float("inf")


def run_training(
    run: RunSettings,
    shape: DraftShape,
    synthesis: SynthesisSettings,
    training: TrainingSettings,
    console: Console,
) -> Acceptance:
    """All stages. Returns the acceptance on held-out text of what was exported.

    KeyboardInterrupt passes through after the checkpoint is written.
    """
    started = time.monotonic()
    device = torch.device(run.device)
    on_gpu = device.type == "cuda"
    target_json = read_config(run.model_dir)
    ids = shape.captured_layer_ids or spread_layers(target_json["num_hidden_layers"], 5)
    config_json = draft_config_json(
        target_json,
        num_layers=shape.num_layers,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        captured_layer_ids=ids,
    )
    target = DenseTarget(run.model_dir, device, torch.bfloat16 if on_gpu else torch.float32, fused=on_gpu)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console,
    )
    with progress:
        corpus, held_out = _write_text(run, target, synthesis, progress)
        console.print(
            f"{len(corpus)} conversations, {corpus.num_answer_tokens} answer tokens to learn from",
            highlight=False,
        )
        config = DFlashConfig.from_json(config_json)
        trainer = Trainer(target, config, config_json, training, corpus.to(device), fused=on_gpu)
        identity = _identity(config_json, synthesis, training, target.contract.weights_fingerprint)
        checkpoint = run.run_dir / CHECKPOINT
        if checkpoint.exists():
            load_checkpoint(trainer, identity, checkpoint)
            console.print(f"resumed at step {trainer.step}", highlight=False)
        try:
            _train(trainer, run, held_out.to(device), identity, progress, stop_at=started + run.stop_after_s)
        finally:
            save_checkpoint(trainer, identity, checkpoint)
        found = trainer.measure(held_out.to(device))
        export_draft(map_weights(trainer.weights, torch.Tensor.detach), config_json, run.out)
    return found


def _write_text(
    run: RunSettings, target: DenseTarget, settings: SynthesisSettings, progress: Progress
) -> tuple[Corpus, Corpus]:
    if not target.config.eos_token_ids:
        raise ConfigError("eos_token_id", "must be in the target's config.json", given=None)
    frame = ChatFrame(ChatTokenizer(run.model_dir), target.config.eos_token_ids[0])
    prompts = read_prompts(run.prompts) if run.prompts else []
    task = progress.add_task("writing", total=None, note="tokens")
    done = synthesize(
        target,
        frame,
        settings,
        special_ids(run.model_dir),
        prompts,
        run.run_dir,
        lambda tokens, total: progress.update(task, completed=tokens, total=total),
    )
    progress.remove_task(task)
    return done


def _train(
    trainer: Trainer,
    run: RunSettings,
    held_out: Corpus,
    identity: dict[str, Any],
    progress: Progress,
    stop_at: float,
) -> None:
    total = trainer.settings.num_steps
    task = progress.add_task("training", total=total, completed=trainer.step, note="")
    since, tick = trainer.step, time.monotonic()
    with (run.run_dir / CURVES).open("a", encoding="utf-8") as curves:
        while trainer.step < total and time.monotonic() < stop_at:
            loss = trainer.train_step()
            entry: dict[str, Any] = {}
            if trainer.step % LOSS_EVERY_STEPS == 0 or trainer.step == total:
                loss_value = _to_host(loss)
                now = time.monotonic()
                entry |= {
                    "loss": round(loss_value, 4),
                    "step_s": round((now - tick) / (trainer.step - since), 5),
                }
                since, tick = trainer.step, now
                progress.update(task, completed=trainer.step, note=f"loss {loss_value:.3f}")
            if trainer.step % run.measure_every_steps == 0 or trainer.step == total:
                for name, share in (
                    ("greedy", held_out.temperature == 0),
                    ("sampled", held_out.temperature > 0),
                ):
                    if bool(share.any()):
                        entry[name] = asdict(trainer.measure(held_out.take(share.nonzero().squeeze(1))))
                        progress.console.print(
                            f"step {trainer.step}: {name} accept length {entry[name]['accept_length']:.3f}",
                            highlight=False,
                        )
                tick = time.monotonic()
            if entry:
                curves.write(json.dumps({"step": trainer.step} | entry) + "\n")
                curves.flush()
            if trainer.step % run.save_every_steps == 0:
                save_checkpoint(trainer, identity, run.run_dir / CHECKPOINT)


def _identity(
    config_json: dict[str, Any], synthesis: SynthesisSettings, training: TrainingSettings, target: str
) -> dict[str, Any]:
    """What must be the same for a checkpoint to be gone on from."""
    return {
        "draft": config_json,
        "synthesis": asdict(synthesis),
        "training": asdict(training),
        "target": target,
    }


def _to_host(value: torch.Tensor) -> float:
    return float(value)
