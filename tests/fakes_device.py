"""A device without tensors: lanes, pages and a stream, and a made-up model that sees what the pages hold.

What a row sees are the cells of its position and all before it, found through its lane's page table; the
token after them is a hash of them. So a page that is another's, a position that is off by one, a lane that
was given away too soon or a draft that was taken for accepted gives other tokens at once. Work is done when
it is waited for, or at some time before, as chance will have it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from common.contract import DraftContract, Mismatch
from services.target.core.device_launch import ExtendRows, Launch, Results, Ticket
from services.target.core.draft_fit import DraftDoesNotFit
from services.target.core.request import SamplingParams

VOCAB_ROWS = 40
_NAN = -1


def cell(position: int, token: int) -> int:
    """What a row leaves in its slot, and in what it captures."""
    return position * VOCAB_ROWS + token


def build_contract(block_size: int) -> DraftContract:
    return DraftContract((0,), block_size, block_size - 1, 0, 4096, "draft")


class Oracle:
    """The made-up model."""

    def __init__(self, nan_share: float = 0.0) -> None:
        self._nan_limit = int(nan_share * 100_003)

    def choose(self, cells: Sequence[int], sampling: SamplingParams) -> int | None:
        """The token after these cells; None where logits are not finite."""
        if _NAN in cells:
            return None
        key = sampling.seed if sampling.temperature > 0 else -1
        number = hash((key, *cells))
        return None if number % 100_003 < self._nan_limit else number // 7 % VOCAB_ROWS

    def answer(
        self, prompt: list[int], sampling: SamplingParams, count: int, stops: frozenset[int] = frozenset()
    ) -> tuple[list[int], bool]:
        """Plain decoding: the tokens, and whether they end because of logits that are not finite."""
        cells = [cell(position, token) for position, token in enumerate(prompt)]
        tokens: list[int] = []
        if any(self.choose(cells[:stop], sampling) is None for stop in range(1, len(cells))):
            return tokens, True
        while len(tokens) < count:
            token = self.choose(cells, sampling)
            if token is None:
                return tokens, True
            tokens.append(token)
            if token in stops:
                break
            cells.append(cell(len(cells), token))
        return tokens, False


class FakeRing:
    """The hand-off ring with cells for states. number: of the launch that wrote it last."""

    def __init__(self, draft: DraftContract, num_rows: int, extend_rows_max: int) -> None:
        width = draft.block_size
        self.shape = SimpleNamespace(captured_width=3, dtype=SimpleNamespace(itemsize=4))
        self.number = -1
        self.base, self.count, self.anchor = ([0] * num_rows for _ in range(3))
        self.drafts = [[0] * (width - 1) for _ in range(num_rows)]
        self.verify_captured = [0] * (num_rows * width)
        self.extend_captured = [0] * extend_rows_max


@dataclass
class _Lane:
    pages: list[int]
    sampling: SamplingParams = SamplingParams()
    anchor: int = 0
    position: int = 0


@dataclass
class FakeDeviceEngine:
    """Has the interface of DeviceEngine; see tests.fakes_device. Wider blocks than block_size_fits have no
    memory."""

    oracle: Oracle
    rng: random.Random
    num_pages: int
    page_size: int
    num_lanes: int
    max_len: int
    extend_rows_max: int
    extends_max: int
    block_size_max: int = 8
    block_size_fits: int = 8
    num_launches: int = 0
    num_accepted: int = 0
    zeroed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._stream: deque[Callable[[], None]] = deque()
        self._num_pages_each = -(-(self.max_len + 3 * self.block_size_max) // self.page_size)
        self._lanes = [_Lane([0] * self._num_pages_each) for _ in range(self.num_lanes)]
        self._joined: set[int] = set()
        self._cells = [0] * ((self.num_pages + 1) * self.page_size)
        self._results: dict[int, Results] = {}
        self._unread: set[int] = set()
        self._draft: DraftContract | None = None
        self._ring: FakeRing | None = None
        self._captured: list[int] = []
        self._drafts: list[list[int]] = []

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    # --- the stream ------------------------------------------------------------------------------------

    def enqueue(self, work: Callable[[], None]) -> None:
        self._stream.append(work)
        for _ in range(self.rng.choice([0, 0, 1, 3])):
            self._advance()

    def _advance(self) -> None:
        if self._stream:
            self._stream.popleft()()

    # --- DeviceEngine ----------------------------------------------------------------------------------

    def prepare_drafting(self, draft: DraftContract, ring: FakeRing, *, by_messages: bool = False) -> None:
        if draft.block_size > self.block_size_fits:
            self._draft = self._ring = None
            raise DraftDoesNotFit(Mismatch("block_size", self.block_size_fits, draft.block_size))
        if (draft, ring) != (self._draft, self._ring):
            while self._stream:
                self._advance()
        self._draft, self._ring = draft, ring

    def join(self, lane: int, sampling: SamplingParams) -> None:
        self._joined.add(lane)

        def begin() -> None:
            self._lanes[lane] = _Lane([0] * self._num_pages_each, sampling)

        self.enqueue(begin)

    def set_drafts(self, drafts: list[list[int]]) -> None:
        assert self._draft is not None
        assert all(len(draft) == self._draft.num_draft_tokens for draft in drafts)
        self._drafts = [list(draft) for draft in drafts]

    def launch(
        self, launch: Launch, enter: Callable[[], object] = int, leave: Callable[[], object] = int
    ) -> Ticket:
        lanes = [*launch.lanes, *(extend.lane for extend in launch.extends)]
        assert lanes, "a launch of nothing"
        assert len(set(lanes)) == len(lanes), "a lane rides twice"
        assert set(lanes) <= self._joined
        num_extend_rows = sum(len(extend.token_ids) for extend in launch.extends)
        assert num_extend_rows <= self.extend_rows_max and len(launch.extends) <= self.extends_max
        assert all(extend.token_ids for extend in launch.extends)
        drafting = launch.draft_rows is not None
        assert not drafting or len(launch.draft_rows) == len(launch.lanes)
        width = self._draft.block_size if drafting else 1
        ring_rows = [extend.ring_row for extend in launch.extends if extend.ring_row >= 0]
        assert ring_rows == list(range(len(launch.lanes), len(launch.lanes) + len(ring_rows)))
        assert not ring_rows or drafting
        number = self.num_launches
        self.num_launches += 1
        self._unread.add(number)
        assert len(self._unread) <= 2
        ring, drafts = self._ring, self._drafts if launch.drafts_inline else None
        enter()
        self.enqueue(lambda: self._run(number, launch, width, ring if drafting else None, drafts))
        leave()
        return Ticket(number, len(launch.extends), len(launch.lanes), width, num_extend_rows)

    def results_to_host(self, ticket: Ticket) -> Results:
        self._unread.remove(ticket.number)
        while ticket.number not in self._results:
            self._advance()
        return self._results.pop(ticket.number)

    def captured_to_host(self, ticket: Ticket) -> list[int]:
        assert ticket.number == self.num_launches - 1
        assert len(self._captured) == ticket.num_extend_rows + ticket.num_lanes * ticket.rows_each
        return self._captured

    def zero_pages(self, pages: list[int]) -> None:
        self.zeroed |= set(pages)

        def zero() -> None:
            for page in pages:
                self._cells[page * self.page_size : (page + 1) * self.page_size] = [0] * self.page_size

        self.enqueue(zero)

    # --- what runs on the device -----------------------------------------------------------------------

    def _run(
        self, number: int, launch: Launch, width: int, ring: FakeRing | None, drafts: list[list[int]] | None
    ) -> None:
        for lane, page_index, page in launch.pages:
            assert 1 <= page <= self.num_pages
            self._lanes[lane].pages[page_index] = page
        self._captured = []
        if ring is not None:
            ring.number = number
        extended = [self._extend(extend, ring) for extend in launch.extends]
        before = [list(row) for row in (drafts or (ring.drafts if ring else ()))]
        blocks = []
        for ring_row, lane in enumerate(launch.lanes):
            draft_row = launch.draft_rows[ring_row] if launch.draft_rows is not None else -1
            draft = before[draft_row] if draft_row >= 0 else None
            blocks.append(self._verify(self._lanes[lane], width, draft, ring, ring_row))
        tokens = np.array([tokens for tokens, _, _, _ in blocks], np.int32).reshape(-1, width)
        num_accepted = np.array([num_accepted for _, num_accepted, _, _ in blocks], np.int32)
        self._results[number] = Results(
            tokens=tokens,
            num_accepted=num_accepted,
            finite=np.array([finite for _, _, finite, _ in blocks], bool),
            num_clamped=np.array([num_clamped for _, _, _, num_clamped in blocks], np.int32),
            extend_tokens=np.array([token or 0 for token in extended], np.int32),
            extend_finite=np.array([token is not None for token in extended], bool),
            extend_s=0.0, verify_s=0.0, gpu_s=0.0,
        )  # fmt: skip

    def _slot(self, lane: _Lane, position: int) -> int:
        return lane.pages[position // self.page_size] * self.page_size + position % self.page_size

    def _store(self, lane: _Lane, start: int, tokens: list[int]) -> list[int]:
        """Cells of rows from `start` on; those of rows that see numbers that are not finite are such."""
        stored = [cell(start + i, token) for i, token in enumerate(tokens)]
        for i, content in enumerate(stored):
            self._cells[self._slot(lane, start + i)] = content
        for i in range(len(stored)):
            if self._choose(lane, start + i) is None:
                self._cells[self._slot(lane, start + i)] = stored[i] = _NAN
        return stored

    def _choose(self, lane: _Lane, position: int) -> int | None:
        seen = [self._cells[self._slot(lane, p)] for p in range(position + 1)]
        return self.oracle.choose(seen, lane.sampling)

    def _extend(self, extend: ExtendRows, ring: FakeRing | None) -> int | None:
        lane, stop = self._lanes[extend.lane], extend.start + len(extend.token_ids)
        assert all(self._slot(lane, p) >= self.page_size for p in range(stop)), "tokens without a page"
        stored = self._store(lane, extend.start, extend.token_ids)
        if ring is not None:
            ring.extend_captured[len(self._captured) : len(self._captured) + len(stored)] = stored
            self._captured += stored
        token = self._choose(lane, stop - 1)
        if extend.samples:
            lane.anchor, lane.position = token or 0, stop
        if ring is not None and extend.ring_row >= 0:
            assert extend.samples
            row = extend.ring_row
            ring.base[row], ring.count[row], ring.anchor[row] = stop, 0, lane.anchor
        return token

    def _verify(
        self, lane: _Lane, width: int, draft: list[int] | None, ring: FakeRing | None, ring_row: int
    ) -> tuple[list[int], int, bool, int]:
        clamped = [min(max(token, 0), VOCAB_ROWS - 1) for token in draft or [0] * (width - 1)]
        rows = [lane.anchor, *clamped]
        base = lane.position
        stored = self._store(lane, base, rows)
        chosen = [self._choose(lane, base + i) for i in range(width)]
        tokens = [token or 0 for token in chosen]
        num_accepted, num_drafts = 0, width - 1 if draft is not None else 0
        while num_accepted < num_drafts and rows[num_accepted + 1] == tokens[num_accepted]:
            num_accepted += 1
        self.num_accepted += num_accepted
        lane.anchor, lane.position = tokens[num_accepted], base + num_accepted + 1
        if ring is not None:
            ring.verify_captured[ring_row * width : (ring_row + 1) * width] = stored
            self._captured += stored
            ring.base[ring_row], ring.count[ring_row] = base, num_accepted + 1
            ring.anchor[ring_row] = lane.anchor
        num_clamped = sum(a != b for a, b in zip(clamped, draft or clamped, strict=True))
        return tokens, num_accepted, None not in chosen[: num_accepted + 1], num_clamped
