"""One step of the target: drafts in, a forward, tokens out, captured states handed over.

`StepLoop.step` is the hot loop and reads like architecture.md §4. Knows the order of things; each
thing is done elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common import limits
from common.errors import TandemError
from services.target.core.draft_source import (
    ContextRows,
    Drafts,
    DraftSource,
    HandOff,
    PlainReason,
    WantedBlock,
)
from services.target.core.engine import Engine, StepOutput
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
from services.target.core.scheduler import Batch, ScheduledRequest, Scheduler
from services.target.core.verification import Verified, verify

if TYPE_CHECKING:
    import torch


class NonFiniteLogits(TandemError):
    """The model produced NaN or infinity for a request; that request ends. Maps to INTERNAL."""


@dataclass(frozen=True)
class _Outcome:
    """What a step did to one request: its first num_context rows became context; verified is None
    when nothing was chosen."""

    scheduled: ScheduledRequest
    num_context: int = 0
    verified: Verified | None = None
    events: list[Event] = field(default_factory=list)


class StepLoop:
    """Runs steps until nothing is left to do. Used by one thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        draft_source: DraftSource,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._draft_source = draft_source
        self._observer = observer
        self._clock = clock
        self._stats = self._take_stats()
        self._observed_stats: CoreStats | None = None

    @property
    def has_work(self) -> bool:
        return self._scheduler.num_running > 0 or self._scheduler.num_waiting > 0

    def stats(self) -> CoreStats:
        """A snapshot, never older than the last event that left; from any thread."""
        return self._stats

    def step(self) -> None:
        """One round; does nothing but hand ended sessions over when no request is left."""
        began = self._clock()
        drafts = self._draft_source.collect()
        collected = self._clock()
        self._rewind_lost_contexts()
        preempted = self._scheduler.num_preemptions
        batch = self._scheduler.next_batch(drafts.tokens)
        scheduled = self._clock()
        captured_layer_ids = self._draft_source.captured_layer_ids
        output = self._engine.run(batch, captured_layer_ids) if batch.scheduled else StepOutput([], None)
        computed = self._clock()
        outcomes = [self._commit(s, chosen) for s, chosen in zip(batch.scheduled, output.chosen, strict=True)]
        committed = self._clock()
        self._draft_source.post(self._handoff(outcomes, output.captured))
        self._stats = self._take_stats()
        for outcome in outcomes:
            for event in outcome.events:
                outcome.scheduled.request.emit(event)
        report = self._report(batch, outcomes, drafts, output.captured)
        report.num_preemptions = self._scheduler.num_preemptions - preempted
        ended = self._clock()

        report.draft_wait_s, report.forward_s = collected - began, computed - scheduled
        report.commit_s = committed - computed
        report.host_s = scheduled - collected + ended - committed
        if batch.scheduled or self._stats != self._observed_stats:
            self._observer.observe_step(report, self._stats)
            self._observed_stats = self._stats

    def abort(self, request_id: str) -> None:
        """End a request early; unknown and finished ids are ignored."""
        request = self._scheduler.find(request_id)
        if request is not None:
            self._scheduler.remove(request)
            self._stats = self._take_stats()
            self._finish(request, FinishReason.ABORT, None, request.emit)

    def fail_all(self, error: TandemError, reason: str) -> None:
        """End every request with an error."""
        while (request := self._scheduler.first()) is not None:
            self._scheduler.remove(request)
            self._stats = self._take_stats()
            self.fail(request, error, reason)

    def fail(self, request: Request, error: TandemError, reason: str) -> None:
        """End with an error a request that the scheduler does not hold: not yet, or no more."""
        if request.phase is not Phase.FINISHED:
            request.move_to(Phase.FINISHED)
        self._observer.observe_failed(request, reason)
        request.emit(RequestFailed(error))

    def _take_stats(self) -> CoreStats:
        scheduler, pool = self._scheduler, self._scheduler.pool
        return CoreStats(
            scheduler.num_running, scheduler.num_waiting,
            pool.num_pages, pool.num_free, scheduler.num_pages_unaccounted,
        )  # fmt: skip

    def _rewind_lost_contexts(self) -> None:
        """Give drafter sessions that lost their context a new one, where that is cheap."""
        lost = self._draft_source.lost_sessions()
        if not lost:
            return
        for request in self._scheduler.running:
            cheap = request.cached_len <= limits.RECAPTURE_TOKENS_MAX
            if request.session_id in lost and cheap and request.room >= limits.RECAPTURE_ROOM_MIN:
                self._scheduler.rewind(request)

    def _commit(self, s: ScheduledRequest, chosen: list[int] | None) -> _Outcome:
        """Apply what the target chose to one request."""
        request = s.request
        if chosen is None and s.draft:
            # Its draft may have led the model where its own tokens never would: the next step computes
            # the same position without one (I1).
            return _Outcome(s)
        if chosen is None:
            self._engine.zero_pages(self._scheduler.remove(request))
            request.move_to(Phase.FINISHED)
            self._observer.observe_failed(request, "non_finite")
            error = NonFiniteLogits("logits: must be finite, got NaN or infinity")
            return _Outcome(s, events=[RequestFailed(error)])
        if not s.samples:
            request.cached_len += s.num_tokens
            return _Outcome(s, s.num_tokens)

        verified = verify(chosen, s.draft, request.stop_token_ids)
        # A stop inside the accepted drafts leaves K/V past the end; the request is over anyway.
        num_context = s.num_tokens + verified.num_accepted
        request.cached_len += num_context
        request.tokens += verified.tokens
        request.num_decode_steps += 1
        request.num_drafts += bool(s.draft)
        request.num_draft_tokens += len(s.draft)
        request.num_accepted_tokens += verified.num_accepted
        self._stamp(request, len(verified.tokens))
        from_draft = [i < verified.num_accepted for i in range(len(verified.tokens))]
        events: list[Event] = [TokensCommitted(verified.tokens, from_draft)]
        if verified.matched_stop is not None or request.room == 0:
            self._scheduler.remove(request)
            reason = FinishReason.STOP if verified.matched_stop is not None else FinishReason.LENGTH
            self._finish(request, reason, verified.matched_stop, events.append)
        return _Outcome(s, num_context, verified, events)

    def _stamp(self, request: Request, count: int) -> None:
        now = request.clock()
        if request.last_token_at is None:
            request.first_token_at = now
            self._observer.observe_first_token(request)
        else:
            self._observer.observe_tokens(request, count, now - request.last_token_at)
        request.last_token_at = now

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        matched: int | None,
        emit: Callable[[RequestFinished], None],
    ) -> None:
        finished = request.finish(reason, matched)
        self._observer.observe_finished(request, finished)
        emit(finished)

    def _handoff(self, outcomes: list[_Outcome], captured: torch.Tensor | None) -> HandOff:
        """Rows that became context, and a block for each request that can use one."""
        appends: list[ContextRows] = []
        wanted: list[WantedBlock] = []
        row = 0
        for outcome in outcomes:
            s, request = outcome.scheduled, outcome.scheduled.request
            row_start, row = row, row + s.num_rows
            if request.phase is not Phase.RUNNING or not request.drafting:
                continue
            if captured is not None and outcome.num_context:
                row_stop = row_start + outcome.num_context
                appends.append(ContextRows(request.session_id, s.start, row_start, row_stop))
            # With room for one token only, a draft could not be used.
            if outcome.verified and request.room > 1:
                wanted.append(WantedBlock(request.session_id, request.committed_len - 1, request.tokens[-1]))
        return HandOff(appends, wanted, self._scheduler.take_ended_sessions(), captured)

    def _report(
        self, batch: Batch, outcomes: list[_Outcome], drafts: Drafts, captured: torch.Tensor | None
    ) -> StepReport:
        report = StepReport(num_rows=batch.num_rows, num_requests=len(batch.scheduled))
        report.captured_bytes = captured.nbytes if captured is not None else 0
        report.extends = any(s.num_tokens > 1 for s in batch.scheduled)
        for outcome in outcomes:
            s, verified = outcome.scheduled, outcome.verified
            prompt_len = len(s.request.prompt)
            report.num_prompt_tokens += max(0, min(s.start + s.num_tokens, prompt_len) - s.start)
            if verified is None:
                if s.draft and s.request.phase is Phase.RUNNING:
                    report.plain.append(PlainReason.NON_FINITE)
                continue
            report.num_generated_tokens += len(verified.tokens)
            if s.draft:
                report.verifies.append((len(s.draft), verified.num_accepted))
            elif s.start >= prompt_len:
                session_id = s.request.session_id
                if not s.request.drafting:
                    report.plain.append(PlainReason.DISABLED)
                elif session_id in drafts.tokens:
                    # It came, and there were no pages for it.
                    report.plain.append(PlainReason.NO_CAPACITY)
                elif session_id in drafts.plain:
                    report.plain.append(drafts.plain[session_id])
        return report
