"""What a device step asks of the sessions on the drafter. No torch, no grpc, no threads.

Of a decoding row the host knows bounds only: where its context really ends is checked on the drafter's
device, and a report of NEEDS_RESYNC comes back when it does not fit.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.handoff.transport import DeviceRow, DeviceStep, Open
from services.target.core.draft_source import ContextRows, PlainReason
from services.target.core.pipelined_source import PostedRow, PostedStep
from services.target.core.session_beliefs import Session, SessionBeliefs, SessionState


class DeviceSessions(SessionBeliefs):
    """Sessions whose positions only the device knows at each step."""

    def plan(self, posted: PostedStep, sequence: int) -> DeviceStep:
        """What to ask for. A row whose session cannot be open is nobody's; see why_plain."""
        step = DeviceStep(sequence)
        self.forget(posted.ended)
        for session_id, position, row_start, num_rows in posted.extends:
            self._plan_append(step, ContextRows(session_id, position, row_start, row_start + num_rows))
        step.rows.extend(None if row is None else self._plan_row(step, row) for row in posted.rows)
        self._take_closes(step)
        return step

    def forget(self, ended: Iterable[int]) -> None:
        """Sessions that are over, and closed if the drafter may hold them."""
        for session_id in ended:
            self._end(session_id)

    def unsent(self, step: DeviceStep) -> None:
        """The step just planned was not handed over: its context never arrives."""
        self._closes[:0] = step.closes
        named = {extend.session_id for extend in step.extends}
        named |= {row.session_id for row in step.rows if row is not None}
        for session_id in named:
            session = self._sessions[session_id]
            if session.state is SessionState.OPEN:
                session.move_to(SessionState.LOST)

    def learn_of_invalid_draft(self, session_id: int) -> None:
        """A draft of this session was not of the vocabulary, which shows where it is verified."""
        session = self._sessions.get(session_id)
        if session is not None and session.state in (SessionState.OPEN, SessionState.LOST):
            self._count_fault(session_id, session, PlainReason.INVALID_DRAFT)

    def is_open(self, session_id: int, epoch: int) -> bool:
        """Whether this epoch of the session is still believed to be open."""
        session = self._sessions.get(session_id)
        return session is not None and session.state is SessionState.OPEN and session.epoch == epoch

    def why_plain(self, session_id: int) -> PlainReason:
        """Why no block is asked for in this session."""
        session = self._sessions.get(session_id)
        return PlainReason.RESYNC if session is None else session.reason

    def _plan_row(self, step: DeviceStep, row: PostedRow) -> DeviceRow | None:
        session = self._sessions.setdefault(row.session_id, Session())
        if session.state is SessionState.SPENT:
            return None
        begins = session.state is not SessionState.OPEN
        if begins:
            if self._room == 0:
                session.reason = PlainReason.NO_CAPACITY
                return None
            self._begin(step, row, session)
        # The anchor's position is the context's end, and this is the lowest that it can be.
        session.context_len = row.position_min
        return DeviceRow(row.session_id, session.epoch, row.position_min, row.position_max, begins)

    def _begin(self, step: DeviceStep, row: PostedRow, session: Session) -> None:
        """The context starts with the row, wherever the device finds that to be."""
        if session.state is SessionState.LOST:
            session.epoch += 1
        self._on_resync("cold")
        session.move_to(SessionState.OPEN)
        session.held = True
        # An append below the highest place that it can start at might lie before it.
        session.start_position = row.position_max
        step.opens.append(Open(row.session_id, session.epoch, row.position_min))
