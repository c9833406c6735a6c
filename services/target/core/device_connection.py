"""One connection to a drafter on the same GPU: what was posted, what may be used, who waits for whom.

The core's thread drives it and never waits. The watchdog's thread lets the device go when the drafter is
late, and the link's when it is lost. Knows no grpc and no CUDA: the flags are driven by RingFlags.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.handoff.device import DeviceTransport
from common.handoff.ring import Ring
from common.handoff.transport import DeviceStep, PeerFault, PeerLost
from common.handoff.watchdog import Watchdog
from services.target.core.device_sessions import DeviceSessions
from services.target.core.draft_source import PlainReason
from services.target.core.drafter_status import DrafterStatus
from services.target.core.drafter_stream import DrafterStream
from services.target.core.pipelined_source import PostedStep


class ConnectionObserver(Protocol):
    """What metrics want to know of a connection."""

    def observe_watchdog_release(self) -> None:
        """The drafter was late, and the device was let go. On the watchdog's thread."""


@dataclass
class _Posted:
    """The last step that the drafter has to work on."""

    sequence: int
    is_ready: Callable[[], bool]
    rows: dict[int, tuple[int, int]]
    """By session: its ring row and epoch."""
    is_awaited: bool = False


class DeviceConnection:
    """From the moment that the connection is used until it is given up; then close it."""

    def __init__(
        self,
        stream: DrafterStream,
        status: DrafterStatus,
        sessions: DeviceSessions,
        observer: ConnectionObserver,
        *,
        target_instance_id: str,
        draft_deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        agreement = stream.agreement
        assert agreement.ring is not None
        self.ring: Ring = agreement.ring.ring
        self.draft = agreement.draft
        self._flags = agreement.ring.flags
        self._stream = stream
        self._status = status
        self._transport = DeviceTransport(
            stream, target_instance_id=target_instance_id, drafter_instance_id=agreement.drafter_instance_id
        )
        self._sessions = sessions
        self._sessions.connected(agreement.num_sessions_max)
        self._observer = observer
        self._sequence = 0
        # Of the launch that marked its states and is not posted yet.
        self._is_ready: Callable[[], bool] | None = None
        self._posted: _Posted | None = None
        # For each launch in flight: the sequence that the device waits for before it.
        self._waits: deque[tuple[int, int]] = deque()
        self._watchdog = Watchdog(self._flags.release, draft_deadline_s, self._missed, clock)
        self._watchdog.start()
        stream.when_shut(self._watchdog.trip)

    @property
    def num_open(self) -> int:
        """Sessions believed open."""
        return self._sessions.num_open

    def learn(self) -> None:
        """Take in what the drafter has answered."""
        try:
            answers = self._transport.collect()
        except PeerLost:
            # The link has noticed, and says so at the next settle.
            return
        except PeerFault as fault:
            self._status.drop(self._stream, str(fault))
            return
        for answer in answers:
            for report in answer.reports:
                self._sessions.learn(report)
            self._status.answered(self._stream)

    def draft_rows(self, session_ids: list[int]) -> list[int]:
        """See PipelinedDrafter.draft_rows."""
        posted = self._posted
        if posted is None or self._watchdog.has_tripped:
            return [-1] * len(session_ids)
        return [self._row_of(posted, session_id) for session_id in session_ids]

    def why_plain(self, session_id: int) -> PlainReason:
        """See PipelinedDrafter.why_plain."""
        return PlainReason.DEADLINE if self._watchdog.has_tripped else self._sessions.why_plain(session_id)

    def await_drafts(self) -> None:
        """See PipelinedDrafter.await_drafts. Without anything to wait for, or again, it does nothing."""
        posted = self._posted
        if posted is None or posted.is_awaited:
            return
        posted.is_awaited = True
        sequence = posted.sequence
        self._watchdog.watch(sequence, posted.is_ready, lambda: self._flags.await_done(sequence))

    def mark_ready(self) -> None:
        """See PipelinedDrafter.mark_ready. A sequence that no message names afterwards is one that nobody
        waits for."""
        self._sequence += 1
        self._is_ready = self._flags.write_ready(self._sequence)

    def post(self, posted: PostedStep) -> None:
        """See PipelinedDrafter.post."""
        is_ready, self._is_ready = self._is_ready, None
        if posted.extends or posted.rows:
            assert is_ready is not None, "a launch marks what it wrote"
            self._remember_wait(posted.number)
        step = self._sessions.plan(posted, self._sequence)
        if not step.is_for_the_device:
            self._send(step)
            return
        assert is_ready is not None, "only a launch has something for the device"
        if self._send(step):
            rows = {row.session_id: (i, row.epoch) for i, row in enumerate(step.rows) if row is not None}
            self._posted = _Posted(self._sequence, is_ready, rows)

    def observe_completed(self, step_number: int, invalid: Sequence[int] = ()) -> None:
        """See PipelinedDrafter.observe_completed."""
        while self._waits and self._waits[0][0] <= step_number:
            number, sequence = self._waits.popleft()
            self._watchdog.disarm(sequence)
            # A launch that did not wait for this drafter verified what another had left.
            if number == step_number:
                for session_id in invalid:
                    self._sessions.learn_of_invalid_draft(session_id)

    def close(self) -> None:
        """Let the device go on, whatever it waits for; nothing is used afterwards."""
        self._watchdog.trip()
        self._sessions.disconnected()

    # --- parts ---------------------------------------------------------------------------------------

    def _row_of(self, posted: _Posted, session_id: int) -> int:
        row, epoch = posted.rows.get(session_id, (-1, 0))
        # A session that was lost meanwhile has no draft in that row (I6).
        return row if row >= 0 and self._sessions.is_open(session_id, epoch) else -1

    def _remember_wait(self, step_number: int) -> None:
        """The launch that is being posted came after the wait for the last post's drafts, which it used."""
        last = self._posted
        assert last is None or last.is_awaited, "a launch writes the ring over, so it waits for its reader"
        if last is not None:
            self._waits.append((step_number, last.sequence))
        self._posted = None

    def _send(self, step: DeviceStep) -> bool:
        if step.is_empty:
            return False
        try:
            if self._transport.post(step):
                return True
        except PeerLost:
            # The link has noticed, and says so at the next settle.
            self._sessions.unsent(step)
            return False
        self._sessions.unsent(step)
        # The device has waited for each step; a queue that is full all the same belongs to a stuck process.
        self._status.give_up(self._stream, "the queue of messages is full")
        return False

    def _missed(self) -> None:
        """On the watchdog's thread, after it let the device go."""
        self._observer.observe_watchdog_release()
        self._status.give_up(self._stream, "a draft deadline was missed")
