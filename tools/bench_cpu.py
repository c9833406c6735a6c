"""The bench on a CPU: plain and drafted decoding of the services, and of a peer, in turn.

Composition only: which rows are measured, the table. Prefill is left out: a rate counts from the first
token to the last.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from common.errors import ConfigError
from common.pb.tandem.v1 import target_pb2
from tools.bench_result import Row, as_json, run_rounds, same_tokens, write_json
from tools.bench_rows import INLINE, PLAIN, TRANSFORMERS, Load, peer_round, service_round
from tools.chat import ChatTokenizer
from tools.launch import existing_dirs, report_drafter, start_stack, wait_for_drafter
from tools.local_stack import LocalStack
from tools.memory_floor import read_bandwidth_bytes_s, step_floor_bytes
from tools.peer_transformers import TransformersPeer
from tools.sample_prompts import SAMPLE_PROMPTS
from tools.target_client import GenerateOptions, TargetClient


@dataclass(frozen=True)
class CpuPlan:
    """What to measure, as the options say it. peer: whether transformers runs beside the services."""

    model: str
    draft: str
    concurrency: tuple[int, ...]
    max_new_tokens: int
    num_rounds: int
    temperature: float
    top_p: float
    threads: int
    peer: bool


def bench_cpu(console: Console, plan: CpuPlan, json_path: Path | None) -> None:
    """Measure and show. typer.Exit with status 1 when drafts change a token, 130 after Ctrl-C."""
    if plan.peer and plan.temperature:
        raise ConfigError(
            "temperature", "must be 0 with --peer, whose noise is not ours", given=plan.temperature
        )
    model_dir, draft_dir = existing_dirs(plan.model, plan.draft)
    tokenizer = ChatTokenizer(model_dir)
    load = Load(
        [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in SAMPLE_PROMPTS],
        GenerateOptions(
            max_new_tokens=plan.max_new_tokens,
            temperature=plan.temperature,
            top_p=plan.top_p,
            seed=0,
            ignore_eos=True,
        ),
    )
    bandwidth = read_bandwidth_bytes_s()
    rows = [Row(mode, level) for level in plan.concurrency for mode in (PLAIN, INLINE)]
    rows += [Row(TRANSFORMERS, 1)] if plan.peer else []
    try:
        with start_stack(console, model_dir, draft_dir, ["--threads", str(plan.threads)]) as stack:
            peer = _load_peer(console, plan, model_dir)
            facts = _measure(console, stack, rows, load, plan.num_rounds, peer)
    except KeyboardInterrupt:
        console.print("\ninterrupted; both services have ended")
        raise typer.Exit(130) from None
    floors_ms = {
        PLAIN: 1000 * step_floor_bytes(model_dir, None) / bandwidth,
        INLINE: 1000 * step_floor_bytes(model_dir, draft_dir) / bandwidth,
    }
    result = as_json(
        rows,
        device=f"cpu: {platform.machine()}, {os.cpu_count()} cores",
        model_name=model_dir.name,
        block_size=facts.block_size,
        accept_kind="real",
        floors_ms=floors_ms,
    )
    console.print(_table(rows, floors_ms))
    _print_phases(console, result["rows"])
    console.print(
        f"a pure read runs at {bandwidth / 1e9:.1f} GB/s here; the floor is the weights' bytes at that rate"
    )
    ours = [row for row in rows if row.mode != TRANSFORMERS]
    if plan.peer:
        console.print(
            f"same tokens as {TRANSFORMERS}: {'yes' if same_tokens(rows) else 'no (near ties may differ)'}"
        )
    if json_path is not None:
        write_json(json_path, result)
    if not same_tokens(ours):
        console.print("[bold red]plain and drafted tokens differ: this must never happen[/]")
        raise typer.Exit(1)


def _load_peer(console: Console, plan: CpuPlan, model_dir: Path) -> TransformersPeer | None:
    if not plan.peer:
        return None
    console.print(f"loading {TRANSFORMERS} …")
    return TransformersPeer(model_dir, plan.threads)


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
