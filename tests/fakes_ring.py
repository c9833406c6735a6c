"""The drafter's device without one: a stream that runs as far as its flags let it, flags that are numbers,
and an engine over a ring whose "states" say whose they are.

A captured row holds (owner, position); NaN as the owner is a row that is not finite. The engine keeps such
cells by slot and drafts right tokens only if all of a lane's context, read through its page table, is the
anchor's owner's and lies at the right positions: so a page that two sessions share, or that was told to the
wrong lane, shows in the drafts.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from common.handoff.ring import Ring, RingShape
from common.handoff.transport import Outcome
from services.drafter.draft_work import DraftResults, DraftWork, LaneResult
from services.drafter.launch_control import LAUNCHES_IN_FLIGHT_MAX, LaunchTimes, Ticket
from services.drafter.ring_mapping import MappedRing

# Anchors below this belong to owner 0, and so on.
OWNER_TOKENS = 1000


@dataclass(eq=False)
class FakeMark:
    """A place in a FakeGpu's stream."""

    is_passed: bool = False

    def query(self) -> bool:
        return self.is_passed


class FakeGpu:
    """One stream. Its work runs at once, up to a wait that does not hold."""

    def __init__(self) -> None:
        self._work: deque[tuple[Callable[[], bool], FakeMark]] = deque()
        self._lock = threading.RLock()

    def enqueue(self, work: Callable[[], object], holds: Callable[[], bool] = lambda: True) -> FakeMark:
        """Work that runs once `holds`."""

        def attempt() -> bool:
            if not holds():
                return False
            work()
            return True

        mark = FakeMark()
        with self._lock:
            self._work.append((attempt, mark))
            self.run()
        return mark

    def run(self) -> None:
        with self._lock:
            while self._work and self._work[0][0]():
                self._work.popleft()[1].is_passed = True

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not self._work


class FakeFlags:
    """A connection's words. `ready` is set by the test, which is the target's GPU."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.ready = self.done = self.num_released = 0
        self.awaited: list[int] = []

    def await_ready(self, sequence: int) -> FakeMark:
        self.awaited.append(sequence)
        return self._gpu.enqueue(lambda: None, holds=lambda: self.ready >= sequence)

    def write_done(self, sequence: int) -> FakeMark:
        return self._gpu.enqueue(lambda: self._set_done(sequence))

    def release(self) -> None:
        self.num_released += 1
        self.set_ready(1 << 30)

    def set_ready(self, sequence: int) -> None:
        self.ready = sequence
        self._gpu.run()

    def _set_done(self, sequence: int) -> None:
        assert sequence > self.done, "done never goes back"
        self.done = sequence


@dataclass
class _Lane:
    start: int = 0
    context_len: int = 0
    pages: dict[int, int] = field(default_factory=dict)


class FakeRingEngine:
    """Has the interface of DeviceDraftEngine, as far as device_runner needs it. While it hangs, no step comes
    to its end."""

    def __init__(
        self, gpu: FakeGpu, *, num_lanes: int, page_size: int, block_size: int, context_len_max: int
    ) -> None:
        self.sentinel_lane = num_lanes
        self.times = LaunchTimes(0.001, 0.002)
        self.gpu = gpu
        self.ring: Ring | None = None
        self.num_attached = 0
        self.hangs = False
        self.attach_fails_with: Exception | None = None
        self.cells: dict[int, tuple[float, float]] = {}
        self._lanes = [_Lane() for _ in range(num_lanes)]
        self._page_size, self._block_size = page_size, block_size
        self._context_len_max = context_len_max
        self._results: dict[int, DraftResults | None] = {}
        self._next = 0

    def attach(self, ring: Ring) -> None:
        assert self.gpu.is_idle and not self._results
        if self.attach_fails_with is not None:
            raise self.attach_fails_with
        self.num_attached += ring is not self.ring
        self.ring = ring

    def detach(self) -> None:
        assert self.gpu.is_idle and not self._results
        self.ring = None

    def join(self, lane: int, start_position: int) -> None:
        self.gpu.enqueue(lambda: self._lanes.__setitem__(lane, _Lane(start_position, start_position)))

    def launch(
        self, work: DraftWork, enter: Callable[[], object], leave: Callable[[], object]
    ) -> Ticket:
        assert self.ring is not None
        shape = self.ring.shape
        lanes = [lane for lane in work.lanes if lane != self.sentinel_lane]
        appended = [append.lane for append in work.appends]
        assert len(set(lanes)) == len(lanes) and len(set(appended)) == len(appended)
        assert len(work.begins) == len(work.lanes) <= shape.num_rows
        rows = [r for a in work.appends for r in range(a.row_start, a.row_start + a.num_rows)]
        assert len(set(rows)) == len(rows) and all(0 <= row < shape.extend_rows_max for row in rows)
        assert len(self._results) < LAUNCHES_IN_FLIGHT_MAX
        ticket = Ticket(self._next, len(work.lanes), len(work.appends))
        self._next += 1
        self._results[ticket.number] = None
        enter()
        self.gpu.enqueue(
            lambda: self._results.__setitem__(ticket.number, self._run(work, self.ring)),
            holds=lambda: not self.hangs,
        )
        leave()
        return ticket

    def results_to_host(self, ticket: Ticket) -> DraftResults:
        results = self._results.pop(ticket.number)
        assert results is not None, "the host would wait for the device"
        return results

    def clean(self, pages: Sequence[int]) -> None:
        taken = set(pages)

        def zero() -> None:
            self.cells = {s: c for s, c in self.cells.items() if s // self._page_size not in taken}

        self.gpu.enqueue(zero)

    @property
    def num_spoiled_cells(self) -> int:
        return sum(math.isnan(owner) for owner, _ in self.cells.values())

    # --- what runs on the device -----------------------------------------------------------------------

    def _run(self, work: DraftWork, ring: Ring | None) -> DraftResults:
        assert ring is not None
        for lane, index, page in work.pages:
            self._lanes[lane].pages[index] = page
        appends = [
            self._take(
                a.lane, a.position, a.num_rows, ring.extend_captured[a.row_start : a.row_start + a.num_rows]
            )
            for a in work.appends
        ]
        rows = [self._row(ring, i, lane, work.begins[i]) for i, lane in enumerate(work.lanes)]
        return DraftResults(appends, rows)

    def _row(self, ring: Ring, i: int, lane: int, begins: bool) -> LaneResult:
        if lane == self.sentinel_lane:
            return LaneResult(Outcome.UNKNOWN_SESSION, 0)
        size, base, count = self._block_size, int(ring.base[i]), int(ring.count[i])
        if begins:
            self._lanes[lane].start = self._lanes[lane].context_len = base
        captured = ring.verify_captured[i * size : (i + 1) * size]
        result = self._take(lane, base, count, captured)
        if result.outcome is Outcome.OK:
            ring.drafts[i] = torch.tensor(self._draft(lane, int(ring.anchor[i])))
        return result

    def _take(self, lane: int, position: int, count: int, captured: torch.Tensor) -> LaneResult:
        state = self._lanes[lane]
        if not state.start <= position <= state.context_len:
            return LaneResult(Outcome.NEEDS_RESYNC, state.context_len)
        if position + count > self._context_len_max:
            return LaneResult(Outcome.CONTEXT_LIMIT, state.context_len)
        for k, (owner, at) in enumerate(captured.tolist()):
            self._store(state, position + k, (owner, at))
        state.context_len = position + count
        finite = not bool(captured[:count].isnan().any())
        return LaneResult(Outcome.OK if finite else Outcome.NON_FINITE, state.context_len)

    def _draft(self, lane: int, anchor: int) -> list[int]:
        state, owner = self._lanes[lane], anchor // OWNER_TOKENS
        context = range(state.start, state.context_len)
        right = all(self.cells.get(self._slot(state, p)) == (owner, p) for p in context)
        # The block's own rows lie behind the context, over what was not accepted.
        for k in range(self._block_size):
            self._store(state, state.context_len + k, (owner, -1.0))
        return [anchor + k if right else 0 for k in range(1, self._block_size)]

    def _store(self, lane: _Lane, position: int, content: tuple[float, float]) -> None:
        slot = self._slot(lane, position)
        assert slot >= self._page_size, "a row lies in the sentinel page"
        self.cells[slot] = content

    def _slot(self, lane: _Lane, position: int) -> int:
        page, offset = divmod(position - lane.start, self._page_size)
        return lane.pages.get(page, 0) * self._page_size + offset


class FakeMapping:
    """Has the interface of RingMapping; each offer is of the one ring there is, with flags of its own."""

    def __init__(self, gpu: FakeGpu, shape: RingShape) -> None:
        self._gpu = gpu
        self.ring = Ring.local(shape, "cpu")
        self.flags: list[FakeFlags] = []
        self.is_mapped = False

    def map(self, offer: object) -> MappedRing:
        assert self._gpu.is_idle, "mapping waits for all of the device's work"
        self.is_mapped = True
        self.flags.append(FakeFlags(self._gpu))
        return MappedRing(self.ring, self.flags[-1])

    def unmap(self) -> None:
        self.is_mapped = False
