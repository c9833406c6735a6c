"""`tandem bench`: decode speed of plain and drafted decoding, and of a peer, in one run and in turn.

Composition only: which rows are measured, the table, the JSON.
"""

from __future__ import annotations

import datetime
import enum
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.errors import ConfigError
from common.pb.tandem.v1 import target_pb2
from tools.bench_rows import (
    INLINE,
    PLAIN,
    TRANSFORMERS,
    Load,
    Row,
    peer_round,
    run_rounds,
    same_tokens,
    service_round,
)
from tools.chat import ChatTokenizer
from tools.launch import (
    DEFAULT_DRAFT,
    DEFAULT_MODEL,
    check_json_path,
    existing_dirs,
    leave_on_sigterm,
    report_drafter,
    start_stack,
    wait_for_drafter,
)
from tools.local_stack import LocalStack
from tools.memory_floor import read_bandwidth_bytes_s, step_floor_bytes
from tools.peer_transformers import TransformersPeer
from tools.sample_prompts import SAMPLE_PROMPTS
from tools.target_client import GenerateOptions, TargetClient

app = typer.Typer(add_completion=False)


class Peer(enum.StrEnum):
    """Other implementations that can run beside ours."""

    TRANSFORMERS = TRANSFORMERS


@app.command(
    epilog="Examples:  tandem bench --peer transformers  |  "
    "tandem bench --concurrency 1,4 --json bench.json  |  tandem bench --temperature 0.8 --top-p 0.95"
)
def bench(
    model: Annotated[
        str, typer.Option(help="Target: a model directory or a Hugging Face id.")
    ] = DEFAULT_MODEL,
    draft: Annotated[str, typer.Option(help="Draft: a directory or a Hugging Face id.")] = DEFAULT_DRAFT,
    concurrency: Annotated[str, typer.Option(help="Requests at once; several, separated by commas.")] = "1",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each answer; none ends early.", min=8)] = 96,
    rounds: Annotated[
        int, typer.Option(help="Times that each row is measured; medians are shown.", min=1)
    ] = 3,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0.0, max=100.0)] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus; only counts above temperature 0.", max=1.0)] = 1.0,
    threads: Annotated[
        int, typer.Option(help="CPU threads of each implementation; 0 leaves it to the library.", min=0)
    ] = 0,
    peer: Annotated[Peer | None, typer.Option(help="Measure this beside ours (greedy only).")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the results here.", dir_okay=False)
    ] = None,
) -> None:
    """Measure decode speed, plain and with drafts, on services started for the purpose. Prefill is left
    out: a rate counts from the first token to the last. Exit status 1 when drafts change a token."""
    leave_on_sigterm()
    console = Console(highlight=False)
    levels = _levels(concurrency)
    if peer and temperature:
        raise ConfigError("temperature", "must be 0 with --peer, whose noise is not ours", given=temperature)
    check_json_path(json_path)
    model_dir, draft_dir = existing_dirs(model, draft)
    tokenizer = ChatTokenizer(model_dir)
    load = Load(
        [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in SAMPLE_PROMPTS],
        GenerateOptions(
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=0, ignore_eos=True
        ),
    )
    bandwidth = read_bandwidth_bytes_s()
    rows = [Row(mode, level) for level in levels for mode in (PLAIN, INLINE)]
    rows += [Row(TRANSFORMERS, 1)] if peer else []
    try:
        with start_stack(console, model_dir, draft_dir, ["--threads", str(threads)]) as stack:
            facts = _measure(
                console, stack, rows, load, rounds, _load_peer(console, peer, model_dir, threads)
            )
    except KeyboardInterrupt:
        console.print("\ninterrupted; both services have ended")
        raise typer.Exit(130) from None
    floors_ms = {
        PLAIN: 1000 * step_floor_bytes(model_dir, None) / bandwidth,
        INLINE: 1000 * step_floor_bytes(model_dir, draft_dir) / bandwidth,
    }
    result = as_json(rows, model_dir.name, facts.block_size, floors_ms)
    console.print(_table(rows, floors_ms))
    _print_phases(console, result["rows"])
    console.print(
        f"a pure read runs at {bandwidth / 1e9:.1f} GB/s here; the floor is the weights' bytes at that rate"
    )
    ours = [row for row in rows if row.mode != TRANSFORMERS]
    if peer:
        console.print(f"same tokens as {peer}: {'yes' if same_tokens(rows) else 'no (near ties may differ)'}")
    if json_path is not None:
        json_path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if not same_tokens(ours):
        console.print("[bold red]plain and drafted tokens differ: this must never happen[/]")
        raise typer.Exit(1)


def _levels(text: str) -> list[int]:
    try:
        levels = [int(part) for part in text.split(",")]
    except ValueError:
        levels = []
    if not levels or not all(1 <= level <= 256 for level in levels):
        raise ConfigError("concurrency", "must be integers from 1 to 256, separated by commas", given=text)
    return levels


def _load_peer(console: Console, peer: Peer | None, model_dir: Path, threads: int) -> TransformersPeer | None:
    if peer is None:
        return None
    console.print(f"loading {peer} …")
    return TransformersPeer(model_dir, threads)


def _measure(
    console: Console,
    stack: LocalStack,
    rows: Sequence[Row],
    load: Load,
    num_rounds: int,
    peer: TransformersPeer | None,
) -> target_pb2.GetServerInfoResponse:
    """Fill the rows; returns the target's facts."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with TargetClient(stack.target.address) as client:
        facts = wait_for_drafter(client)
        report_drafter(console, facts)

        def run(row: Row, turn: int) -> None:
            if row.mode == TRANSFORMERS:
                assert peer is not None
                peer_round(row, turn, load, peer)
            else:
                service_round(row, turn, load, client, stack)

        # A bar that redraws ten times a second is work on the very cores that are measured.
        with Progress(*columns, console=console, transient=True, refresh_per_second=1) as progress:
            task = progress.add_task("warming up", total=(num_rounds + 1) * len(rows))

            def show(row: Row) -> None:
                progress.update(task, advance=1, description=f"{row.mode} x {row.concurrency}")

            # Whole rounds, thrown away: first uses allocate, and caches and clocks settle.
            run_rounds([Row(row.mode, row.concurrency) for row in rows], 1, run, show)
            run_rounds(rows, num_rounds, run, show)
    return facts


def as_json(
    rows: Sequence[Row], model_name: str, block_size: int, floors_ms: dict[str, float]
) -> dict[str, Any]:
    """The results as `--json` writes them."""
    lengths = [length for row in rows for length in row.accept_length]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": f"cpu: {platform.machine()}, {os.cpu_count()} cores",
        "model": model_name,
        "block_size": block_size,
        "accept": {"kind": "real", "length": statistics.fmean(lengths) if lengths else None},
        "rows": [row.as_json(floors_ms.get(row.mode)) for row in rows],
    }


def _commit() -> str | None:
    """The checkout's commit; None outside one."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _table(rows: Sequence[Row], floors_ms: dict[str, float]) -> Table:
    table = Table(title="decoding (medians; from the first token to the last, prefill left out)")
    for heading in (
        "mode",
        "at once",
        "tok/s",
        "step ms",
        "accept length",
        "of the floor",
        "x plain",
        "x peer",
    ):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    by_key = {(row.mode, row.concurrency): row.median_tok_s for row in rows}
    for row in rows:
        result = row.as_json(floors_ms.get(row.mode))
        plain, peer = by_key[PLAIN, row.concurrency], by_key.get((TRANSFORMERS, row.concurrency))
        length, fraction = result.get("accept_length"), result["floor_fraction"]
        table.add_row(
            row.mode,
            str(row.concurrency),
            f"{row.median_tok_s:.1f}",
            f"{result['step_ms']:.1f}",
            f"{length:.2f}" if length is not None else "",
            f"{fraction:.0%}" if fraction is not None else "",
            f"{row.median_tok_s / plain:.2f}" if plain else "",
            f"{row.median_tok_s / peer:.2f}" if peer else "",
        )
    return table


def _print_phases(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Where the time of a step goes, by the services' own clocks."""
    for row in rows:
        phases = ", ".join(f"{phase} {ms:.1f}" for phase, ms in row["phases_ms"].items())
        if phases:
            console.print(f"{row['mode']} x {row['concurrency']}, mean ms a step by phase: {phases}")
