"""What the target believes of its sessions on the drafter, however a step reaches it. No torch, no grpc, no
threads.

Learns from what is reported. All of it is soft (I5): a wrong belief costs a report of NEEDS_RESYNC and a
re-opening, never a token. Positions are absolute.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from common import limits
from common.handoff.transport import Close, DeviceStep, Extend, Open, Outcome, SessionReport, Step
from services.target.core.draft_source import ContextRows, PlainReason


class SessionState(enum.Enum):
    """ABSENT was never opened, LOST was and must be again, SPENT is not worth another try."""

    ABSENT = "absent"
    OPEN = "open"
    LOST = "lost"
    SPENT = "spent"


TRANSITIONS = {
    SessionState.ABSENT: {SessionState.OPEN},
    SessionState.OPEN: {SessionState.LOST, SessionState.SPENT},
    SessionState.LOST: {SessionState.OPEN, SessionState.SPENT},
    SessionState.SPENT: set(),
}

# Outcomes after which the session has to be opened again, and the reason to report for this block.
_LOSING = {
    Outcome.UNKNOWN_SESSION: PlainReason.RESYNC,
    Outcome.STALE_EPOCH: PlainReason.RESYNC,
    Outcome.NEEDS_RESYNC: PlainReason.RESYNC,
    Outcome.NO_CAPACITY: PlainReason.NO_CAPACITY,
    # The caller breaks such a connection; until it does, the session counts as lost.
    Outcome.INVALID_TENSOR: PlainReason.UNAVAILABLE,
    Outcome.NON_FINITE: PlainReason.NON_FINITE,
    Outcome.CONTEXT_LIMIT: PlainReason.NO_CAPACITY,
    Outcome.INVALID_FIELD: PlainReason.INVALID_DRAFT,
}
# Outcomes that say something about the session itself and would come again.
_FAULTS = {Outcome.NON_FINITE, Outcome.INVALID_FIELD}


@dataclass
class Session:
    """One belief. [start_position, context_len) is context for sure once all messages have arrived; a step
    of which only the device knows how far it came may have left more."""

    state: SessionState = SessionState.ABSENT
    epoch: int = 0
    start_position: int = 0
    context_len: int = 0
    reason: PlainReason = PlainReason.RESYNC
    """Why no block is asked for while the session is not OPEN."""
    num_faults: int = 0
    held: bool = False
    """Whether the drafter may hold the current epoch, so that it has to be closed."""
    is_offered: bool = False
    """Whether lost_sessions has named this loss."""
    num_offers: int = 0

    def move_to(self, state: SessionState, reason: PlainReason = PlainReason.RESYNC) -> None:
        assert state in TRANSITIONS[self.state], f"{self.state} to {state}"
        self.state, self.reason = state, reason
        if state is SessionState.LOST:
            self.is_offered = False

    @property
    def is_recapturable(self) -> bool:
        """Whether a context captured anew from position 0 would be longer than what is there."""
        if self.is_offered or self.num_offers >= limits.RECAPTURES_MAX:
            return False
        lost = self.state in (SessionState.ABSENT, SessionState.LOST)
        return lost or (self.state is SessionState.OPEN and self.start_position > 0)


class SessionBeliefs:
    """The sessions of one target on whatever drafter is there; what a step asks of them is planned by the
    kinds of it."""

    def __init__(self, clock: Callable[[], float], on_resync: Callable[[str], None]) -> None:
        """on_resync hears of each re-opening: `recaptured` with its context from position 0, `cold`
        with a context that starts now."""
        self._clock = clock
        self._on_resync = on_resync
        self._sessions: dict[int, Session] = {}
        self._closes: list[Close] = []
        self._num_sessions_max = 0
        self._full_until = -math.inf

    @property
    def num_open(self) -> int:
        return sum(s.state is SessionState.OPEN for s in self._sessions.values())

    def connected(self, num_sessions_max: int) -> None:
        """A drafter is there that holds none of the sessions."""
        self.disconnected()
        self._num_sessions_max = min(num_sessions_max, limits.SESSIONS_MAX)

    def disconnected(self) -> None:
        """No drafter is there; whatever it held is gone."""
        self._num_sessions_max = 0
        self._full_until = -math.inf
        self._closes = []
        for session in self._sessions.values():
            session.held = False
            if session.state is SessionState.OPEN:
                session.move_to(SessionState.LOST)
            # An offer that was not taken up before the drafter left is made again.
            session.is_offered = False

    def learn(self, report: SessionReport) -> PlainReason | None:
        """Take a report in. Returns why a draft that came with it, or was made then, cannot be used.

        Reports on ended sessions and earlier epochs change nothing.
        """
        session = self._sessions.get(report.session_id)
        if session is None or session.epoch != report.epoch or session.state is not SessionState.OPEN:
            return session.reason if session else PlainReason.RESYNC
        if report.outcome in _LOSING:
            self._lose(report.session_id, session, report.outcome)
            return _LOSING[report.outcome]
        if report.draft_is_faulty:
            self._count_fault(report.session_id, session, PlainReason.INVALID_DRAFT)
            return PlainReason.INVALID_DRAFT
        return PlainReason.BUSY if report.outcome is Outcome.BUSY else None

    def lost_sessions(self) -> set[int]:
        """Sessions whose context could be captured anew now; each loss is named once, and no session
        more than RECAPTURES_MAX times: a drafter that loses it each step must not make the target
        run its prompt each step (I7)."""
        candidates = [session_id for session_id, session in self._sessions.items() if session.is_recapturable]
        lost = set(candidates[: self._room]) if candidates else set()
        for session_id in lost:
            session = self._sessions[session_id]
            session.is_offered = True
            session.num_offers += 1
        return lost

    @property
    def _room(self) -> int:
        """Sessions that may be opened, as far as is known."""
        if self._clock() < self._full_until:
            return 0
        return max(0, self._num_sessions_max - self.num_open)

    def _end(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._close(session_id, session)

    def _close(self, session_id: int, session: Session) -> None:
        if session.held:
            session.held = False
            self._closes.append(Close(session_id, session.epoch))
            # What it held is free once the message arrives, and closes come first in a message.
            self._full_until = -math.inf

    def _take_closes(self, step: Step | DeviceStep) -> None:
        """More than fit are left for the next step."""
        step.closes.extend(self._closes[: limits.DRAFT_ENTRIES_MAX])
        del self._closes[: limits.DRAFT_ENTRIES_MAX]

    def _plan_append(self, step: Step | DeviceStep, rows: ContextRows) -> None:
        session = self._sessions.setdefault(rows.session_id, Session())
        fits = session.start_position <= rows.position <= session.context_len
        if session.state is SessionState.OPEN and not fits:
            session.move_to(SessionState.LOST)
        if session.state in (SessionState.ABSENT, SessionState.LOST):
            if self._room == 0:
                session.reason = PlainReason.NO_CAPACITY
                return
            self._open(step, rows, session)
        if session.state is SessionState.OPEN:
            step.extends.append(
                Extend(rows.session_id, session.epoch, rows.position, rows.row_start, rows.row_stop)
            )
            session.context_len = rows.position + rows.row_stop - rows.row_start

    def _open(self, step: Step | DeviceStep, rows: ContextRows, session: Session) -> None:
        if session.state is SessionState.LOST:
            session.epoch += 1
            self._on_resync("recaptured" if rows.position == 0 else "cold")
        session.move_to(SessionState.OPEN)
        session.held = True
        session.start_position = session.context_len = rows.position
        step.opens.append(Open(rows.session_id, session.epoch, rows.position))

    def _lose(self, session_id: int, session: Session, outcome: Outcome) -> None:
        reason = _LOSING[outcome]
        if outcome in _FAULTS:
            self._count_fault(session_id, session, reason)
        if outcome is Outcome.CONTEXT_LIMIT:
            # It would be past the limit again after any re-opening with its whole context.
            session.move_to(SessionState.SPENT, reason)
            self._close(session_id, session)
        if outcome is Outcome.NO_CAPACITY:
            # A session that cannot grow must not hold pages that another could use.
            self._close(session_id, session)
            self._full_until = self._clock() + limits.PROBE_INTERVAL_S
        if outcome in (Outcome.UNKNOWN_SESSION, Outcome.NON_FINITE):
            session.held = False
        if session.state is SessionState.OPEN:
            session.move_to(SessionState.LOST, reason)

    def _count_fault(self, session_id: int, session: Session, reason: PlainReason) -> None:
        """Once may be chance; whoever does it again would do it each step."""
        session.num_faults += 1
        if session.num_faults >= limits.SESSION_FAULTS_MAX:
            session.move_to(SessionState.SPENT, reason)
            self._close(session_id, session)
