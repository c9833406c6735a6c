"""What the core tells the metrics: host integers it already has, once a step. No torch, no grpc."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from services.target.core.draft_source import PlainReason
from services.target.core.request import Request, RequestFinished


@dataclass
class StepReport:
    """One step. verifies holds (num_draft_tokens, num_accepted) per verify.

    The four times, in seconds, are apart from each other and add up to the step. In a loop that launches
    ahead, forward_s and draft_wait_s are the device's, and the other two are the host's beside it.
    """

    num_rows: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    verifies: list[tuple[int, int]] = field(default_factory=list)
    plain: list[PlainReason] = field(default_factory=list)
    captured_bytes: int = 0
    num_preemptions: int = 0
    extends: bool = False
    """Whether some request ran more than one of its own tokens (a prompt, a recompute), or ran them apart
    from those who decoded: then forward_s is no measure of a decode step."""
    draft_wait_s: float = 0.0
    """Collecting the drafts, or the device's waiting for them."""
    forward_s: float = 0.0
    """Laying out the rows, the model's forward, choosing tokens."""
    commit_s: float = 0.0
    """Verifying, and the requests' books."""
    host_s: float = 0.0
    """The rest: scheduling, handing over, emitting, this report."""


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
        """`count` tokens were committed `interval_s` after the previous ones; before the step's report."""

    def observe_finished(self, request: Request, finished: RequestFinished) -> None: ...

    def observe_failed(self, request: Request, reason: str) -> None: ...
