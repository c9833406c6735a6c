"""Each step of a round as the core reports it, and the figures that follow from them.

A steady step is one in which all requests decoded, nobody extended, and whose predecessor is known: the
time from one completion to the next is then what a step takes, whatever overlaps what. Knows reports and
clocks; must not know engines or modes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from services.target.core.report import CoreStats, StepReport
from services.target.core.request import Request, RequestFinished


class LoggedStep(NamedTuple):
    """A step's report and when its results were on the host, in seconds of the log's clock; and the device's
    seconds of its prompt rows and of its decoding rows, 0 where no device keeps time."""

    at_s: float
    report: StepReport
    extend_s: float = 0.0
    verify_s: float = 0.0


@dataclass
class StepLog:
    """An Observer that keeps all reports of a round."""

    clock: Callable[[], float] = time.monotonic
    steps: list[LoggedStep] = field(default_factory=list)
    _device_s: tuple[float, float] = (0.0, 0.0)

    def note_device_times(self, extend_s: float, verify_s: float) -> None:
        """Of the step whose report comes next."""
        self._device_s = (extend_s, verify_s)

    def observe_step(self, report: StepReport, stats: CoreStats) -> None:
        if report.num_requests:
            self.steps.append(LoggedStep(self.clock(), report, *self._device_s))

    def observe_first_token(self, request: Request) -> None: ...

    def observe_tokens(self, request: Request, count: int, interval_s: float) -> None: ...

    def observe_finished(self, request: Request, finished: RequestFinished) -> None: ...

    def observe_failed(self, request: Request, reason: str) -> None: ...

    def take(self) -> list[LoggedStep]:
        """What was logged since the last call."""
        steps, self.steps = self.steps, []
        return steps


class SteadyStep(NamedTuple):
    """A steady step: seconds since the completion before it, its report, the device's time of it."""

    seconds: float
    report: StepReport
    verify_s: float


def steady_steps(steps: list[LoggedStep], concurrency: int) -> list[SteadyStep]:
    """The steps of which it can be said how long they took."""
    return [
        SteadyStep(step.at_s - before.at_s, step.report, step.verify_s)
        for before, step in zip(steps, steps[1:], strict=False)
        if step.report.num_requests == concurrency and not step.report.extends
    ]


def decode_tok_s(steady: list[SteadyStep]) -> float:
    """Tokens committed in steady steps over the time they took."""
    return sum(s.report.num_generated_tokens for s in steady) / sum(s.seconds for s in steady)


def window_tok_s(steps: list[LoggedStep], first_tokens_s: list[float], last_tokens_s: list[float]) -> float:
    """Tokens a second while all requests of a run decode: from the step in which the last one got its first
    token to that in which the first one got its last. The core's counterpart of closed_loop.common_window;
    0 when the requests hardly met."""
    reached = [step.at_s >= max(first_tokens_s) for step in steps]
    ended = [step.at_s >= min(last_tokens_s) for step in steps]
    start, stop = reached.index(True), ended.index(True)
    if start >= stop:
        return 0.0
    num_tokens = sum(step.report.num_generated_tokens for step in steps[start + 1 : stop + 1])
    return num_tokens / (steps[stop].at_s - steps[start].at_s)


def median_step_ms(steady: list[SteadyStep]) -> float:
    """The usual time between two completions."""
    return 1000 * statistics.median(s.seconds for s in steady)


def median_phases_ms(steps: list[LoggedStep], steady: list[SteadyStep]) -> dict[str, float]:
    """Where a step's time goes, as medians: of steady steps, `extend` of those that extended.

    extend, verify: the device's own clock. wait: what passed between two launches on the device although the
    host had nothing to do: drafting, and handing over there and back. host: the host's work, which hides
    behind the device's.
    """
    extends_s = [step.extend_s for step in steps if step.report.extends]
    phases_s = {
        "extend": extends_s,
        "verify": [s.verify_s for s in steady],
        "wait": [s.report.draft_wait_s for s in steady],
        "host": [s.report.host_s + s.report.commit_s for s in steady],
    }
    return {phase: 1000 * statistics.median(seconds) for phase, seconds in phases_s.items() if seconds}


def undrafted_share(steps: list[LoggedStep]) -> float:
    """Decode steps of a request that had no draft although it asks for them, of all."""
    plain = sum(len(step.report.plain) for step in steps)
    verifies = sum(len(step.report.verifies) for step in steps)
    return plain / max(plain + verifies, 1)


def accept_length(steps: list[LoggedStep]) -> float | None:
    """Mean tokens that a verify committed, the target's own included; None when no draft was verified."""
    accepted = [accepted for step in steps for _, accepted in step.report.verifies]
    return 1 + statistics.fmean(accepted) if accepted else None
