"""Whether tokens depend on drafts or on company: the same prompts plain and drafted, alone and in batches.

The reference is each prompt alone, decoded plainly. Every prompt that differs is counted, none is excused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from services.target.core.request import SamplingParams
from tools.gpu_bench.contender import Contender
from tools.gpu_bench.core_load import Ask
from tools.gpu_bench.differences import Difference, differences
from tools.gpu_bench.plan import GpuPlan, Mode
from tools.gpu_bench.prompts import Prompts
from tools.gpu_bench.step_log import accept_length


@dataclass(frozen=True)
class Comparison:
    """One way of decoding against the reference. accept_length: None when nothing was drafted."""

    mode: str
    concurrency: int
    num_prompts: int
    num_tokens: int
    accept_length: float | None
    found: list[Difference]

    def as_json(self) -> dict[str, Any]:
        """For the file of results."""
        return {
            "mode": self.mode,
            "concurrency": self.concurrency,
            "prompts": self.num_prompts,
            "tokens": self.num_tokens,
            "accept_length": self.accept_length,
            "prompts_that_differ": len(self.found),
            "first_differences": [difference._asdict() for difference in self.found],
        }


def identity_asks(plan: GpuPlan, prompts: Prompts, seed: int) -> list[Ask]:
    """plan.amount prompts of mixed lengths; every second one is sampled at temperature 0.8 and plan.top_p."""
    rng = random.Random(seed)
    return [
        Ask(
            prompts.varied(rng),
            plan.max_new_tokens,
            SamplingParams(temperature=0.8 * (number % 2), top_p=plan.top_p, seed=rng.randrange(2**32)),
        )
        for number in range(plan.amount)
    ]


def compare_tokens(
    plan: GpuPlan,
    contenders: Sequence[Contender],
    asks: Sequence[Ask],
    learn: Callable[[list[int], list[int]], None],
    check: Callable[[], None],
    on_run: Callable[[Mode, int], None],
) -> list[Comparison]:
    """A comparison for each mode alone and in batches, but plain alone, which is the reference.

    learn hears each prompt and its reference before anything is drafted. check raises when the run shall end.
    """
    (batch,) = plan.concurrency
    plain = next(c for c in contenders if c.mode is Mode.PLAIN)
    on_run(Mode.PLAIN, 1)
    times, _ = plain.run(asks, 1)
    check()
    reference = [answer.token_ids for answer in times.answers]
    for ask, output in zip(asks, reference, strict=True):
        learn(ask.prompt, output)
    comparisons = []
    for contender in contenders:
        for concurrency in (batch,) if contender is plain else (1, batch):
            on_run(contender.mode, concurrency)
            times, steps = contender.run(asks, concurrency)
            check()
            outputs = [answer.token_ids for answer in times.answers]
            comparisons.append(
                Comparison(
                    contender.mode, concurrency, len(asks), sum(map(len, outputs)), accept_length(steps),
                    differences(reference, outputs),
                )
            )  # fmt: skip
    return comparisons


def identity_table(comparisons: Sequence[Comparison], row_independent: bool) -> Table:
    """What differs, by way of decoding."""
    numerics = "row-independent" if row_independent else "default"
    table = Table(title=f"tokens against each prompt alone, plain ({numerics} numerics)")
    for heading in ("mode", "at once", "accept length", "tokens", "prompts that differ"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for c in comparisons:
        length = "" if c.accept_length is None else f"{c.accept_length:.2f}"
        table.add_row(
            c.mode, str(c.concurrency), length, str(c.num_tokens), f"{len(c.found)} of {c.num_prompts}"
        )
    return table
