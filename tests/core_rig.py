"""A target's core in the test's own thread: real scheduler, engine, step loop and model, scripted drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from common.layers.attention import RaggedBatch
from common.paged_kv import PagePool
from services.target.core.draft_source import Drafts, DraftSource, HandOff, NoDrafts, PlainReason
from services.target.core.engine import Engine, TargetModel
from services.target.core.report import CoreStats, StepReport
from services.target.core.request import (
    Event,
    Request,
    RequestFailed,
    RequestFinished,
    SamplingParams,
    TokensCommitted,
)
from services.target.core.scheduler import Scheduler
from services.target.core.step import StepLoop

COUNTING_VOCAB = 64


class CountingModel:
    """After token t comes t + 1. Captures the token and its position; reads no K/V."""

    dtype = torch.float32
    kv_shape = (1, 1, 2)

    def forward(
        self, token_ids: torch.Tensor, kv: torch.Tensor, batch: RaggedBatch, captured: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = torch.stack([token_ids, batch.positions], dim=1).float()
        return hidden, hidden.clone() if captured else None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        following = (hidden[:, 0].long() + 1) % COUNTING_VOCAB
        return torch.nn.functional.one_hot(following, COUNTING_VOCAB).float()


@dataclass(frozen=True)
class Ask:
    """What a caller wants."""

    prompt: list[int]
    max_new_tokens: int = 24
    sampling: SamplingParams = SamplingParams()
    stop_token_ids: frozenset[int] = frozenset()
    drafting: bool = True


@dataclass
class Tape:
    """What a caller got. Fails at once when something follows the terminal event (I2)."""

    ask: Ask
    request: Request = field(init=False)
    tokens: list[int] = field(default_factory=list)
    from_draft: list[bool] = field(default_factory=list)
    terminal: RequestFinished | RequestFailed | None = None

    def record(self, event: Event) -> None:
        assert self.terminal is None, f"{event} after {self.terminal}"
        if isinstance(event, TokensCommitted):
            assert event.token_ids
            assert len(event.token_ids) == len(event.from_draft)
            self.tokens += event.token_ids
            self.from_draft += event.from_draft
        else:
            self.terminal = event

    @property
    def finished(self) -> RequestFinished:
        assert isinstance(self.terminal, RequestFinished), self.terminal
        return self.terminal


@dataclass
class RecordedObserver:
    """An Observer that remembers."""

    reports: list[StepReport] = field(default_factory=list)
    stats: list[CoreStats] = field(default_factory=list)
    first_tokens: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def observe_step(self, report: StepReport, stats: CoreStats) -> None:
        self.reports.append(report)
        self.stats.append(stats)

    def observe_first_token(self, request: Request) -> None:
        self.first_tokens.append(request.request_id)

    def observe_tokens(self, request: Request, count: int, interval_s: float) -> None:
        assert count > 0
        assert interval_s >= 0

    def observe_finished(self, request: Request, finished: RequestFinished) -> None:
        self.finished.append(request.request_id)

    def observe_failed(self, request: Request, reason: str) -> None:
        self.failed.append((request.request_id, reason))


class Rig:
    """Submit asks, run steps, look at the tapes."""

    def __init__(
        self,
        model: TargetModel,
        *,
        drafts: Callable[[Rig], DraftSource] | None = None,
        num_pages: int = 256,
        page_size: int = 8,
        num_running_max: int = 8,
        extend_rows_max: int = 64,
        scatter: random.Random | None = None,
    ) -> None:
        self.pool = PagePool(num_pages, page_size)
        if scatter is not None:
            scatter.shuffle(self.pool._free)
        self.scheduler = Scheduler(
            self.pool, num_running_max=num_running_max, extend_rows_max=extend_rows_max
        )
        self.draft_source = NoDrafts() if drafts is None else drafts(self)
        self.observer = RecordedObserver()
        self.engine = Engine(model, self.pool)
        self.loop = StepLoop(self.scheduler, self.engine, self.draft_source, self.observer)
        self.tapes: list[Tape] = []

    def submit(self, ask: Ask) -> Tape:
        tape = Tape(ask)
        tape.request = Request(
            f"r{len(self.tapes)}", list(ask.prompt), ask.sampling, ask.max_new_tokens, ask.stop_token_ids,
            ask.drafting, tape.record,
        )  # fmt: skip
        self.tapes.append(tape)
        self.scheduler.add(tape.request)
        return tape

    def run(
        self, asks: Sequence[Ask] = (), *, each_step: Callable[[], None] | None = None
    ) -> list[Tape]:  # fmt: skip
        """Submit, step until nothing is left, and check that everything was given back."""
        for ask in asks:
            self.submit(ask)
        work = sum(len(t.ask.prompt) + t.ask.max_new_tokens for t in self.tapes)
        # Each step moves somebody by a token, except where contexts are computed again.
        for _ in range(20 * work + 100):
            if not self.loop.has_work:
                break
            self.loop.step()
            self.check_pages()
            if each_step is not None:
                each_step()
        self.loop.step()
        self.check_idle()
        return self.tapes

    def check_pages(self) -> None:
        """No page belongs to two requests, and every page that is not free belongs to one (I3)."""
        owned = [page for r in self.scheduler.running if r.page_table for page in r.page_table.pages]
        assert len(set(owned)) == len(owned)
        assert len(owned) + self.pool.num_free == self.pool.num_pages
        assert self.scheduler.num_pages_unaccounted == 0
        assert 0 not in owned

    def check_idle(self) -> None:
        assert not self.loop.has_work, "requests are left that never end"
        assert self.pool.num_free == self.pool.num_pages
        assert all(tape.terminal is not None for tape in self.tapes)


def plain_tokens(model: TargetModel, asks: list[Ask]) -> list[list[int]]:
    """What each ask gives alone, without drafts, prompt in one piece, pages in order."""
    return [Rig(model, extend_rows_max=1 << 20).run([ask])[0].tokens for ask in asks]


@dataclass
class Habits:
    """How a scripted drafter errs: probabilities, each per block but `lose` per session and step."""

    spoil: float = 0.0
    hostile: float = 0.0
    absent: float = 0.0
    lose: float = 0.0


class OracleDrafts:
    """A DraftSource that knows what plain decoding gives, and errs as its habits say.

    Holds the target to its side of the hand-off meanwhile: context arrives without gaps from position 0
    (or anew after a loss), and a block is wanted only where the context ends.
    """

    def __init__(
        self, rig: Rig, truths: dict[tuple[int, ...], list[int]], rng: random.Random, *,
        num_draft_tokens: int = 7, habits: Habits | None = None, hostile_ids: list[int] | None = None,
        captured_layer_ids: tuple[int, ...] = (0, 2),
    ) -> None:  # fmt: skip
        """truths: output tokens by prompt."""
        self.captured_layer_ids = captured_layer_ids
        self.contexts: dict[int, torch.Tensor] = {}
        self.requests: dict[int, Request] = {}
        self.num_lost = 0
        self._rig, self._truths, self._rng = rig, truths, rng
        self._num_draft_tokens = num_draft_tokens
        self._habits = habits or Habits()
        self._hostile_ids = hostile_ids or list(range(192))
        self._wanted: list[Any] = []
        self._ended: set[int] = set()

    def post(self, handoff: HandOff) -> None:
        for request in self._rig.scheduler.running:
            self.requests[request.session_id] = request
        assert handoff.captured is not None or not handoff.appends
        for rows in handoff.appends:
            assert rows.session_id not in self._ended
            assert self.requests[rows.session_id].drafting
            held = self.contexts.get(rows.session_id)
            new = handoff.captured[rows.row_start : rows.row_stop].clone()  # type: ignore[index]
            if held is not None and rows.position:
                assert rows.position == len(held), "context has a gap"
                new = torch.cat([held, new])
            else:
                assert rows.position == 0
            self.contexts[rows.session_id] = new
        for block in handoff.wanted:
            request = self.requests[block.session_id]
            assert len(self.contexts[block.session_id]) == block.position == request.committed_len - 1
            assert block.anchor == request.tokens[-1]
        assert not self._ended & set(handoff.ended), "a session ended twice"
        self._ended |= set(handoff.ended)
        self._wanted = handoff.wanted

    def collect(self) -> Drafts:
        drafts, self._wanted = Drafts(), self._wanted
        for block in self._wanted:
            if self._rng.random() < self._habits.absent:
                drafts.plain[block.session_id] = self._rng.choice(list(PlainReason))
            else:
                drafts.tokens[block.session_id] = self._draft(block.session_id, block.position)
        self._wanted = []
        return drafts

    def lost_sessions(self) -> set[int]:
        running = [r.session_id for r in self._rig.scheduler.running if r.drafting]
        lost = {s for s in running if self._rng.random() < self._habits.lose}
        self.num_lost += len(lost)
        return lost

    def close(self) -> None:
        self._wanted = []

    def _draft(self, session_id: int, position: int) -> list[int]:
        count = self._num_draft_tokens
        if self._rng.random() < self._habits.hostile:
            return [self._rng.choice(self._hostile_ids) for _ in range(count)]
        request = self.requests[session_id]
        first = position + 1 - len(request.prompt)
        draft = self._truths[tuple(request.prompt)][first : first + count]
        draft += [self._rng.choice(self._hostile_ids) for _ in range(count - len(draft))]
        if self._rng.random() < self._habits.spoil:
            draft[self._rng.randrange(count)] = self._rng.choice(self._hostile_ids)
        return draft
