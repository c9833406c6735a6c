"""A pipelined drafter in another process: on the same GPU when it can, by messages otherwise.

Owns the link to whatever drafter is there and takes over one connection after the other. A connection on the
device is a DeviceConnection; one by messages is the RemoteDrafter's, which `inline` names. Whatever the
drafter does, the host never waits here, the device waits until the deadline at most, and drafts are only
drafts (I1, I7).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from common.address import Address
from common.contract import DraftContract, Mismatch, TargetContract
from common.handoff.ring import Ring
from common.rpc import open_channel
from services.target.core.device_connection import ConnectionObserver, DeviceConnection
from services.target.core.device_sessions import DeviceSessions
from services.target.core.draft_source import DraftSource, HandOff, PlainReason
from services.target.core.drafter_link import DrafterLink, OpenChannel
from services.target.core.drafter_negotiation import Negotiation
from services.target.core.drafter_status import DrafterStatus, LinkState
from services.target.core.drafter_stream import DrafterStream
from services.target.core.handoff_choice import HandoffChoice
from services.target.core.pipelined_source import PostedStep
from services.target.core.remote_drafter import DrafterObserver, Link, RemoteDrafter
from services.target.core.ring_owner import RingOwner


class DeviceObserver(DrafterObserver, ConnectionObserver, Protocol):
    """What metrics want to know of the drafter."""

    def observe_fallback(self, reason: str) -> None:
        """A connection goes inline although the device was asked for; a reason of FALLBACKS. On the link's
        thread."""


class Rings(Protocol):
    """Where the target captures while steps go by messages; see RingOwner."""

    def ring_for(self, draft: DraftContract) -> Ring: ...


class DeviceDrafter:
    """A PipelinedDrafter. Connections come in `settle` alone, and go there and in `refuse`."""

    @classmethod
    def connect(
        cls,
        address: Address,
        target: TargetContract,
        instance_id: str,
        draft_deadline_s: float,
        observer: DeviceObserver,
        choice: HandoffChoice,
        rings: RingOwner,
        open_channel: OpenChannel = open_channel,
    ) -> DeviceDrafter:
        """Start looking for the drafter at once, in the background."""
        status = DrafterStatus(observer, time.monotonic)
        negotiation = Negotiation(target, instance_id, choice, rings, observer.observe_fallback)
        link = DrafterLink(address, negotiation, instance_id, status, open_channel)
        link.start()
        return cls(link, target, instance_id, draft_deadline_s, observer, rings, time.monotonic)

    def __init__(
        self,
        link: Link,
        target: TargetContract,
        instance_id: str,
        draft_deadline_s: float,
        observer: DeviceObserver,
        rings: Rings,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._status = link.status
        self._instance_id = instance_id
        self._draft_deadline_s = draft_deadline_s
        self._observer = observer
        self._rings = rings
        self._clock = clock
        self._by_messages = RemoteDrafter(
            link, target, instance_id, draft_deadline_s, observer.observe_resync, clock
        )
        # Outlives connections: what a session was given in one is not given again in the next (I7).
        self._sessions = DeviceSessions(clock, observer.observe_resync)
        self._stream: DrafterStream | None = None
        self._connection: DeviceConnection | None = None
        self._num_open = 0

    # --- for whoever asks how it is, on any thread --------------------------------------------------

    @property
    def state(self) -> LinkState:
        return self._status.state

    @property
    def mismatches(self) -> list[Mismatch]:
        return self._status.mismatches

    @property
    def num_sessions(self) -> int:
        """Sessions believed open, as of the last step."""
        return self._num_open

    @property
    def block_size(self) -> int | None:
        """Rows of a draft block while the link is up."""
        stream = self._status.stream
        return stream.agreement.draft.block_size if stream else None

    # --- PipelinedDrafter ----------------------------------------------------------------------------

    @property
    def draft(self) -> DraftContract | None:
        """See PipelinedDrafter.draft."""
        if self._connection is not None:
            return self._connection.draft
        return self._by_messages.draft if self.inline is not None else None

    @property
    def ring(self) -> Ring | None:
        """See PipelinedDrafter.ring."""
        if self._connection is not None:
            return self._connection.ring
        draft = self.draft
        return None if draft is None else self._rings.ring_for(draft)

    @property
    def inline(self) -> DraftSource | None:
        """See PipelinedDrafter.inline."""
        stream = self._stream
        return self._by_messages if stream is not None and stream.agreement.ring is None else None

    def settle(self) -> None:
        """See PipelinedDrafter.settle."""
        stream = self._status.stream
        if stream is not self._stream:
            self._take_over(stream)
        if self._connection is not None:
            self._connection.learn()
            self._num_open = self._connection.num_open
        else:
            self._num_open = self._by_messages.num_sessions if self.inline is not None else 0

    def refuse(self, mismatch: Mismatch) -> None:
        """See PipelinedDrafter.refuse."""
        if self._stream is not None:
            self._status.refuse(self._stream, [mismatch])
        self._take_over(None)

    def lost_sessions(self) -> set[int]:
        """See PipelinedDrafter.lost_sessions."""
        return self._sessions.lost_sessions() if self._connection is not None else set()

    def draft_rows(self, session_ids: list[int]) -> list[int]:
        """See PipelinedDrafter.draft_rows."""
        if self._connection is None:
            return [-1] * len(session_ids)
        return self._connection.draft_rows(session_ids)

    def why_plain(self, session_id: int) -> PlainReason:
        """See PipelinedDrafter.why_plain."""
        if self._connection is not None:
            return self._connection.why_plain(session_id)
        return PlainReason.BREAKER_OPEN if self._status.breaker_is_open else PlainReason.UNAVAILABLE

    def await_drafts(self) -> None:
        """See PipelinedDrafter.await_drafts."""
        if self._connection is not None:
            self._connection.await_drafts()

    def mark_ready(self) -> None:
        """See PipelinedDrafter.mark_ready."""
        if self._connection is not None:
            self._connection.mark_ready()

    def post(self, step: PostedStep) -> None:
        """See PipelinedDrafter.post."""
        if self._connection is not None:
            self._connection.post(step)
        else:
            self._sessions.forget(step.ended)
        if step.ended:
            # Those that began while steps went by messages.
            self._by_messages.post(HandOff([], [], step.ended, None))

    def observe_completed(self, step_number: int, invalid: Sequence[int] = ()) -> None:
        """See PipelinedDrafter.observe_completed."""
        if self._connection is not None:
            self._connection.observe_completed(step_number, invalid)

    def close(self) -> None:
        """See PipelinedDrafter.close."""
        self._link.close()
        if self._connection is not None:
            self._connection.close()

    def _take_over(self, stream: DrafterStream | None) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._stream = stream
        if stream is not None and stream.agreement.ring is None:
            # From here on the RemoteDrafter keeps the sessions, and alone hears of their ends.
            self._sessions = DeviceSessions(self._clock, self._observer.observe_resync)
        if stream is not None and stream.agreement.ring is not None:
            self._connection = DeviceConnection(
                stream,
                self._status,
                self._sessions,
                self._observer,
                target_instance_id=self._instance_id,
                draft_deadline_s=self._draft_deadline_s,
                clock=self._clock,
            )
