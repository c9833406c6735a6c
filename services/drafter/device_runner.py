"""One device step of a target: launched behind its flags, finished when the device has done it.

The counterpart of step.StepRunner where states and drafts are in the hand-off ring. What the host can decide
(sessions, epochs, room) is decided at the launch; what only the device knows is merged when the step is over.
Steps are launched one behind the other and finished in the same order. Must not know protobuf or streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from common.device import is_out_of_memory
from common.errors import Unavailable
from common.handoff.transport import DeviceRow, DeviceStep, Extend, Outcome
from common.log import get_log
from services.drafter.device_link import DeviceLink, Mark
from services.drafter.draft_work import DeviceAppend, DraftResults, DraftWork
from services.drafter.launch_control import LaunchTimes, Ticket
from services.drafter.session import CloseReason, Session, SessionKey
from services.drafter.session_table import SessionTable
from services.drafter.step import Keys, StepReply, Verdict, Verdicts, name_in_role, open_sessions

if TYPE_CHECKING:
    from common.handoff.ring import Ring

log = get_log("device_runner")


class DeviceEngine(Protocol):
    """What the runner needs of device_engine.DeviceDraftEngine, which says how."""

    sentinel_lane: int
    times: LaunchTimes

    def attach(self, ring: Ring) -> None: ...

    def detach(self) -> None: ...

    def join(self, lane: int, start_position: int) -> None: ...

    def launch(
        self, work: DraftWork, enter: Callable[[], object], leave: Callable[[], object]
    ) -> Ticket: ...

    def results_to_host(self, ticket: Ticket) -> DraftResults: ...

    def clean(self, pages: Sequence[int]) -> None: ...


@dataclass
class _Claim:
    """A session's part in a step: where its results will stand, and how many rows it can gain."""

    verdict: Verdict
    session: Session
    append: int | None = None
    row: int | None = None
    num_rows_max: int = 0


@dataclass
class _Plan:
    """What the host decided of a step; claims by session id."""

    keys: Keys
    verdicts: Verdicts
    work: DraftWork = field(default_factory=DraftWork)
    claims: dict[int, _Claim] = field(default_factory=dict)

    def claim(self, session: Session) -> _Claim:
        """The session's part, which may begin here."""
        session_id = session.key.session_id
        return self.claims.setdefault(session_id, _Claim(self.verdicts[session_id], session))


@dataclass(eq=False)
class Launched:
    """A step in flight. ticket is None when there was nothing for the device to do but its flags."""

    plan: _Plan
    ticket: Ticket | None
    began: Mark
    done: Mark


class DeviceRunner:
    """Launches and finishes steps, on one thread."""

    def __init__(self, table: SessionTable, engine: DeviceEngine, block_size: int) -> None:
        self._table = table
        self._engine = engine
        self._block_size = block_size

    # --- a connection --------------------------------------------------------------------------------

    def attach(self, link: DeviceLink) -> bool:
        """Work over the link's ring from now on. No step of another link may be in flight. False when the
        device has no memory for that; no ring is attached then.

        The target begins anew: what its sessions hold was appended by other means, and lanes know nothing
        of it.
        """
        self._table.close_instance(link.target_instance_id, reason=CloseReason.STREAM_LOST)
        try:
            self._engine.attach(link.ring)
            return True
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.warning("ring_too_large", num_rows=link.ring.shape.num_rows, problem=type(error).__name__)
        # Not above: what was raised keeps alive what was allocated.
        self._engine.detach()
        return False

    def is_idle(self, link: DeviceLink) -> bool:
        """Whether the device has done all that was launched."""
        return all(launched.done.query() for launched in link.in_flight)

    def end(self, link: DeviceLink) -> None:
        """The link is lost and idle. Whatever its last steps worked on was not of this target's making any
        more, so its sessions end."""
        self._table.close_instance(link.target_instance_id, reason=CloseReason.STREAM_LOST)
        while link.in_flight:
            self.finish(link)

    def detach(self) -> None:
        """Let go of the ring that was attached last. No step may be in flight."""
        self._engine.detach()

    # --- a step --------------------------------------------------------------------------------------

    def launch(self, link: DeviceLink, step: DeviceStep) -> Launched:
        """Apply what the host decides, and enqueue the rest. Never waits.

        Whatever becomes of its sessions, the step's `done` is written in its turn: the target's stream waits
        for it. Unavailable when the link is lost.
        """
        if link.is_lost:
            raise Unavailable("the connection is lost")
        link.last_sequence = step.sequence
        plan = self._plan(link.target_instance_id, step)
        marks: list[Mark] = []

        def enter() -> None:
            marks.append(link.flags.await_ready(step.sequence))

        def leave() -> None:
            marks.append(link.flags.write_done(step.sequence))

        ticket = None
        if plan.claims:
            ticket = self._engine.launch(plan.work, enter, leave)
        else:
            enter()
            leave()
        began, done = marks
        launched = Launched(plan, ticket, began, done)
        link.in_flight.append(launched)
        return launched

    def finish(self, link: DeviceLink) -> StepReply:
        """The verdicts of the oldest step in flight, which is done."""
        launched = link.in_flight.popleft()
        plan, results, times = launched.plan, DraftResults([], []), LaunchTimes(0.0, 0.0)
        if launched.ticket is not None:
            results = self._engine.results_to_host(launched.ticket)
            times = self._engine.times
        for session_id, verdict in plan.verdicts.items():
            verdict.context_len = self._table.context_len(plan.keys[session_id])
        return StepReply(
            list(plan.verdicts.values()),
            num_blocks=sum(result.outcome is Outcome.OK for result in results.rows),
            num_context_rows=sum(self._settle(claim, results) for claim in plan.claims.values()),
            ingest_s=times.ingest_s,
            draft_s=times.draft_s,
        )

    # --- leaves --------------------------------------------------------------------------------------

    def _plan(self, target_instance_id: str, step: DeviceStep) -> _Plan:
        verdicts = _name_sessions(step)
        plan = _Plan({s: SessionKey(target_instance_id, s) for s in verdicts}, verdicts)
        for close in step.closes:
            self._table.close(SessionKey(target_instance_id, close.session_id), close.epoch)
        open_sessions(self._table, step.opens, plan.keys, verdicts)
        for extend in step.extends:
            self._place_extend(plan, extend)
        for row in step.rows:
            self._place_row(plan, row)
        work = plan.work
        if all(lane == self._engine.sentinel_lane for lane in work.lanes):
            work.lanes, work.begins = [], []
        for claim in plan.claims.values():
            self._join(claim.session)
            work.pages += self._table.begin_step(claim.session)
        return plan

    def _place_extend(self, plan: _Plan, extend: Extend) -> None:
        verdict = plan.verdicts[extend.session_id]
        if verdict.outcome is not Outcome.OK:
            return
        end = extend.position + extend.num_rows
        verdict.outcome, session = self._table.reserve_to(plan.keys[extend.session_id], extend.epoch, end)
        if session is None:
            return
        claim, work = plan.claim(session), plan.work
        claim.append = len(work.appends)
        claim.num_rows_max += extend.num_rows
        work.appends.append(
            DeviceAppend(_lane(session), extend.position, extend.row_start, extend.num_rows)
        )  # fmt: skip

    def _place_row(self, plan: _Plan, row: DeviceRow | None) -> None:
        work = plan.work
        work.lanes.append(self._engine.sentinel_lane)
        work.begins.append(False)
        if row is None or plan.verdicts[row.session_id].outcome is not Outcome.OK:
            return
        # Where the anchor stood before the step is a block below its lowest new position at most.
        begins_at_min = max(0, row.position_min - self._block_size) if row.begins else None
        verdict = plan.verdicts[row.session_id]
        verdict.outcome, session = self._table.reserve_to(
            plan.keys[row.session_id], row.epoch, row.position_max, begins_at_min
        )
        if session is None:
            return
        claim = plan.claim(session)
        claim.row = len(work.lanes) - 1
        claim.num_rows_max += self._block_size
        work.lanes[-1], work.begins[-1] = _lane(session), row.begins

    def _join(self, session: Session) -> None:
        """Begin a session's lane at the session's first step."""
        state = session.lane_state
        assert state is not None, "sessions of a device engine have lanes"
        if not state.has_joined:
            self._engine.join(state.lane, session.start_position)
            state.has_joined = True

    def _settle(self, claim: _Claim, results: DraftResults) -> int:
        """Merge what the device says of a session; the rows that became its context."""
        found = [] if claim.append is None else [results.appends[claim.append]]
        found += [] if claim.row is None else [results.rows[claim.row]]
        before, after = claim.session.context_len, found[-1].context_len
        outcomes = [result.outcome for result in found]
        pages = self._table.end_step(claim.session, after, is_finite=Outcome.NON_FINITE not in outcomes)
        if pages:
            self._engine.clean(pages)
        claim.verdict.context_len = after
        failed = next((outcome for outcome in outcomes if outcome is not Outcome.OK), Outcome.OK)
        if claim.session.is_spoiled:
            # By this step, or by one before it that was in flight when this one was launched.
            failed = Outcome.NON_FINITE
        if claim.verdict.outcome is Outcome.OK:
            claim.verdict.outcome = failed
        return min(max(0, after - before), claim.num_rows_max)


def _name_sessions(step: DeviceStep) -> Verdicts:
    """As step.name_sessions, for a device step. An extend over rows of an earlier one is an INVALID_FIELD
    too: the engine stages both at once."""
    verdicts: Verdicts = {}
    name_in_role(step.opens, verdicts)
    name_in_role(step.extends, verdicts)
    name_in_role([row for row in step.rows if row is not None], verdicts)
    end = 0
    for extend in sorted(step.extends, key=lambda extend: extend.row_start):
        if extend.row_start < end:
            verdicts[extend.session_id].outcome = Outcome.INVALID_FIELD
        end = max(end, extend.row_stop)
    return verdicts


def _lane(session: Session) -> int:
    assert session.lane_state is not None, "sessions of a device engine have lanes"
    return session.lane_state.lane
