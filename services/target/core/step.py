"""One step of the target: drafts in, a forward, tokens out, captured states handed over.

`StepLoop.step` is the hot loop and reads like architecture.md §4. Knows the order of things; each
thing is done elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.target.core.draft_source import (
    ContextRows,
    Drafts,
    DraftSource,
    HandOff,
    PlainReason,
    WantedBlock,
)
from services.target.core.engine import Engine, StepOutput
from services.target.core.report import Observer, StepReport
from services.target.core.request import Event, Phase
from services.target.core.request_loop import RequestLoop
from services.target.core.scheduler import Batch, ScheduledRequest, Scheduler
from services.target.core.verification import Verified, verify

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class _Outcome:
    """What a step did to one request: its first num_context rows became context; verified is None
    when nothing was chosen."""

    scheduled: ScheduledRequest
    num_context: int = 0
    verified: Verified | None = None
    events: list[Event] = field(default_factory=list)


class StepLoop(RequestLoop):
    """Each step's tokens are known before the next one begins."""

    def __init__(
        self,
        scheduler: Scheduler,
        engine: Engine,
        draft_source: DraftSource,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(scheduler, observer, clock)
        self._scheduler = scheduler
        self._engine = engine
        self._draft_source = draft_source

    def step(self) -> None:
        """One round; does nothing but hand ended sessions over when no request is left."""
        began = self._clock()
        drafts = self._draft_source.collect()
        collected = self._clock()
        self._rewind_lost_contexts(self._draft_source.lost_sessions())
        batch = self._scheduler.next_batch(drafts.tokens)
        scheduled = self._clock()
        captured_layer_ids = self._draft_source.captured_layer_ids
        output = self._engine.run(batch, captured_layer_ids) if batch.scheduled else StepOutput([], None)
        computed = self._clock()
        outcomes = [self._apply(s, chosen) for s, chosen in zip(batch.scheduled, output.chosen, strict=True)]
        committed = self._clock()
        self._draft_source.post(self._handoff(outcomes, output.captured))
        self._stats = self._take_stats()
        for outcome in outcomes:
            for event in outcome.events:
                outcome.scheduled.request.emit(event)
        report = self._report(batch, outcomes, drafts, output.captured)
        ended = self._clock()

        report.draft_wait_s, report.forward_s = collected - began, computed - scheduled
        report.commit_s = committed - computed
        report.host_s = scheduled - collected + ended - committed
        self._observe(report)

    def _apply(self, s: ScheduledRequest, chosen: list[int] | None) -> _Outcome:
        """Apply what the target chose to one request."""
        request = s.request
        if chosen is None and s.draft:
            # Its draft may have led the model where its own tokens never would: the next step computes
            # the same position without one (I1).
            return _Outcome(s)
        if chosen is None:
            pages, events = self._fail_non_finite(request)
            self._engine.zero_pages(pages)
            return _Outcome(s, events=events)
        if not s.samples:
            request.cached_len += s.num_tokens
            return _Outcome(s, s.num_tokens)

        verified = verify(chosen, s.draft, request.stop_token_ids)
        # A stop inside the accepted drafts leaves K/V past the end; the request is over anyway.
        num_context = s.num_tokens + verified.num_accepted
        request.cached_len += num_context
        return _Outcome(s, num_context, verified, self._commit(request, verified, len(s.draft)))

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
