"""`tandem train`: arguments only; the run itself is in run.py."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from common.errors import ConfigError
from common.model_dir import resolve_model_dir
from tools.train.acceptance import Acceptance
from tools.train.head_loss import Weighting
from tools.train.run import CHECKPOINT, DraftShape, RunSettings, run_training
from tools.train.synthesis import SynthesisSettings
from tools.train.trainer import TrainingSettings

app = typer.Typer(add_completion=False)


@app.command()
def train(
    model: Annotated[
        str, typer.Option(help="The target: a directory or a Hugging Face id.")
    ] = ".models/SmolLM2-135M-Instruct",
    out: Annotated[Path, typer.Option(help="Where the draft goes, in z-lab's format.")] = Path(
        ".train/draft"
    ),
    run_dir: Annotated[Path, typer.Option(help="Text, checkpoint and curves; the same one resumes.")] = Path(
        ".train"
    ),
    fresh: Annotated[bool, typer.Option(help="Drop an earlier checkpoint; the text is kept.")] = False,
    prompts: Annotated[
        Path | None, typer.Option(help='JSONL with {"prompt": …}, answered by the target.')
    ] = None,
    rows: Annotated[int, typer.Option(help="Conversations to write.", min=1)] = 65536,
    rows_at_once: Annotated[int, typer.Option(help="Conversations written side by side.", min=1)] = 2048,
    max_len: Annotated[int, typer.Option(help="Tokens of a conversation.", min=64)] = 1024,
    steps: Annotated[int, typer.Option(help="Updates.", min=1)] = 20000,
    batch: Annotated[int, typer.Option(help="Conversations a step.", min=1)] = 16,
    anchors: Annotated[int, typer.Option(help="Draft blocks in each of them.", min=1)] = 128,
    learning_rate: Annotated[float, typer.Option(help="Peak, after warm-up.", min=0.0)] = 6e-4,
    weighting: Annotated[Weighting, typer.Option(help="How the rows of a block count.")] = Weighting.DECAY,
    layers: Annotated[int, typer.Option(help="Layers of the draft.", min=1)] = 3,
    block_size: Annotated[int, typer.Option(help="Rows of a block, the anchor included.", min=2)] = 8,
    mask_token_id: Annotated[int, typer.Option(help="A token that no text holds.", min=0)] = 16,
    taps: Annotated[
        str, typer.Option(help="Target layers to capture, e.g. 1,7,14 (default: 5, spread).")
    ] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu (default: cuda where there is one).")] = "",
    stop_after_s: Annotated[
        float, typer.Option(help="Save, export and stop after this long.", min=0)
    ] = float("inf"),
    seed: Annotated[int, typer.Option(help="Everything random follows from it.", min=0)] = 0,
) -> None:
    """Train a draft: the target writes text, the draft learns to foresee it, the result is exported."""
    console = Console(stderr=True)
    if anchors > max_len:
        raise ConfigError("anchors", f"must be at most max_len {max_len}", given=anchors)
    run = RunSettings(
        model_dir=resolve_model_dir(model),
        run_dir=run_dir,
        out=out,
        prompts=prompts,
        device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
        stop_after_s=stop_after_s,
    )
    if fresh:
        (run_dir / CHECKPOINT).unlink(missing_ok=True)
    shape = DraftShape(layers, block_size, mask_token_id, _parse_ids(taps))
    synthesis = SynthesisSettings(num_rows=rows, rows_at_once=rows_at_once, max_len=max_len, seed=seed)
    training = TrainingSettings(
        num_steps=steps,
        batch_rows=batch,
        num_anchors=anchors,
        learning_rate=learning_rate,
        weighting=weighting,
        seed=seed,
    )
    try:
        found = run_training(run, shape, synthesis, training, console)
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        raise typer.Exit(130) from None
    console.print(_table(found))
    console.print(f"wrote {out}", highlight=False)


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part)
    except ValueError:
        raise ConfigError("taps", "must be layer ids with commas between", given=text) from None


def _table(found: Acceptance) -> Table:
    table = Table(title=f"held-out accept length {found.accept_length:.3f} over {found.num_steps} verifies")
    table.add_column("first k drafts accepted", justify="right")
    table.add_column("share", justify="right")
    for k, share in enumerate(found.by_row, start=1):
        table.add_row(str(k), f"{share:.3f}")
    return table
