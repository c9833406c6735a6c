"""A run of the bench on a GPU: the device, the weights, the job, and what is shown and written.

Composition only.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from common.device import find_device
from common.model_dir import resolve_model_dir
from tools.bench_result import Row, as_json, write_json
from tools.chat import ChatTokenizer
from tools.gpu_bench.identity import compare_tokens, identity_asks, identity_table
from tools.gpu_bench.interruption import Interrupted, Interruption
from tools.gpu_bench.lineup import Lineup
from tools.gpu_bench.pair import Pair, check_shape
from tools.gpu_bench.plan import GpuPlan, Job, Mode
from tools.gpu_bench.prompts import ChatPrompts, Prompts, RandomPrompts
from tools.gpu_bench.read_speed import read_bandwidth_to_host
from tools.gpu_bench.rows import RowMeter, phases_of, rows_table, warnings_of
from tools.gpu_bench.served import TargetProcesses
from tools.gpu_bench.sizes import Sizes
from tools.gpu_bench.soak import Soak
from tools.gpu_bench.streaming import StreamMeter, streams_table

_SEED = 0


def bench_gpu(console: Console, plan: GpuPlan, json_path: Path | None) -> None:
    """Measure and show. typer.Exit with status 1 when a soak found something wrong, 130 after Ctrl-C; what
    was finished by then is shown and written."""
    if plan.random_shape is not None:
        check_shape(plan.random_shape)
    device = find_device(plan.device, torch.bfloat16)
    with Interruption() as interruption:
        bandwidth = read_bandwidth_to_host(device)
        device_name = _device_name(device)
        console.print(f"{device_name}: a pure read runs at {bandwidth / 1e12:.2f} TB/s")
        began_s = time.monotonic()
        pair = Pair.of(plan, torch.bfloat16, device)
        pair.check(plan)
        torch.cuda.synchronize(device)
        console.print(f"{pair.name}: weights in memory after {time.monotonic() - began_s:.0f} s")
        run = Run(console, plan, pair, device, device_name, bandwidth, interruption, json_path)
        try:
            broken = _JOBS[plan.job](run)
        except Interrupted:
            console.print("interrupted; what was finished is shown and written")
            raise typer.Exit(130) from None
    if broken:
        raise typer.Exit(1)


@dataclass
class Run:
    """What every job needs."""

    console: Console
    plan: GpuPlan
    pair: Pair
    device: torch.device
    device_name: str
    bandwidth_bytes_s: float
    interruption: Interruption
    json_path: Path | None

    def rows(self) -> bool:
        """The closed loop in each mode; False: nothing can be broken but by an error."""
        meter: RowMeter | None = None
        floor = self.pair.floor(self.bandwidth_bytes_s)
        try:
            with self.lineup() as lineup, self._progress() as progress:
                meter = RowMeter(
                    self.plan, lineup.contenders, floor, self._prompts(), self.interruption.check
                )
                task = progress.add_task("", total=meter.num_rounds)

                def show(row: Row) -> None:
                    progress.update(task, advance=1, description=f"{row.mode} x {row.concurrency}")

                meter.run(show)
                self._warn(f"{event}, {count} times" for event, count in lineup.events.counts.items())
                self._warn(sorted({f"waits: {at}" for c in lineup.contenders for at in c.syncs}))
        finally:
            if meter is not None:
                self.console.print(rows_table(meter.rows, self.plan.accept_kind))
                for line in phases_of(meter.rows):
                    self.console.print(line)
                self._warn(warnings_of(meter.rows))
                floors_ms = {mode.value: floor.weights_ms(mode) for mode in self.plan.modes}
                self._write(meter.rows, floors_ms, {})
        return False

    def streaming(self) -> bool:
        """Readers of streams against the core alone; False: nothing can be broken but by an error."""
        meters: list[StreamMeter] = []
        vocab_size = self.pair.weights.config.vocab_size
        sizes = Sizes.of(self.plan, self.pair.block_size)
        try:
            with contextlib.ExitStack() as ending:
                services = {mode: TargetProcesses(self.plan, sizes, mode) for mode in self.plan.modes}
                for service in services.values():
                    ending.callback(service.close)
                    service.start()
                lineup = ending.enter_context(self.lineup())
                progress = ending.enter_context(self._progress())
                for contender in lineup.contenders:
                    service = services[contender.mode]
                    service.wait_serving()
                    meter = StreamMeter(
                        self.plan, contender, service.served, vocab_size, self.interruption.check
                    )
                    meters.append(meter)
                    task = progress.add_task("", total=meter.num_rounds)

                    def show(row: Row, task: TaskID = task) -> None:
                        progress.update(task, advance=1, description=f"{row.mode} x {row.concurrency}")

                    meter.run(show)
                    self.console.print(f"{contender.mode}: the service has {service.num_fronts} fronts")
        finally:
            for meter in meters:
                self.console.print(streams_table(meter))
            self._write([], {}, {"rows": [row for meter in meters for row in meter.as_json()]})
        return False

    def identity(self) -> bool:
        """Tokens with and without drafts; differences are reported, and break nothing."""
        asks = identity_asks(self.plan, self._prompts(), _SEED)
        with self.lineup() as lineup, self._progress() as progress:
            task = progress.add_task("", total=None)

            def show(mode: Mode, concurrency: int) -> None:
                progress.update(task, description=f"{len(asks)} prompts, {mode} x {concurrency}")

            comparisons = compare_tokens(
                self.plan, lineup.contenders, asks, lineup.learn, self.interruption.check, show
            )
        self.console.print(identity_table(comparisons, self.plan.row_independent))
        found = [comparison.as_json() for comparison in comparisons]
        self._write([], {}, {"identity": found, "row_independent": self.plan.row_independent})
        return False

    def soak(self) -> bool:
        """Many steps; True when something was wrong at the end."""
        soak: Soak | None = None
        try:
            with self.lineup() as lineup, self._progress() as progress:
                (subject,) = lineup.contenders
                soak = Soak(self.plan, subject, self._prompts(), _SEED)
                task = progress.add_task(f"soak, {subject.mode}", total=self.plan.amount)
                soak.run(self.interruption.check, lambda steps: progress.update(task, completed=steps))
                events = [f"link: {event}, {count} times" for event, count in lineup.events.counts.items()]
                soak.result.complaints += events
        finally:
            if soak is not None:
                self._write([], {}, {"soak": soak.result.as_json()})
        result = soak.result
        self.console.print(
            f"{result.num_steps} steps, {result.num_requests} requests ({result.num_cancelled} cancelled), "
            f"{result.num_tokens} tokens"
        )
        for complaint in result.complaints:
            self.console.print(f"[bold red]{complaint}[/]")
        if not result.complaints:
            self.console.print("memory flat, every page accounted for")
        return bool(result.complaints)

    def lineup(self) -> Lineup:
        """All modes, ready; says what is captured meanwhile."""
        began_s = time.monotonic()
        sizes = Sizes.of(self.plan, self.pair.block_size)
        with self._progress() as progress:
            task = progress.add_task("starting")

            def show(what: str, done: int, total: int) -> None:
                progress.update(task, completed=done, total=total, description=f"capturing graphs, {what}")

            lineup = Lineup(self.plan, self.pair, sizes, self.device, self.interruption.is_wanted, show)
        # A full pass of the collector over what was loaded takes 0.2 s, 30 steps.
        gc.collect()
        gc.freeze()
        self.console.print(f"{', '.join(self.plan.modes)}: ready after {time.monotonic() - began_s:.0f} s")
        return lineup

    def _prompts(self) -> Prompts:
        if self.plan.model is None:
            return RandomPrompts(self.pair.weights.config.vocab_size, self.plan.prompt_tokens)
        directory = resolve_model_dir(self.plan.model, field="model")
        return ChatPrompts(ChatTokenizer(directory), self.plan.prompt_tokens)

    def _warn(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.console.print(Text(line, "bold yellow"))

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Progress]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Redrawn once a second: more would take the interpreter lock from the loop that is measured.
        with Progress(*columns, console=self.console, transient=True, refresh_per_second=1) as progress:
            yield progress

    def _write(self, rows: Sequence[Row], floors_ms: dict[str, float], more: dict[str, Any]) -> None:
        if self.json_path is None:
            return
        result = as_json(
            rows,
            device=self.device_name,
            model_name=self.pair.name,
            block_size=self.pair.block_size or 1,
            accept_kind=self.plan.accept_kind,
            floors_ms=floors_ms,
        )
        result |= more
        asked = {"prompt_tokens": self.plan.prompt_tokens, "max_new_tokens": self.plan.max_new_tokens}
        if self.plan.row_independent:
            asked["row_independent"] = True
        result["rows"] = [row | asked for row in result["rows"]]
        write_json(self.json_path, result)


_JOBS = {Job.ROWS: Run.rows, Job.STREAMING: Run.streaming, Job.IDENTITY: Run.identity, Job.SOAK: Run.soak}


def _device_name(device: torch.device) -> str:
    return (
        f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Triton {triton.__version__}"
    )
