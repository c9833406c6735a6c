"""Who waits, who runs and on which pages, and whose drafter sessions are over. No torch.

Books only: who takes part in a step is decided by a scheduler, which is a roster that decides.
"""

from __future__ import annotations

from collections import deque

from common.paged_kv import PagePool, PageTable
from services.target.core.request import Phase, Request


class Roster:
    """Owns the waiting queue, the running list and the page pool."""

    def __init__(self, pool: PagePool, num_running_max: int) -> None:
        self.pool = pool
        self.num_preemptions = 0
        self._num_running_max = num_running_max
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._ended_sessions: list[int] = []
        self._next_session_id = 1

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Request]:
        """In order of admission."""
        return list(self._running)

    @property
    def num_pages_unaccounted(self) -> int:
        """Pages that are neither free nor some running request's; 0 unless there is a bug (I3)."""
        held = sum(r.page_table.num_pages for r in self._running if r.page_table is not None)
        return self.pool.num_pages - self.pool.num_free - held

    def add(self, request: Request) -> None:
        """Queue a new request. Its tokens must fit the pool when it runs alone."""
        assert self.pool.pages_for(request.len_max) <= self.pool.num_pages
        self._waiting.append(request)

    def find(self, request_id: str) -> Request | None:
        """The waiting or running request of this id."""
        for request in (*self._running, *self._waiting):
            if request.request_id == request_id:
                return request
        return None

    def first(self) -> Request | None:
        """Any request that has not ended."""
        return next(iter((*self._running, *self._waiting)), None)

    def remove(self, request: Request) -> list[int]:
        """Forget a request that ended, and free its pages; returns them."""
        if request.phase is Phase.WAITING:
            self._waiting.remove(request)
            return []
        self._running.remove(request)
        return self._release(request)

    def take_ended_sessions(self) -> list[int]:
        """Sessions that ended since the last call."""
        ended, self._ended_sessions = self._ended_sessions, []
        return ended

    def rewind(self, request: Request) -> None:
        """Compute a running request again from its first token, on the pages it has: its hidden
        states are wanted once more."""
        request.cached_len = 0

    def _admit(self, request: Request) -> None:
        """Start a request that was taken from the waiting queue."""
        request.move_to(Phase.RUNNING)
        request.page_table = PageTable(self.pool)
        request.session_id = self._next_session_id
        self._next_session_id += 1
        if request.started_at is None:
            request.started_at = request.clock()
        self._running.append(request)

    def _preempt(self, request: Request) -> None:
        """Put a running request back in front of those who wait."""
        self._running.remove(request)
        self._release(request)
        request.cached_len = 0
        request.move_to(Phase.WAITING)
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    def _release(self, request: Request) -> list[int]:
        """Take from a request what it held while it ran; returns its pages."""
        self._ended_sessions.append(request.session_id)
        assert request.page_table is not None
        pages = request.page_table.release()
        request.page_table = None
        return pages
