"""What the core tells the metrics: host integers it already has, once a step. No torch, no grpc."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from services.target.core.draft_source import PlainReason
from services.target.core.request import Request, RequestFinished


@dataclass
class StepReport:
    """One step. Times in seconds; verifies holds (num_draft_tokens, num_accepted) per verify."""

    num_rows: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    verifies: list[tuple[int, int]] = field(default_factory=list)
    plain: list[PlainReason] = field(default_factory=list)
    captured_bytes: int = 0
    num_preemptions: int = 0
    draft_wait_s: float = 0.0
    forward_s: float = 0.0
    """Model forward and sampling."""
    only_extends: bool = False
    """Whether no request decoded, so that forward_s is pure prefill."""
    commit_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True)
class CoreStats:
    """A snapshot of the core's state."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_free: int
    pages_unaccounted: int


class Observer(Protocol):
    """Receives reports on the core's thread; must be quick and must not raise."""

    def observe_step(self, report: StepReport, stats: CoreStats) -> None:
        """After a step; also when only the stats changed, with report.num_requests 0."""

    def observe_first_token(self, request: Request) -> None: ...

    def observe_tokens(self, request: Request, count: int, interval_s: float) -> None:
        """`count` tokens were committed `interval_s` after the previous ones."""

    def observe_finished(self, request: Request, finished: RequestFinished) -> None: ...

    def observe_failed(self, request: Request, reason: str) -> None: ...
