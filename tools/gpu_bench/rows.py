"""The rows of the bench: rounds of the closed loop in each mode in turn, and the table.

What the figures of a row mean:

- `step_ms`: median time between two completions, over steady steps (see step_log).
- `tok_s`: tokens committed in steady steps over the time they took: the decode rate alone, between the first
  and the last token of requests that all decode. Prompts, ramp-up and ramp-down are not in it.
- `tok_s_end_to_end`: all output tokens of a round over the time from the first submission to the last token,
  prompts, ramp-up and ramp-down included: what vLLM's benchmark calls output token throughput.
- `floor_fraction`: what a step would take that only read each weight once, at the speed of a pure read in
  this run, over step_ms. `floor_fraction_with_kv` adds the K/V that its attention must read.
- `undrafted_share`: decode steps of a request without a draft, of all; `host_syncs`: operations that made the
  host wait unseen. Both should be 0.
- `accept_length`: as measured. Where it was set, and not earned by a draft, the table and the JSON say
  `synthetic`.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence

from rich.table import Table

from services.target.core.request import SamplingParams
from tools.bench_result import Row, run_rounds
from tools.gpu_bench.contender import Contender
from tools.gpu_bench.core_load import Ask, BenchFailed
from tools.gpu_bench.floor import Floor
from tools.gpu_bench.plan import GpuPlan, Mode
from tools.gpu_bench.prompts import Prompts
from tools.gpu_bench.step_log import (
    accept_length,
    decode_tok_s,
    median_phases_ms,
    median_step_ms,
    steady_steps,
    undrafted_share,
)

# A median over fewer steps moves by more than the per cent that is asked about.
_STEPS_A_ROUND = 192
# What a draft is thought to earn, as long as nobody knows: fixes how many requests a round takes.
_ACCEPT_LENGTH_GUESS = 3.0
# A request's first step after its prompt may be without a draft, one in 48 at 8 tokens a step.
_UNDRAFTED_SHARE_MAX = 0.03
# Tokens of a request of the round that is thrown away: kernels, caches and clocks settle.
_WARM_UP_TOKENS = 48


class RowMeter:
    """Fills rows, level by level: all modes of a concurrency are measured in turn, round by round."""

    def __init__(
        self,
        plan: GpuPlan,
        contenders: Sequence[Contender],
        floor: Floor,
        prompts: Prompts,
        check: Callable[[], None],
    ) -> None:
        """check raises when the run shall end; a round that it cut short is thrown away."""
        self._plan = plan
        self._contenders = {contender.mode: contender for contender in contenders}
        self._floor = floor
        self._prompts = prompts
        self._check = check
        self.rows = [Row(mode, level) for level in plan.concurrency for mode in self._contenders]

    @property
    def num_rounds(self) -> int:
        """Rounds of all rows together, those to warm up included."""
        return (self._plan.num_rounds + 1) * len(self.rows)

    def run(self, on_round: Callable[[Row], None]) -> None:
        """Measure everything."""
        for level in self._plan.concurrency:
            rows = [row for row in self.rows if row.concurrency == level]
            warm_up = [Row(row.mode, row.concurrency) for row in rows]
            run_rounds(warm_up, 1, self._warm_up, on_round)
            run_rounds(rows, self._plan.num_rounds, self._round, on_round)

    def _warm_up(self, row: Row, turn: int) -> None:
        asks = self._asks(row, -1, row.concurrency, min(_WARM_UP_TOKENS, self._plan.max_new_tokens))
        self._contenders[Mode(row.mode)].run(asks, row.concurrency)
        self._check()

    def _round(self, row: Row, turn: int) -> None:
        contender, num_tokens = self._contenders[Mode(row.mode)], self._plan.max_new_tokens
        num_requests = row.concurrency * self._waves(contender.mode)
        contender.take_drafting_ms()
        syncs_before = len(contender.syncs)
        asks = self._asks(row, turn, num_requests, num_tokens)
        times, steps = contender.run(asks, row.concurrency)
        self._check()
        steady = steady_steps(steps, row.concurrency)
        if not steady:
            raise BenchFailed(f"{row.mode} x {row.concurrency}: no step in which all requests decoded")
        step_ms = median_step_ms(steady)
        row.tok_s.append(decode_tok_s(steady))
        row.step_ms.append(step_ms)
        row.phases_ms.append(median_phases_ms(steps, steady) | contender.take_drafting_ms())
        length = accept_length(steps)
        if length is not None:
            row.accept_length.append(length)
        context_len = statistics.fmean(len(ask.prompt) for ask in asks) + num_tokens / 2
        weights_ms = self._floor.weights_ms(contender.mode)
        kv_ms = self._floor.kv_ms(contender.mode, row.concurrency * context_len)
        more = {
            "tok_s_end_to_end": times.end_to_end_tok_s,
            "steady_steps": float(len(steady)),
            "undrafted_share": 0.0 if contender.mode is Mode.PLAIN else undrafted_share(steps),
            "host_syncs": float(len(contender.syncs) - syncs_before),
            "floor_ms": weights_ms,
            "kv_floor_ms": kv_ms,
            "floor_fraction_with_kv": (weights_ms + kv_ms) / step_ms,
        }
        for key, value in more.items():
            row.more.setdefault(key, []).append(value)

    def _waves(self, mode: Mode) -> int:
        """How often each of the requests at once is replaced, to have steps enough."""
        length = self._plan.synthetic_accept_length or _ACCEPT_LENGTH_GUESS
        tokens_a_step = 1.0 if mode is Mode.PLAIN else length
        return max(1, round(_STEPS_A_ROUND * tokens_a_step / self._plan.max_new_tokens))

    def _asks(self, row: Row, turn: int, count: int, num_tokens: int) -> list[Ask]:
        """The same prompts in every mode; others in each round."""
        rng = random.Random(f"{row.concurrency} {turn}")
        return [
            Ask(
                self._prompts.measured(rng, number),
                num_tokens,
                SamplingParams(self._plan.temperature, top_p=self._plan.top_p, seed=number),
            )
            for number in range(count)
        ]


def rows_table(rows: Sequence[Row], accept_kind: str) -> Table:
    """What was measured; rows without a round are left out."""
    table = Table(title=f"closed loop inside the core (medians of rounds; accept length {accept_kind})")
    headings = (
        "mode", "at once", "decode tok/s", "end to end", "step ms", f"accept length ({accept_kind})",
        "of the floor", "with K/V", "x plain", "step against inprocess",
    )  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    results = {(row.mode, row.concurrency): row.as_json(None) for row in rows if row.measured}
    for (mode, level), result in results.items():
        plain, one = results.get((Mode.PLAIN, level)), results.get((Mode.INPROCESS, level))
        length = result.get("accept_length")
        split = mode in (Mode.INLINE, Mode.DEVICE)
        table.add_row(
            mode,
            str(level),
            f"{result['tok_s']:.0f}",
            f"{result['tok_s_end_to_end']:.0f}",
            f"{result['step_ms']:.3f}",
            "" if length is None else f"{length:.2f}",
            f"{result['floor_ms'] / result['step_ms']:.1%}",
            f"{result['floor_fraction_with_kv']:.1%}",
            f"{result['tok_s'] / plain['tok_s']:.2f}" if plain else "",
            f"{result['step_ms'] / one['step_ms'] - 1:+.1%}" if one and split else "",
        )
    return table


def phases_of(rows: Sequence[Row]) -> list[str]:
    """Where a step's time goes, a line a row; see step_log.median_phases_ms and the drafters' own times."""
    return [
        f"{row.mode} x {row.concurrency}, ms a step: "
        + ", ".join(f"{phase} {ms:.3f}" for phase, ms in row.median_phases_ms().items())
        for row in rows
        if row.measured
    ]


def warnings_of(rows: Sequence[Row]) -> list[str]:
    """What makes a row's figures doubtful, one line each."""
    doubts = []
    for row in rows:
        if not row.measured:
            continue
        result, name = row.as_json(None), f"{row.mode} x {row.concurrency}"
        if result["undrafted_share"] > _UNDRAFTED_SHARE_MAX:
            doubts.append(f"{name}: {result['undrafted_share']:.1%} of the decode steps had no draft")
        if result["host_syncs"]:
            doubts.append(f"{name}: the host waited unseen, {result['host_syncs']:g} times")
    return doubts
