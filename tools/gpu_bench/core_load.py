"""A closed loop inside the core: so many requests at once, each replaced when it ends, until all are through.

Drives a step loop in the caller's thread, without gRPC, front or sockets: what it measures is the core
alone. Knows requests and steps; must not know devices or modes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from common.errors import TandemError
from services.target.core.report import CoreStats
from services.target.core.request import (
    Event,
    FinishReason,
    Request,
    RequestFailed,
    RequestFinished,
    SamplingParams,
)
from services.target.core.roster import Roster


class BenchFailed(TandemError):
    """What is measured broke a promise; nothing measured with it can be trusted."""


class StepRunner(Protocol):
    """A step loop of the target's core."""

    @property
    def has_work(self) -> bool: ...

    def step(self) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def stats(self) -> CoreStats: ...


@dataclass(frozen=True)
class Ask:
    """A request to come; it ends after max_new_tokens, by nothing else."""

    prompt: list[int]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    drafting: bool = True


@dataclass(frozen=True)
class Answered:
    """What became of an ask. Times are of time.monotonic, as are those of a StepLog."""

    token_ids: list[int]
    first_token_at_s: float
    last_token_at_s: float
    aborted: bool


@dataclass(frozen=True)
class LoadTimes:
    """A run of the load: seconds of time.monotonic of the first submission and of the last token."""

    began_s: float
    ended_s: float
    answers: list[Answered]

    @property
    def end_to_end_tok_s(self) -> float:
        """All output tokens over the time from the first submission to the last token: prefills, ramp-up and
        ramp-down included. vLLM's benchmark calls it output token throughput."""
        return sum(len(a.token_ids) for a in self.answers) / (self.ended_s - self.began_s)


class CoreLoad:
    """Puts asks through one step loop."""

    def __init__(self, loop: StepRunner, roster: Roster, stopping: Callable[[], bool]) -> None:
        """stopping: asked between steps; once it says so, what runs is aborted and nothing new begins."""
        self._loop = loop
        self._roster = roster
        self._stopping = stopping
        self._next_id = 0

    def run(
        self,
        asks: Iterable[Ask],
        concurrency: int,
        before_step: Callable[[dict[str, Request]], None] = lambda running: None,
    ) -> LoadTimes:
        """Answers in the order of the asks. BenchFailed when a request fails.

        An ask is taken when there is room for it. before_step may abort requests through the loop; it is
        given the ids and requests that have not ended.
        """
        coming = enumerate(asks)
        alive: dict[str, Request] = {}
        answers: dict[int, Answered] = {}
        began_s = time.monotonic()
        while True:
            if self._stopping():
                coming = enumerate(())
                for request_id in list(alive):
                    self._loop.abort(request_id)
            for number, ask in itertools.islice(coming, concurrency - len(alive)):
                request = self._request(ask, number, alive, answers)
                alive[request.request_id] = request
                self._roster.add(request)
            if not alive:
                break
            before_step(alive)
            self._loop.step()
        self._settle()
        ordered = [answers[number] for number in sorted(answers)]
        ended_s = max((a.last_token_at_s for a in ordered), default=time.monotonic())
        return LoadTimes(began_s, ended_s, ordered)

    def _settle(self) -> None:
        """Steps until nothing is in flight, and one that hands the ended sessions over."""
        while self._loop.has_work:
            self._loop.step()
        self._loop.step()

    def _request(
        self, ask: Ask, number: int, alive: dict[str, Request], answers: dict[int, Answered]
    ) -> Request:
        self._next_id += 1
        request_id = f"bench-{self._next_id}"

        def emit(event: Event) -> None:
            if isinstance(event, RequestFailed):
                raise BenchFailed(f"a request failed: {event.error}")
            if isinstance(event, RequestFinished):
                request = alive.pop(request_id)
                answers[number] = _answered(request, event)

        return Request(
            request_id, ask.prompt, ask.sampling, ask.max_new_tokens, frozenset(), ask.drafting, emit
        )


def _answered(request: Request, finished: RequestFinished) -> Answered:
    now = time.monotonic()
    return Answered(
        token_ids=request.tokens[len(request.prompt) :],
        first_token_at_s=now if request.first_token_at is None else request.first_token_at,
        last_token_at_s=now if request.last_token_at is None else request.last_token_at,
        aborted=finished.reason is FinishReason.ABORT,
    )
