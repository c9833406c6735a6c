"""Drafting in the target's own process, on its own stream: what a split into two processes is compared with.

A PipelinedDrafter that gives each posted step to the drafter's engine at once. Stream order is all the
synchronisation there is: no flags, no messages, no waits. Exists in the bench alone. Must not know
sockets, protobuf or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from common.contract import DraftContract
from common.handoff.transport import Outcome
from common.paged_kv import PageEntry, PagePool, PageTable
from services.drafter.draft_work import DeviceAppend, DraftResults, DraftWork
from services.target.core.pipelined_source import PostedExtend, PostedRow, PostedStep
from tools.gpu_bench.same_stream import SameStreamDrafter

if TYPE_CHECKING:
    from common.handoff.ring import Ring
    from services.drafter.launch_control import LaunchTimes, Ticket


class DraftingEngine(Protocol):
    """What is asked of services.drafter.device_engine.DeviceDraftEngine."""

    sentinel_lane: int
    times: LaunchTimes

    def join(self, lane: int, start_position: int) -> None: ...

    def launch(self, work: DraftWork) -> Ticket: ...

    def results_to_host(self, ticket: Ticket) -> DraftResults: ...


@dataclass
class _Session:
    """A lane, the lowest position at which its context may start, its pages, and how many of them the
    engine was told."""

    lane: int
    start: int
    pages: PageTable
    num_told: int = 0


@dataclass
class DraftTimes:
    """Device seconds of drafting, step by step, since they were last taken: of storing context, of blocks."""

    ingest_s: list[float] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)


class InprocessDrafter(SameStreamDrafter):
    """A PipelinedDrafter over an engine that works on the target's stream and is attached to its ring."""

    def __init__(self, engine: DraftingEngine, draft: DraftContract, ring: Ring, pool: PagePool) -> None:
        """pool: the pages of the engine's K/V; each of its lanes must find what a request can need."""
        super().__init__(draft, ring)
        self.times = DraftTimes()
        self._engine = engine
        self._block_size = draft.block_size
        self._pool = pool
        self._free_lanes = list(reversed(range(engine.sentinel_lane)))
        self._sessions: dict[int, _Session] = {}
        self._tickets: dict[int, Ticket] = {}

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def post(self, step: PostedStep) -> None:
        for session_id in step.ended:
            self._end(session_id)
        work = DraftWork()
        for extend in step.extends:
            work.appends.append(self._append(extend, work.pages))
        for row in step.rows:
            lane, begins = self._row(row, work.pages)
            work.lanes.append(lane)
            work.begins.append(begins)
        self._rows = {row.session_id: i for i, row in enumerate(step.rows) if row is not None}
        if work.appends or work.lanes:
            self._tickets[step.number] = self._engine.launch(work)

    def observe_completed(self, step_number: int, invalid: Sequence[int] = ()) -> None:
        """All that was launched before that step's own drafting is over by now: on one stream, what came
        earlier is done earlier."""
        for number in [number for number in self._tickets if number < step_number]:
            self._read(self._tickets.pop(number))

    def close(self) -> None:
        for session_id in list(self._sessions):
            self._end(session_id)
        for ticket in self._tickets.values():
            self._read(ticket)
        self._tickets.clear()

    # --- parts ---------------------------------------------------------------------------------------

    def _append(self, extend: PostedExtend, entries: list[PageEntry]) -> DeviceAppend:
        session = self._sessions.get(extend.session_id) or self._begin(extend.session_id, extend.position)
        self._reserve(session, extend.position + extend.num_rows, entries)
        return DeviceAppend(session.lane, extend.position, extend.row_start, extend.num_rows)

    def _row(self, row: PostedRow | None, entries: list[PageEntry]) -> tuple[int, bool]:
        if row is None:
            return self._engine.sentinel_lane, False
        session = self._sessions.get(row.session_id)
        begins = session is None
        if session is None:
            session = self._begin(row.session_id, row.position_min)
        # All rows of a block are stored before it is known how many are context, and the next block after.
        self._reserve(session, row.position_max + 2 * self._block_size, entries)
        return session.lane, begins

    def _begin(self, session_id: int, start: int) -> _Session:
        session = _Session(self._free_lanes.pop(), start, PageTable(self._pool))
        self._engine.join(session.lane, start)
        self._sessions[session_id] = session
        return session

    def _reserve(self, session: _Session, stop: int, entries: list[PageEntry]) -> None:
        session.pages.reserve(stop - session.start)
        told, pages = session.num_told, session.pages.pages
        entries += [PageEntry(session.lane, i, pages[i]) for i in range(told, len(pages))]
        session.num_told = len(pages)

    def _end(self, session_id: int) -> None:
        """Its pages may be another's at once: whatever still reads them is earlier on the stream."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            session.pages.release()
            self._free_lanes.append(session.lane)

    def _read(self, ticket: Ticket) -> None:
        results = self._engine.results_to_host(ticket)
        wrong = {r.outcome for r in (*results.rows, *results.appends)} - {Outcome.OK, Outcome.UNKNOWN_SESSION}
        assert not wrong, f"the books of target and drafter differ: {wrong}"
        if not results.appends:
            self.times.ingest_s.append(self._engine.times.ingest_s)
            self.times.draft_s.append(self._engine.times.draft_s)

    def take_times(self) -> DraftTimes:
        """Of the steps without appends that were read since the last call."""
        times, self.times = self.times, DraftTimes()
        return times
