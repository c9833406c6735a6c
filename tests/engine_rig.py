"""Drives a device engine as the step loop does: a launch ahead of what it has read, requests coming and
going, and a drafter beside it that is right, wrong or absent as chance will have it.

Every token is compared with what the CPU engine chooses, every accept length with what the draft deserves,
and pages that nobody owns hold NaN throughout.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from common.handoff.ring import Ring
from common.paged_kv import PageEntry, PagePool, PageTable
from services.target.core.device_engine import DeviceEngine
from services.target.core.device_launch import ExtendRows, Launch, Results, Ticket
from services.target.core.engine import Engine
from services.target.core.request import Request, SamplingParams
from services.target.core.scheduler import Batch, ScheduledRequest
from services.target.model.llama import Llama


def cpu_answer(llama: Llama, prompt: list[int], sampling: SamplingParams, count: int) -> list[int]:
    """The tokens that the CPU engine chooses after a prompt, one at a time."""
    pool = PagePool(len(prompt) + count, 1)
    engine = Engine(llama, pool)
    request = Request("r", prompt, sampling, count, frozenset(), False, lambda event: None)
    request.page_table = PageTable(pool)
    while request.num_output_tokens < count:
        request.page_table.reserve(request.committed_len)
        rows = ScheduledRequest(request, request.cached_len, request.remaining_len, [])
        (chosen,) = engine.run(Batch([rows]), ()).chosen
        assert chosen is not None
        request.cached_len = request.committed_len
        request.tokens += chosen
    return request.tokens[len(prompt) :]


@dataclass(eq=False)
class Rider:
    """A request. answer: what must come, with some tokens more than are wanted."""

    prompt: list[int]
    sampling: SamplingParams
    answer: list[int]
    num_wanted: int
    lane: int = -1
    table: PageTable | None = None
    extended: int = 0
    got: int = 0
    in_flight: list[int] = field(default_factory=list)
    """Tokens that each launch on its way may commit at most."""
    draft_row: int = -1
    draft: list[int] = field(default_factory=list)

    @property
    def num_in_flight(self) -> int:
        return len(self.in_flight)


@dataclass
class _Launched:
    """decodes: with the draft that was verified; extends: with whether it samples."""

    ticket: Ticket | None = None
    decodes: list[tuple[Rider, list[int] | None]] = field(default_factory=list)
    extends: list[tuple[Rider, bool]] = field(default_factory=list)


class EngineRig:
    def __init__(
        self, engine: DeviceEngine, pool: PagePool, *, num_lanes: int, vocab: int, extend_rows: int,
        seed: int, ring: Ring | None = None, lag: int = 1,
    ) -> None:  # fmt: skip
        """ring: blocks are verified; None is plain decoding. lag: launches made before one is read."""
        self.engine, self.pool, self.ring = engine, pool, ring
        self._num_lanes, self._vocab, self._extend_rows, self._lag = num_lanes, vocab, extend_rows, lag
        self._rng = random.Random(seed)
        self._rows_each = 1 if ring is None else ring.shape.block_size
        self._free_lanes = list(range(num_lanes))
        self._running: list[Rider] = []
        self._in_flight: deque[_Launched] = deque()
        self.accept_counts: set[int] = set()
        self.num_launches = 0
        self.widths: set[tuple[int, int]] = set()
        self._kv = engine._memory.kv.unflatten(2, (-1, pool.page_size))
        self._on_device(lambda: self._kv[:, :, 1:].fill_(float("nan")))

    def run(self, waiting: list[Rider]) -> None:
        waiting = list(waiting)
        while waiting or self._running:
            # Some come together, some while others decode.
            while waiting and self._free_lanes and (not self._running or self._rng.random() < 0.5):
                self._begin(waiting.pop(0))
            launch, launched = self._plan()
            if launched is not None:
                launched.ticket = self.engine.launch(launch)
                self.num_launches += 1
                self._in_flight.append(launched)
                if self.ring is not None:
                    self._on_device(lambda launched=launched: self._write_drafts(launched))
            if len(self._in_flight) > (self._lag if launched is not None else 0):
                self._complete(self._in_flight.popleft())
        assert self.pool.num_free == self.pool.num_pages

    def _begin(self, rider: Rider) -> None:
        rider.lane = self._free_lanes.pop(self._rng.randrange(len(self._free_lanes)))
        rider.table = PageTable(self.pool)
        self.engine.join(rider.lane, rider.sampling)
        self._running.append(rider)

    def _plan(self) -> tuple[Launch, _Launched | None]:
        launch = Launch(draft_rows=None if self.ring is None else [])
        launched = _Launched()
        budget = self._extend_rows
        for rider in self._running:
            if rider.extended == len(rider.prompt):
                # Each launch on its way brings a token at least.
                if rider.got + rider.num_in_flight < rider.num_wanted:
                    self._decode(rider, launch, launched)
                continue
            count = min(budget, len(rider.prompt) - rider.extended, self._rng.randint(1, self._extend_rows))
            if count:
                budget -= count
                self._extend(rider, count, launch, launched)
        # Drafts are of the step before only.
        for rider in self._running:
            rider.draft_row = -1
        ring_row = len(launch.lanes)
        for i, extend in enumerate(launch.extends):
            if extend.samples and self.ring is not None:
                launch.extends[i] = ExtendRows(
                    extend.lane, extend.start, extend.token_ids, extend.samples, ring_row
                )
                ring_row += 1
        self.widths.add((len(launch.lanes), len(launch.extends)))
        return launch, launched if launch.lanes or launch.extends else None

    def _decode(self, rider: Rider, launch: Launch, launched: _Launched) -> None:
        farthest = len(rider.prompt) + rider.got + sum(rider.in_flight) - 1
        self._reserve(rider, farthest + self._rows_each, launch)
        launch.lanes.append(rider.lane)
        draft = None
        if launch.draft_rows is not None:
            use = rider.draft_row >= 0 and self._rng.random() < 0.8
            launch.draft_rows.append(rider.draft_row if use else -1)
            draft = rider.draft if use else None
        launched.decodes.append((rider, draft))
        rider.in_flight.append(self._rows_each)

    def _extend(self, rider: Rider, count: int, launch: Launch, launched: _Launched) -> None:
        start, stop = rider.extended, rider.extended + count
        self._reserve(rider, stop, launch)
        samples = stop == len(rider.prompt)
        launch.extends.append(ExtendRows(rider.lane, start, rider.prompt[start:stop], samples))
        launched.extends.append((rider, samples))
        rider.extended = stop
        if samples:
            rider.in_flight.append(1)

    def _reserve(self, rider: Rider, num_tokens: int, launch: Launch) -> None:
        assert rider.table is not None
        had = rider.table.num_pages
        rider.table.reserve(num_tokens)
        new = rider.table.pages[had:]
        launch.pages += [PageEntry(rider.lane, had + i, page) for i, page in enumerate(new)]

    def _write_drafts(self, launched: _Launched) -> None:
        """What the drafter does behind a launch, from what the launch published."""
        assert self.ring is not None
        riders = [rider for rider, _ in launched.decodes]
        riders += [rider for rider, samples in launched.extends if samples]
        bases, counts, anchors = self.ring.base.tolist(), self.ring.count.tolist(), self.ring.anchor.tolist()
        rows = self.ring.drafts.tolist()
        for row, rider in enumerate(riders):
            place = bases[row] + counts[row] - len(rider.prompt)
            assert anchors[row] == rider.answer[place], f"anchor of ring row {row}"
            rider.draft_row, rider.draft = row, self._draft(rider.answer[place + 1 :])
            rows[row] = rider.draft
        self.ring.drafts.copy_(torch.tensor(rows, dtype=torch.int32))

    def _draft(self, right: list[int]) -> list[int]:
        draft = right[: self._rows_each - 1]
        assert len(draft) == self._rows_each - 1, "the answer is too short"
        kind = self._rng.choice(("right", "wrong", "wrong", "outside", "chance"))
        place = self._rng.randrange(len(draft))
        if kind == "wrong":
            draft[place] = (draft[place] + 1) % self._vocab
        elif kind == "outside":
            draft[place] = self._rng.choice((-1, -(2**31), self._vocab, 2**31 - 1))
        elif kind == "chance":
            draft = [self._rng.randrange(self._vocab) for _ in draft]
        return draft

    def _complete(self, launched: _Launched) -> None:
        assert launched.ticket is not None
        results = self.engine.results_to_host(launched.ticket)
        for i, (rider, draft) in enumerate(launched.decodes):
            self._take_block(rider, draft, results, i)
        for i, (rider, samples) in enumerate(launched.extends):
            if samples:
                rider.in_flight.pop(0)
                assert results.extend_finite[i] and results.extend_tokens[i] == rider.answer[0]
                rider.got += 1
        for rider in list(self._running):
            if rider.got >= rider.num_wanted and not rider.in_flight:
                self._end(rider)
        self._check_free_pages()

    def _take_block(self, rider: Rider, draft: list[int] | None, results: Results, i: int) -> None:
        rider.in_flight.pop(0)
        coming = rider.answer[rider.got :]
        num_accepted, num_clamped = 0, 0
        if draft is not None:
            fed = [min(max(token, 0), self._vocab - 1) for token in draft]
            num_clamped = sum(a != b for a, b in zip(fed, draft, strict=True))
            while num_accepted < len(fed) and fed[num_accepted] == coming[num_accepted]:
                num_accepted += 1
        assert results.finite[i] and results.num_clamped[i] == num_clamped
        assert results.num_accepted[i] == num_accepted, f"draft {draft}, right was {coming}"
        assert results.tokens[i, : num_accepted + 1].tolist() == coming[: num_accepted + 1]
        self.accept_counts.add(num_accepted)
        # What a request that has ended chose once more is discarded by whoever reads it.
        rider.got += num_accepted + 1

    def _end(self, rider: Rider) -> None:
        assert rider.table is not None
        self._running.remove(rider)
        self._free_lanes.append(rider.lane)
        pages = rider.table.release()
        # The list becomes a tensor on the engine's stream: made on another, it might not be there in time.
        self._on_device(
            lambda: self._kv.index_fill_(2, torch.tensor(pages, device=self._kv.device), float("nan"))
        )

    def _check_free_pages(self) -> None:
        """Nobody wrote where nobody owns."""
        owned = {page for rider in self._running if rider.table for page in rider.table.pages}
        free = [page for page in range(1, self.pool.num_pages + 1) if page not in owned]
        self._on_device(lambda: _assert_nan(self._kv[:, :, free]))

    def _on_device(self, work: Callable[[], object]) -> None:
        """Run on the engine's stream, behind what it has been given."""
        with torch.cuda.stream(self.engine.stream):
            work()


def _assert_nan(pages: torch.Tensor) -> None:
    assert pages.isnan().all(), "a page that nobody owns was written"
