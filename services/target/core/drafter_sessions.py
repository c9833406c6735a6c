"""What an inline step asks of the sessions on the drafter. No torch, no grpc, no threads.

After a missed deadline nothing changes here: the messages are still under way in order, the next append
goes out at its own position, and the report tells.
"""

from __future__ import annotations

from common.handoff.transport import Block, SessionReport, Step
from services.target.core.draft_source import HandOff, PlainReason, WantedBlock
from services.target.core.session_beliefs import Session, SessionBeliefs, SessionState


class DrafterSessions(SessionBeliefs):
    """Sessions whose positions the host knows at each step."""

    def plan(self, handoff: HandOff) -> tuple[Step, dict[int, PlainReason]]:
        """What to ask for, and why not for the blocks that are wanted but not asked for."""
        for session_id in handoff.ended:
            self._end(session_id)
        step = Step()
        if handoff.captured is not None:
            for rows in handoff.appends:
                self._plan_append(step, rows)
        plain = {}
        for wanted in handoff.wanted:
            reason = self._plan_block(step, wanted)
            if reason is not None:
                plain[wanted.session_id] = reason
        self._take_closes(step)
        return step, plain

    def unsent(self, step: Step) -> None:
        """The step just planned was not handed over: its context never arrives."""
        self._closes[:0] = step.closes
        # Each session that is opened is extended, too.
        for extend in step.extends:
            session = self._sessions[extend.session_id]
            if session.state is SessionState.OPEN:
                session.move_to(SessionState.LOST)

    def learn_of_block(self, report: SessionReport, asked: Block) -> PlainReason | None:
        """Take the report on a block in. Returns why its draft cannot be used, or None when it can: epoch and
        base position are those of the block (I6)."""
        reason = self.learn(report)
        if reason is None and report.context_len != asked.position:
            self._sessions[report.session_id].move_to(SessionState.LOST)
            return PlainReason.RESYNC
        return reason

    def _plan_block(self, step: Step, wanted: WantedBlock) -> PlainReason | None:
        session = self._sessions.setdefault(wanted.session_id, Session())
        if session.state is SessionState.OPEN and session.context_len != wanted.position:
            session.move_to(SessionState.LOST)
        if session.state is not SessionState.OPEN:
            return session.reason
        step.blocks.append(Block(wanted.session_id, session.epoch, wanted.position, wanted.anchor))
        return None
