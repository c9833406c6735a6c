"""All sessions and the rules of the protocol: open, append at a position, reserve a block, close.

Pure bookkeeping: it says which slots to write and which to read, and never touches a tensor. A target's
fault is a returned Outcome and changes nothing. Must not know protobuf, streams or the model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from common.handoff.transport import Outcome
from common.paged_kv import PageEntry, PagePool
from services.drafter.holdings import Holdings
from services.drafter.session import CloseReason, Session, SessionKey


class SessionObserver(Protocol):
    """Told of beginnings and ends, for metrics."""

    def observe_opened(self) -> None: ...

    def observe_closed(self, reason: CloseReason) -> None: ...


class SessionTable:
    """Sessions by key, and through Holdings what they hold. Called from one thread."""

    def __init__(
        self,
        pool: PagePool,
        *,
        num_sessions_max: int,
        context_len_max: int,
        block_size: int,
        lease_s: float,
        clock: Callable[[], float],
        observer: SessionObserver,
        has_lanes: bool = False,
    ) -> None:
        """has_lanes: each session has one of num_sessions_max lanes, counted from 0."""
        self._holdings = Holdings(pool, num_sessions_max if has_lanes else 0)
        self._num_sessions_max = num_sessions_max
        self._context_len_max = context_len_max
        self._block_size = block_size
        self._lease_s = lease_s
        self._clock = clock
        self._observer = observer
        # In order of last use: the first is the next whose lease ends.
        self._sessions: dict[SessionKey, Session] = {}
        self._refuses_opens = False

    # --- what a message asks -----------------------------------------------------------------------

    def open(self, key: SessionKey, epoch: int, start_position: int) -> Outcome:
        """Begin a session. Same epoch: no effect; higher: replaces; lower: STALE_EPOCH."""
        if start_position > self._context_len_max:
            return Outcome.CONTEXT_LIMIT
        held = self._sessions.get(key)
        if held is not None:
            if epoch < held.epoch:
                return Outcome.STALE_EPOCH
            if epoch == held.epoch:
                self._touch(held)
                return Outcome.OK
            self._end(held, CloseReason.REPLACED)
        if self._refuses_opens:
            return Outcome.NO_CAPACITY
        if len(self._sessions) >= self._num_sessions_max:
            self.expire()
            if len(self._sessions) >= self._num_sessions_max:
                return Outcome.NO_CAPACITY
        self._sessions[key] = self._holdings.admit(key, epoch, start_position, self._clock())
        self._observer.observe_opened()
        return Outcome.OK

    def append_at(
        self, key: SessionKey, epoch: int, position: int, num_rows: int
    ) -> tuple[Outcome, list[int]]:
        """Make positions [position, position + num_rows) the end of the context.

        A position before the end crops first, so that repeating an append changes nothing. Returns the
        slots that the caller must now write; none unless OK.
        """
        outcome, session = self._find(key, epoch)
        if session is None:
            return outcome, []
        if not session.start_position <= position <= session.context_len:
            return Outcome.NEEDS_RESYNC, []
        if position + num_rows > self._context_len_max:
            return Outcome.CONTEXT_LIMIT, []
        first = position - session.start_position
        if not self._reserve(session, first + num_rows):
            return Outcome.NO_CAPACITY, []
        session.context_len = position + num_rows
        return Outcome.OK, session.pages.slots(first, first + num_rows)

    def reserve_block(self, key: SessionKey, epoch: int, position: int) -> tuple[Outcome, Session | None]:
        """Make room for a block after the context, whose end must be `position`.

        The block's rows are no context: the next append overwrites them. A block may begin at the
        context limit, so its last positions may lie beyond it.
        """
        outcome, session = self._find(key, epoch)
        if session is None:
            return outcome, None
        if position != session.context_len:
            return Outcome.NEEDS_RESYNC, None
        if not self._reserve(session, session.num_rows + self._block_size):
            return Outcome.NO_CAPACITY, None
        return Outcome.OK, session

    def block_slots(self, session: Session) -> list[int]:
        """Slots of a reserved block's rows, the anchor's first."""
        return session.pages.slots(session.num_rows, session.num_rows + self._block_size)

    def reserve_to(
        self, key: SessionKey, epoch: int, position_max: int, begins_at_min: int | None = None
    ) -> tuple[Outcome, Session | None]:
        """Make room for a step after which the context ends somewhere up to position_max; whether its rows
        continue the context is for the device to say. The session, if OK.

        The device writes a whole block of states before it knows how many are context, and the next block
        after them. begins_at_min: the context begins in this step, at this position or later.
        """
        outcome, session = self._find(key, epoch)
        if session is None:
            return outcome, None
        if position_max > self._context_len_max:
            return Outcome.CONTEXT_LIMIT, None
        start = session.start_position if begins_at_min is None else begins_at_min
        if not self._reserve(session, position_max + 2 * self._block_size - start):
            return Outcome.NO_CAPACITY, None
        session.start_position = start
        return Outcome.OK, session

    def close(self, key: SessionKey, epoch: int) -> bool:
        """End a session of this epoch or a lower one; False when there is none."""
        session = self._sessions.get(key)
        if session is None or session.epoch > epoch:
            return False
        self._end(session, CloseReason.ASKED)
        return True

    # --- steps in flight ----------------------------------------------------------------------------

    def begin_step(self, session: Session) -> list[PageEntry]:
        """A step that names the session is about to be launched. Its page entries that the device was not
        told yet."""
        return self._holdings.begin_step(session)

    def end_step(self, session: Session, context_len: int, *, is_finite: bool) -> tuple[int, ...]:
        """The oldest step in flight of the session is over and left the context's end at context_len.

        A session whose rows were not finite ends. Returns pages that are free now and must be zeroed.
        """
        session.context_len = context_len
        session.is_spoiled |= not is_finite
        freed = self._holdings.end_step(session)
        if not is_finite and self._sessions.get(session.key) is session:
            return self._end(session, CloseReason.NON_FINITE)
        return freed

    # --- what happens otherwise --------------------------------------------------------------------

    def refuse_opens(self) -> None:
        """From now on no session begins: the service drains."""
        self._refuses_opens = True

    def abandon(self, key: SessionKey) -> tuple[int, ...]:
        """End a session whose rows turned out not to be finite; the pages, to be zeroed by the caller."""
        session = self._sessions[key]
        session.is_spoiled = True
        return self._end(session, CloseReason.NON_FINITE)

    def num_sessions_of(self, target_instance_ids: Collection[str]) -> int:
        """Sessions that these target lives hold."""
        return sum(key.target_instance_id in target_instance_ids for key in self._sessions)

    def close_instance(
        self,
        target_instance_id: str,
        session_ids: Collection[int] = (),
        reason: CloseReason = CloseReason.ASKED,
    ) -> int:
        """End these sessions of a target, or all of them when none is named; how many were open."""
        wanted = set(session_ids)
        ending = [
            session for key, session in self._sessions.items()
            if key.target_instance_id == target_instance_id and (not wanted or key.session_id in wanted)
        ]  # fmt: skip
        for session in ending:
            self._end(session, reason)
        return len(ending)

    def drop_other_instances(self, living: Collection[str]) -> int:
        """End the sessions of every target life that is not among `living`; how many there were."""
        ending = [s for key, s in self._sessions.items() if key.target_instance_id not in living]
        for session in ending:
            self._end(session, CloseReason.INSTANCE_GONE)
        return len(ending)

    def expire(self) -> int:
        """End sessions that no message has named for a lease; how many there were."""
        ended_before_s = self._clock() - self._lease_s
        ending = []
        for session in self._sessions.values():
            if session.last_seen_s >= ended_before_s:
                break
            ending.append(session)
        for session in ending:
            self._end(session, CloseReason.LEASE_EXPIRED)
        return len(ending)

    # --- what there is ------------------------------------------------------------------------------

    def context_len(self, key: SessionKey) -> int:
        """End of a session's context; 0 when there is no such session."""
        session = self._sessions.get(key)
        return session.context_len if session else 0

    def __contains__(self, key: SessionKey) -> bool:
        return key in self._sessions

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_pages_used(self) -> int:
        return self._holdings.num_pages_used

    @property
    def usage(self) -> float:
        """Share of the pages that is not free, 0 to 1."""
        return self._holdings.usage

    @property
    def num_pages_unaccounted(self) -> int:
        """See Holdings; 0 unless there is a bug. So is the next."""
        return self._holdings.num_pages_unaccounted

    @property
    def num_lanes_unaccounted(self) -> int:
        return self._holdings.num_lanes_unaccounted

    # --- leaves -------------------------------------------------------------------------------------

    def _find(self, key: SessionKey, epoch: int) -> tuple[Outcome, Session | None]:
        session = self._sessions.get(key)
        if session is None:
            return Outcome.UNKNOWN_SESSION, None
        if session.epoch != epoch:
            return Outcome.STALE_EPOCH, None
        self._touch(session)
        return Outcome.OK, session

    def _touch(self, session: Session) -> None:
        session.last_seen_s = self._clock()
        self._sessions[session.key] = self._sessions.pop(session.key)

    def _reserve(self, session: Session, num_rows: int) -> bool:
        """Room for num_rows; sessions whose lease ended make way, living ones never."""
        if self._holdings.lacks(session, num_rows):
            self.expire()
        return self._holdings.reserve(session, num_rows)

    def _end(self, session: Session, reason: CloseReason) -> tuple[int, ...]:
        """Returns pages that are free now and must be zeroed."""
        del self._sessions[session.key]
        self._observer.observe_closed(reason)
        return self._holdings.part(session)
