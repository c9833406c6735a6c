"""Which requests take part in the next step, with how many rows, on which pages. No torch.

Extending and decoding are one thing: a request contributes the rows of its tokens that are not
stored yet, followed by its draft when it reaches its end. Rows that end a request's tokens are
sampled. Pages grow step by step. When they run out the step goes without the draft that asked; if
its token alone asks, the youngest request is preempted: it gives all pages back and later recomputes,
which costs time but, noise being keyed by position, no token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from common.paged_kv import PagePool
from services.target.core.request import Phase, Request
from services.target.core.roster import Roster


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's part of a step: tokens [start, start + num_tokens), then the draft."""

    request: Request
    start: int
    num_tokens: int
    draft: list[int]

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.draft)

    @property
    def stop(self) -> int:
        """Position after the last row."""
        return self.start + self.num_rows

    @property
    def samples(self) -> bool:
        """Whether the step chooses this request's next token."""
        return self.start + self.num_tokens == self.request.committed_len

    @property
    def row_ids(self) -> list[int]:
        return self.request.tokens[self.start : self.start + self.num_tokens] + self.draft


@dataclass
class Batch:
    """The rows of one step, request after request."""

    scheduled: list[ScheduledRequest] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return sum(s.num_rows for s in self.scheduled)


class Scheduler(Roster):
    """Chooses the rows of a step whose results are known before the next one."""

    def __init__(self, pool: PagePool, *, num_running_max: int, extend_rows_max: int) -> None:
        """extend_rows_max bounds the prompt rows of a step, so that a long prompt does not stall
        those who decode."""
        super().__init__(pool, num_running_max)
        self._extend_rows_max = extend_rows_max

    def next_batch(self, drafts: dict[int, list[int]]) -> Batch:
        """Choose the step's rows. drafts: draft tokens by session id."""
        batch = Batch()
        budget = self._extend_rows_max
        for request in self.running:
            # A request earlier in the loop may have preempted this one.
            if request.phase is not Phase.RUNNING:
                continue
            draft = self._useful_draft(request, drafts)
            num_tokens = request.remaining_len
            if num_tokens > 1:
                num_tokens = min(num_tokens, budget)
                if num_tokens == 0:
                    continue
                if num_tokens < request.remaining_len:
                    draft = []
                budget -= num_tokens
            self._schedule(batch, request, num_tokens, draft)
        while self._waiting and budget > 0 and self.num_running < self._num_running_max:
            request = self._waiting[0]
            # All of its tokens, so that admission is not followed by preemption at once.
            if self.pool.pages_for(request.committed_len + 1) > self.pool.num_free:
                break
            self._waiting.popleft()
            self._admit(request)
            num_tokens = min(request.remaining_len, budget)
            budget -= num_tokens
            self._schedule(batch, request, num_tokens, [])
        return batch

    def _useful_draft(self, request: Request, drafts: dict[int, list[int]]) -> list[int]:
        """The request's draft, cut so that no row lies past what it may still commit: a verify
        commits one token more than it accepts."""
        return drafts.get(request.session_id, [])[: max(0, request.room - 1)]

    def _schedule(self, batch: Batch, request: Request, num_tokens: int, draft: list[int]) -> None:
        """Reserve the pages and add the rows; preempts others, youngest first, or the request
        itself when it is the youngest."""
        table = request.page_table
        assert table is not None
        scheduled = ScheduledRequest(request, request.cached_len, num_tokens, draft)
        if table.missing_for(scheduled.stop) > self.pool.num_free:
            # A guess is worth nobody's pages. Were others preempted for one, or the request itself, a
            # full pool would throw contexts away at each step.
            scheduled = replace(scheduled, draft=[])
        while table.missing_for(scheduled.stop) > self.pool.num_free:
            youngest = self._running[-1]
            self._preempt(youngest)
            batch.scheduled = [s for s in batch.scheduled if s.request is not youngest]
            if youngest is request:
                return
        table.reserve(scheduled.stop)
        batch.scheduled.append(scheduled)
