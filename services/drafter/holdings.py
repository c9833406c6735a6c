"""What sessions hold, pages and lanes, and when it is free again. Bookkeeping only, no rules of the protocol.

On a device steps are in flight: launched, and not over. A session that ends keeps its pages until its steps
in flight are over: only then is it known whether they must be zeroed.
Its lane is free at once, since the device's work is in order: whoever joins it comes after those steps.
"""

from __future__ import annotations

from common.paged_kv import OutOfPages, PageEntry, PagePool, PageTable
from services.drafter.session import LaneState, Session, SessionKey


class Holdings:
    """Pages and lanes of all sessions.

    Invariant (I3): free pages + pages of sessions, open or leaving, = all pages; free lanes + lanes of open
    sessions = all lanes.
    """

    def __init__(self, pool: PagePool, num_lanes: int) -> None:
        """num_lanes: as many as sessions may be open, counted from 0; 0 where sessions have none."""
        self._pool = pool
        self._num_lanes = num_lanes
        self._free_lanes = list(range(num_lanes))
        self._open: set[Session] = set()
        # Ended, with steps in flight.
        self._leaving: set[Session] = set()

    def admit(self, key: SessionKey, epoch: int, start_position: int, now_s: float) -> Session:
        """A session that holds its lane and no page yet."""
        lane_state = LaneState(self._free_lanes.pop()) if self._num_lanes else None
        session = Session(
            key, epoch, start_position, start_position, PageTable(self._pool), now_s, lane_state
        )  # fmt: skip
        self._open.add(session)
        return session

    def reserve(self, session: Session, num_rows: int) -> bool:
        """Room for num_rows from the session's first position; False, and nothing taken, without pages."""
        try:
            session.pages.reserve(num_rows)
        except OutOfPages:
            return False
        return True

    def lacks(self, session: Session, num_rows: int) -> bool:
        """Whether `reserve` would fail now."""
        return session.pages.missing_for(num_rows) > self._pool.num_free

    def part(self, session: Session) -> tuple[int, ...]:
        """The session has ended. Returns pages that are free now and must be zeroed."""
        self._open.remove(session)
        state = session.lane_state
        if state is not None:
            self._free_lanes.append(state.lane)
            if state.num_in_flight:
                self._leaving.add(session)
                return ()
        return _release(session)

    def begin_step(self, session: Session) -> list[PageEntry]:
        """A step that names the session is about to be launched. Its page entries that the device was not
        told yet."""
        state = _lane_state(session)
        state.num_in_flight += 1
        told, state.num_pages_told = state.num_pages_told, session.pages.num_pages
        return [PageEntry(state.lane, i, page) for i, page in enumerate(session.pages.pages[told:], told)]

    def end_step(self, session: Session) -> tuple[int, ...]:
        """A step that named the session is over. Returns pages that are free now and must be zeroed."""
        state = _lane_state(session)
        assert state.num_in_flight > 0
        state.num_in_flight -= 1
        if state.num_in_flight or session not in self._leaving:
            return ()
        self._leaving.remove(session)
        return _release(session)

    @property
    def num_pages_used(self) -> int:
        return sum(session.pages.num_pages for session in (*self._open, *self._leaving))

    @property
    def usage(self) -> float:
        """Share of the pages that is not free, 0 to 1."""
        return 1 - self._pool.num_free / self._pool.num_pages

    @property
    def num_pages_unaccounted(self) -> int:
        """Pages that are neither free nor some session's; 0 unless there is a bug."""
        return self._pool.num_pages - self._pool.num_free - self.num_pages_used

    @property
    def num_lanes_unaccounted(self) -> int:
        """Lanes that are neither free nor an open session's, or are both; 0 unless there is a bug."""
        found = self._free_lanes + [s.lane_state.lane for s in self._open if s.lane_state is not None]
        return self._num_lanes - len(set(found)) + len(found) - len(set(found))


def _lane_state(session: Session) -> LaneState:
    assert session.lane_state is not None, "steps are in flight only where sessions have lanes"
    return session.lane_state


def _release(session: Session) -> tuple[int, ...]:
    pages = session.pages.release()
    return tuple(pages) if session.is_spoiled else ()
