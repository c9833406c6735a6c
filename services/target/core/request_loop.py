"""What every step loop is to the core: its snapshot, aborts and failures, and each request's one ending.

Knows requests, their books and whoever observes them; nothing of drafts, tensors or the order of a step.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Set

from common import limits
from common.errors import TandemError
from services.target.core.report import CoreStats, Observer, StepReport
from services.target.core.request import (
    Event,
    FinishReason,
    Phase,
    Request,
    RequestFailed,
    RequestFinished,
    TokensCommitted,
)
from services.target.core.roster import Roster
from services.target.core.verification import Verified


class NonFiniteLogits(TandemError):
    """The model produced NaN or infinity for a request; that request ends. Maps to INTERNAL."""


class RequestLoop(abc.ABC):
    """Runs steps until nothing is left to do. Used by one thread, but for `stats`."""

    def __init__(
        self, roster: Roster, observer: Observer, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._roster = roster
        self._observer = observer
        self._clock = clock
        self._stats = self._take_stats()
        self._observed_stats: CoreStats | None = None
        self._num_preemptions_observed = 0

    @abc.abstractmethod
    def step(self) -> None:
        """One round; does nothing but hand ended sessions over when no request is left."""

    @property
    def has_work(self) -> bool:
        return self._roster.num_running > 0 or self._roster.num_waiting > 0

    def stats(self) -> CoreStats:
        """A snapshot, never older than the last event that left; from any thread."""
        return self._stats

    def abort(self, request_id: str) -> None:
        """End a request early; unknown and finished ids are ignored."""
        request = self._roster.find(request_id)
        if request is not None:
            self._roster.remove(request)
            self._stats = self._take_stats()
            request.emit(self._finish(request, FinishReason.ABORT, None))

    def fail_all(self, error: TandemError, reason: str) -> None:
        """End every request with an error."""
        while (request := self._roster.first()) is not None:
            self._roster.remove(request)
            self._stats = self._take_stats()
            self.fail(request, error, reason)

    def fail(self, request: Request, error: TandemError, reason: str) -> None:
        """End with an error a request that the roster does not hold: not yet, or no more."""
        if request.phase is not Phase.FINISHED:
            request.move_to(Phase.FINISHED)
        self._observer.observe_failed(request, reason)
        request.emit(RequestFailed(error))

    # --- for the steps ---------------------------------------------------------------------------------

    def _rewind_lost_contexts(self, lost: Set[int]) -> None:
        """Give drafter sessions that lost their context a new one, where that is cheap."""
        if not lost:
            return
        for request in self._roster.running:
            cheap = request.cached_len <= limits.RECAPTURE_TOKENS_MAX
            if request.session_id in lost and cheap and request.room >= limits.RECAPTURE_ROOM_MIN:
                self._roster.rewind(request)

    def _commit(self, request: Request, verified: Verified, num_draft_tokens: int) -> list[Event]:
        """Take tokens into the request's output, and end it where they end it. The caller emits."""
        num_tokens, num_accepted = len(verified.tokens), verified.num_accepted
        request.tokens += verified.tokens
        request.num_decode_steps += 1
        request.num_drafts += num_draft_tokens > 0
        request.num_draft_tokens += num_draft_tokens
        request.num_accepted_tokens += num_accepted
        self._stamp(request, num_tokens)
        from_draft = [True] * num_accepted + [False] * (num_tokens - num_accepted)
        events: list[Event] = [TokensCommitted(verified.tokens, from_draft)]
        if verified.matched_stop is not None or request.room == 0:
            self._roster.remove(request)
            reason = FinishReason.STOP if verified.matched_stop is not None else FinishReason.LENGTH
            events.append(self._finish(request, reason, verified.matched_stop))
        return events

    def _fail_non_finite(self, request: Request) -> tuple[list[int], list[Event]]:
        """End a request whose own logits are not finite: the pages it held, to be cleaned, and what the
        caller emits."""
        pages = self._roster.remove(request)
        request.move_to(Phase.FINISHED)
        self._observer.observe_failed(request, "non_finite")
        return pages, [RequestFailed(NonFiniteLogits("logits: must be finite, got NaN or infinity"))]

    def _observe(self, report: StepReport) -> None:
        """Tell of a step, or of stats that changed without one."""
        if report.num_requests:
            report.num_preemptions = self._roster.num_preemptions - self._num_preemptions_observed
            self._num_preemptions_observed += report.num_preemptions
        if report.num_requests or self._stats != self._observed_stats:
            self._observer.observe_step(report, self._stats)
            self._observed_stats = self._stats

    def _take_stats(self) -> CoreStats:
        roster, pool = self._roster, self._roster.pool
        return CoreStats(
            roster.num_running, roster.num_waiting,
            pool.num_pages, pool.num_free, roster.num_pages_unaccounted,
        )  # fmt: skip

    def _stamp(self, request: Request, count: int) -> None:
        now = request.clock()
        if request.last_token_at is None:
            request.first_token_at = now
            self._observer.observe_first_token(request)
        else:
            self._observer.observe_tokens(request, count, now - request.last_token_at)
        request.last_token_at = now

    def _finish(self, request: Request, reason: FinishReason, matched: int | None) -> RequestFinished:
        finished = request.finish(reason, matched)
        self._observer.observe_finished(request, finished)
        return finished
