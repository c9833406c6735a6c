"""Callers with streams against the core alone: the same load, the same statistic, in turn.

A round puts as many requests as there are streams through at once, each to its end. The core's rounds run in
this process without front, sockets and readers; those of the service by gRPC clients in processes of their
own, on the same machine. The rate counts while all of them decode; `tok_s_end_to_end` is over everything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from tools.bench_result import Row, run_rounds
from tools.closed_loop import common_window
from tools.gpu_bench.contender import Contender
from tools.gpu_bench.core_load import Ask, BenchFailed
from tools.gpu_bench.plan import GpuPlan
from tools.gpu_bench.step_log import median_phases_ms, median_step_ms, steady_steps, window_tok_s
from tools.gpu_bench.stream_readers import StreamLoad, StreamReaders
from tools.scrape import mean_ms, scrape
from tools.target_client import ReceivedDelta

CORE, STREAMS = "core", "grpc"
_TARGET_STEP = "tandem_target_step_time_seconds"


@dataclass(frozen=True)
class Served:
    """A target that serves: where callers and metrics find it."""

    address: str
    metrics_url: str


class StreamMeter:
    """Fills two rows a level: the core alone, and the service with readers."""

    def __init__(
        self, plan: GpuPlan, contender: Contender, served: Served, vocab_size: int, check: Callable[[], None]
    ) -> None:
        """check raises when the run shall end; a round that it cut short is thrown away."""
        self._plan, self._contender, self._served = plan, contender, served
        self._vocab_size = vocab_size
        self._check = check
        self.core = [Row(contender.mode, level) for level in plan.concurrency]
        self.streams = [Row(contender.mode, level) for level in plan.concurrency]

    @property
    def num_rounds(self) -> int:
        """Rounds of all rows together, those to warm up included."""
        return 2 * (self._plan.num_rounds + 1) * len(self.core)

    def run(self, on_round: Callable[[Row], None]) -> None:
        """Measure everything, level by level."""
        for core, streams in zip(self.core, self.streams, strict=True):

            def measure(row: Row, turn: int, core: Row = core) -> None:
                (self._core_round if row is core else self._stream_round)(row, turn)

            for row, run in ((core, self._core_round), (streams, self._stream_round)):
                on_round(row)
                run(Row(row.mode, row.concurrency), -1)
            run_rounds([core, streams], self._plan.num_rounds, measure, on_round)

    def _load(self, turn: int) -> StreamLoad:
        plan = self._plan
        return StreamLoad(turn + 1, plan.prompt_tokens, plan.max_new_tokens, self._vocab_size)

    def _core_round(self, row: Row, turn: int) -> None:
        load = self._load(turn)
        asks = [Ask(load.prompt(i), load.max_new_tokens) for i in range(row.concurrency)]
        times, steps = self._contender.run(asks, row.concurrency)
        self._check()
        firsts = [answer.first_token_at_s for answer in times.answers]
        lasts = [answer.last_token_at_s for answer in times.answers]
        steady = steady_steps(steps, row.concurrency)
        if not steady:
            raise BenchFailed(f"{row.mode} x {row.concurrency}: no step in which all requests decoded")
        row.tok_s.append(window_tok_s(steps, firsts, lasts))
        row.step_ms.append(median_step_ms(steady))
        row.phases_ms.append(median_phases_ms(steps, steady))
        row.more.setdefault("tok_s_end_to_end", []).append(times.end_to_end_tok_s)

    def _stream_round(self, row: Row, turn: int) -> None:
        with StreamReaders(self._served.address, row.concurrency, self._load(turn)) as readers:
            before = scrape(self._served.metrics_url)
            began_s = time.perf_counter()
            streams = readers.run_to_host()
            after = scrape(self._served.metrics_url)
        self._check()
        num_tokens = sum(len(delta.token_ids) for stream in streams for delta in stream)
        ended_s = max(stream[-1].at_s for stream in streams)
        row.tok_s.append(common_window(streams).tok_s)
        row.step_ms.append(statistics.median(_ms_a_message(stream) for stream in streams))
        row.phases_ms.append(mean_ms(before, after, _TARGET_STEP, "phase"))
        row.more.setdefault("tok_s_end_to_end", []).append(num_tokens / (ended_s - began_s))
        messages = sum(len(stream) for stream in streams)
        row.more.setdefault("tokens_a_message", []).append(num_tokens / messages)

    def as_json(self) -> list[dict[str, object]]:
        """The rows that were measured, each with what it went through."""
        pairs = ((CORE, self.core), (STREAMS, self.streams))
        measured = ((through, row) for through, rows in pairs for row in rows if row.measured)
        return [row.as_json(None) | {"through": through} for through, row in measured]


def _ms_a_message(stream: Sequence[ReceivedDelta]) -> float:
    return 1000 * (stream[-1].at_s - stream[0].at_s) / max(len(stream) - 1, 1)


def streams_table(meter: StreamMeter) -> Table:
    """Each level's two rows side by side."""
    table = Table(title="streams of gRPC clients against the core alone (medians of rounds)")
    for heading in (
        "streams", "core tok/s", "gRPC tok/s", "difference", "core end to end", "gRPC end to end",
        "difference", "core step ms", "ms a message", "core host ms", "service host ms",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for core, streams in zip(meter.core, meter.streams, strict=True):
        if core.measured and streams.measured:
            a, b = core.as_json(None), streams.as_json(None)
            table.add_row(
                str(core.concurrency),
                f"{a['tok_s']:.0f}",
                f"{b['tok_s']:.0f}",
                f"{b['tok_s'] / a['tok_s'] - 1:+.1%}",
                f"{a['tok_s_end_to_end']:.0f}",
                f"{b['tok_s_end_to_end']:.0f}",
                f"{b['tok_s_end_to_end'] / a['tok_s_end_to_end'] - 1:+.1%}",
                f"{a['step_ms']:.2f}",
                f"{b['step_ms']:.2f}",
                f"{a['phases_ms'].get('host', 0):.2f}",
                f"{b['phases_ms'].get('host', 0):.2f}",
            )
    return table
