"""One step of the target on a device that never waits for the host: launched before the last one is read.

`PipelinedStepLoop._step_ahead` is the hot loop: while the host learns what a step chose, the device is at
the next one already. A request that ended meanwhile rides once more, and what is chosen for it there is
discarded. A drafter that is reached by messages has to be told a step's tokens before it can draft: then
each step is read before the next (`_step_in_turn`). Knows the order of things; each thing is done elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from common.contract import DraftContract
from services.target.core.device_launch import Launch, Results
from services.target.core.draft_fit import DraftDoesNotFit
from services.target.core.draft_source import Drafts, DraftSource, PlainReason
from services.target.core.hand_over import hand_off, posted_step
from services.target.core.lane_launch import NO_RESULTS, NOTHING, DraftRows, LaneEngine, Launched, extend_rows
from services.target.core.lane_outcome import Outcome, report_of, sessions_of_invalid_drafts
from services.target.core.lanes_scheduler import LanesScheduler, Plan, Ride
from services.target.core.pipelined_source import PipelinedDrafter, PostedStep
from services.target.core.report import Observer
from services.target.core.request import Event, Phase
from services.target.core.request_loop import RequestLoop
from services.target.core.verification import end_at_stop

# Rows that have no page of their own write there (common.paged_kv).
_SENTINEL_PAGE = 0


class PipelinedStepLoop(RequestLoop):
    """Keeps a launch in flight while it reads the one before."""

    def __init__(
        self,
        scheduler: LanesScheduler,
        engine: LaneEngine,
        drafter: PipelinedDrafter,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(scheduler, observer, clock)
        self._scheduler = scheduler
        self._engine = engine
        self._drafter = drafter
        self._draft: DraftContract | None = None
        self._captured_row_bytes = 0
        self._in_flight = NOTHING
        self._number = 0
        self._read_at = clock()

    @property
    def has_work(self) -> bool:
        return super().has_work or not self._in_flight.is_nothing

    def step(self) -> None:
        """One round; without requests it lets the drafter settle and hands ended sessions over."""
        began = self._clock()
        self._drafter.settle()
        source = self._drafter.inline
        if source is None:
            self._step_ahead(began)
            return
        if not self._in_flight.is_nothing:
            # From before the drafter was one that is reached by messages.
            before, self._in_flight = self._in_flight, NOTHING
            self._complete(before, began)
        self._step_in_turn(source)

    def _step_ahead(self, began: float) -> None:
        """Launch the next step, hand it over, and complete the one before."""
        self._adopt_contract()
        if self._draft is not None:
            self._rewind_lost_contexts(self._drafter.lost_sessions())
        plan = self._scheduler.next_launch(self._block_size)
        launched = self._launch(plan, self._drafts_in_ring(plan))
        self._post(launched)
        before, self._in_flight = self._in_flight, launched
        self._complete(before, began)

    def _complete(self, launched: Launched, began: float) -> None:
        """Read a launch, and do to its requests what it chose. began: when the round did."""
        prepared = self._clock()
        results = self._read(launched)
        read = self._clock()
        outcomes = self._apply(launched, results)
        committed = self._clock()
        self._tell(outcomes)
        report = report_of(launched, outcomes, results)
        ended = self._clock()

        report.forward_s = results.gpu_s
        if launched.captures:
            # The device worked for gpu_s of the time since the last read. The rest it waited: for drafts, or
            # for a host that was late, and then the host did not wait here.
            report.draft_wait_s = max(0.0, min(read - prepared, read - self._read_at - results.gpu_s))
        report.commit_s, report.host_s = committed - read, prepared - began + ended - committed
        self._read_at = read
        self._observe(report)

    def _step_in_turn(self, source: DraftSource) -> None:
        """Collect drafts, launch a step, read it, and hand it over."""
        began = self._clock()
        drafts = self._collect(source)
        collected = self._clock()
        self._rewind_lost_contexts(source.lost_sessions())
        plan = self._scheduler.next_launch(self._block_size)
        drafts_set = self._set_drafts(plan, drafts)
        scheduled = self._clock()
        launched = self._launch(plan, drafts_set, are_inline=True)
        results = self._read(launched)
        read = self._clock()
        outcomes = self._apply(launched, results)
        committed = self._clock()
        captured = self._engine.captured_to_host(launched.ticket) if launched.captures else None
        source.post(hand_off(launched, outcomes, captured, self._scheduler.take_ended_sessions()))
        self._tell(outcomes)
        report = report_of(launched, outcomes, results)
        ended = self._clock()

        report.draft_wait_s, report.forward_s = collected - began, read - scheduled
        report.commit_s = committed - read
        report.host_s = scheduled - collected + ended - committed
        self._observe(report)

    # --- drafts ----------------------------------------------------------------------------------------

    @property
    def _block_size(self) -> int:
        """Rows of a decoding request in a launch that captures."""
        return self._draft.block_size if self._draft else 1

    def _captures(self, plan: Plan) -> bool:
        return self._draft is not None and plan.wants_drafts

    def _adopt_contract(self) -> None:
        """Make the device ready for whatever drafter there is now; one that does not fit it is refused."""
        drafter = self._drafter
        self._draft = drafter.draft
        if self._draft is None:
            return
        try:
            ring = drafter.ring
            assert ring is not None, "a contract comes with a ring"
            self._engine.prepare_drafting(self._draft, ring, by_messages=drafter.inline is not None)
        except DraftDoesNotFit as error:
            drafter.refuse(error.mismatch)
            self._draft = None
            return
        self._captured_row_bytes = ring.shape.captured_width * ring.shape.dtype.itemsize

    def _drafts_in_ring(self, plan: Plan) -> DraftRows:
        rows = [-1] * len(plan.decodes)
        if self._captures(plan):
            rows = self._drafter.draft_rows([ride.request.session_id for ride in plan.decodes])
        return DraftRows.place(plan, rows, self._drafter.why_plain)

    def _collect(self, source: DraftSource) -> Drafts:
        before = self._draft
        drafts = source.collect()
        self._adopt_contract()
        if self._draft == before:
            return drafts
        # They are of another drafter, and may not be as wide as this one's.
        return Drafts(plain=dict.fromkeys(drafts.tokens, PlainReason.UNAVAILABLE) | drafts.plain)

    def _set_drafts(self, plan: Plan, drafts: Drafts) -> DraftRows:
        """Give the device the drafts of those who decode."""
        rows: list[int] = []
        came: list[list[int]] = []
        for ride in plan.decodes:
            draft = drafts.tokens.get(ride.request.session_id)
            rows.append(-1 if draft is None else len(came))
            if draft is not None:
                came.append(draft)
        if came:
            self._engine.set_drafts(came)
        return DraftRows.place(plan, rows, drafts.plain.get)

    # --- launching -------------------------------------------------------------------------------------

    def _launch(self, plan: Plan, drafts: DraftRows, *, are_inline: bool = False) -> Launched:
        """Enqueue a plan."""
        if plan.is_empty:
            return NOTHING
        for ride in plan.joined:
            self._engine.join(ride.lane, ride.request.sampling)
        captures = self._captures(plan)
        drafter = self._drafter
        in_turn = (drafter.await_drafts, drafter.mark_ready) if captures and not are_inline else ()
        lanes = [ride.lane for ride in plan.decodes]
        rows = drafts.rows if captures else None
        ticket = self._engine.launch(
            Launch(extend_rows(plan, captures), lanes, rows, plan.pages, drafts_inline=are_inline), *in_turn
        )
        self._number += 1
        num_rows_each, row_bytes = (self._block_size, self._captured_row_bytes) if captures else (1, 0)
        num_drafts = [num_rows_each - 1 if row >= 0 else 0 for row in drafts.rows]
        for ride, num_draft_tokens in zip(plan.decodes, num_drafts, strict=True):
            ride.launched(num_draft_tokens + 1)
        for extend in plan.extends:
            if extend.samples:
                extend.ride.launched(1)
        return Launched(self._number, ticket, plan, num_rows_each, num_drafts, drafts.plain, row_bytes)

    def _post(self, launched: Launched) -> None:
        """Tell the drafter of a launch, and of sessions that ended."""
        ended = self._scheduler.take_ended_sessions()
        if launched.captures:
            self._drafter.post(posted_step(launched, ended))
        elif not launched.is_nothing or ended:
            self._drafter.post(PostedStep(self._number, [], [], ended))

    # --- reading ---------------------------------------------------------------------------------------

    def _read(self, launched: Launched) -> Results:
        """Wait for a launch's results."""
        if launched.is_nothing:
            return NO_RESULTS
        results = self._engine.results_to_host(launched.ticket)
        invalid = sessions_of_invalid_drafts(launched, results)
        self._drafter.observe_completed(launched.number, invalid)
        return results

    def _apply(self, launched: Launched, results: Results) -> list[Outcome]:
        """Do to each request what was chosen for it: those that extend, then those that decode."""
        plan = launched.plan
        chosen, finite = results.extend_tokens.tolist(), results.extend_finite.tolist()
        outcomes = [
            self._take(extend.ride, [token], 0, is_finite, 0)
            if extend.samples
            else Outcome(extend.ride.request)
            for extend, token, is_finite in zip(plan.extends, chosen, finite, strict=True)
        ]
        blocks, accepted = results.tokens.tolist(), results.num_accepted.tolist()
        for ride, block, num_accepted, is_finite, num_drafts in zip(
            plan.decodes, blocks, accepted, results.finite.tolist(), launched.num_drafts, strict=True
        ):
            outcomes.append(self._take(ride, block, num_accepted, is_finite, num_drafts))
        return outcomes

    def _take(
        self, ride: Ride, chosen: list[int], num_accepted: int, is_finite: bool, num_drafts: int
    ) -> Outcome:
        """Commit what may be committed of a block: the target's token at each row, as far as the draft of
        num_drafts tokens was accepted, and one more."""
        ride.read(num_drafts + 1)
        request = ride.request
        if ride.is_over:
            return Outcome(request)
        if not is_finite:
            return self._refuse(ride, num_drafts)
        # As if the draft had been cut so that a token of the target's own ends what fits.
        num_drafts = min(num_drafts, request.room - 1)
        num_accepted = min(num_accepted, num_drafts)
        verified = end_at_stop(chosen[: num_accepted + 1], num_accepted, request.stop_token_ids)
        events = self._commit(request, verified, num_drafts)
        if request.phase is Phase.RUNNING:
            request.cached_len = len(request.tokens) - 1
        return Outcome(request, verified, num_drafts, events)

    def _refuse(self, ride: Ride, num_drafts: int) -> Outcome:
        """What was chosen from logits that are not finite is no token of the request's."""
        request = ride.request
        events: list[Event] = []
        pages: list[int] = []
        if num_drafts == 0:
            pages, events = self._fail_non_finite(request)
        elif request.phase is Phase.RUNNING:
            # It may be its draft's fault, or lie past its end: the position is computed again without (I1).
            self._scheduler.restart(request, request.committed_len - 1)
        else:
            # Preempted meanwhile: it is computed again anyway, and this was the last that it had in flight.
            assert ride.num_in_flight == 0
        self._engine.zero_pages([_SENTINEL_PAGE, *pages])
        return Outcome(request, None, num_drafts, events)

    def _tell(self, outcomes: list[Outcome]) -> None:
        self._stats = self._take_stats()
        for outcome in outcomes:
            for event in outcome.events:
                outcome.request.emit(event)
