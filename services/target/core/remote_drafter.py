"""A draft source that asks a drafter in another process.

Composes the link, the transport and the sessions. Whatever the drafter does, `post` never waits,
`collect` waits until the deadline at most, and a block that did not come has a reason (I1, I7).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Protocol

from common.address import Address
from common.contract import DraftContract, Mismatch, TargetContract
from common.handoff.inline import InlineTransport
from common.handoff.transport import Block, Collected, Outcome, PeerFault, PeerLost, Step, Transport
from common.rpc import open_channel
from services.target.core.draft_source import Drafts, HandOff, PlainReason
from services.target.core.drafter_link import DrafterLink, OpenChannel
from services.target.core.drafter_negotiation import Negotiation
from services.target.core.drafter_sessions import DrafterSessions
from services.target.core.drafter_status import DrafterStatus, LinkObserver, LinkState
from services.target.core.drafter_stream import DrafterStream


class DrafterObserver(LinkObserver, Protocol):
    """What metrics want to know of the drafter."""

    def observe_resync(self, kind: str) -> None:
        """A session was opened again: `recaptured` from position 0, or `cold`."""


class Link(Protocol):
    """Keeps a connection to whatever drafter is there; see DrafterLink."""

    @property
    def status(self) -> DrafterStatus: ...

    def close(self) -> None: ...


class RemoteDrafter:
    """A DraftSource. It changes connections only inside `collect` and at the end of `post`, so that
    a step's captured layers are those of the connection that gets them."""

    @classmethod
    def connect(
        cls,
        address: Address,
        target: TargetContract,
        instance_id: str,
        draft_deadline_s: float,
        observer: DrafterObserver,
        open_channel: OpenChannel = open_channel,
    ) -> RemoteDrafter:
        """Start looking for the drafter at once, in the background."""
        status = DrafterStatus(observer, time.monotonic)
        link = DrafterLink(address, Negotiation(target, instance_id), instance_id, status, open_channel)
        link.start()
        return cls(link, target, instance_id, draft_deadline_s, observer.observe_resync, time.monotonic)

    def __init__(
        self,
        link: Link,
        target: TargetContract,
        instance_id: str,
        draft_deadline_s: float,
        on_resync: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """on_resync hears the kind of each re-opening; see DrafterObserver.observe_resync."""
        self._link = link
        self._status = link.status
        self._target = target
        self._instance_id = instance_id
        self._draft_deadline_s = draft_deadline_s
        self._clock = clock
        self._sessions = DrafterSessions(clock, on_resync)
        self._stream: DrafterStream | None = None
        self._transport: Transport | None = None
        self._posted_at = clock()
        self._asked: dict[int, Block] = {}
        self._plain: dict[int, PlainReason] = {}
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

    @property
    def draft(self) -> DraftContract | None:
        """What the connection in use asks to capture; changes where captured_layer_ids does."""
        return self._stream.agreement.draft if self._stream else None

    # --- DraftSource --------------------------------------------------------------------------------

    @property
    def captured_layer_ids(self) -> tuple[int, ...]:
        return self.draft.captured_layer_ids if self.draft else ()

    def post(self, handoff: HandOff) -> None:
        self._posted_at = self._clock()
        if self._transport is None:
            self._sessions.plan(dataclasses.replace(handoff, captured=None))
            self._plain = dict.fromkeys((w.session_id for w in handoff.wanted), self._reason_without_link())
        else:
            step, self._plain = self._sessions.plan(handoff)
            self._asked = {block.session_id: block for block in step.blocks}
            self._send(self._transport, step, handoff)
        self._settle()

    def collect(self) -> Drafts:
        drafts = Drafts(plain=self._plain)
        asked, self._asked, self._plain = self._asked, {}, {}
        if self._transport is not None and self._stream is not None:
            deadline = self._posted_at + (self._draft_deadline_s if asked else 0.0)
            reason = PlainReason.DEADLINE
            try:
                collected = self._transport.collect(deadline)
            except PeerLost:
                reason = PlainReason.UNAVAILABLE
            except PeerFault as fault:
                reason = PlainReason.INVALID_DRAFT
                self._status.drop(self._stream, str(fault))
            else:
                self._take(collected, asked, drafts)
            for session_id in asked:
                if session_id not in drafts.tokens:
                    drafts.plain.setdefault(session_id, reason)
        self._settle()
        return drafts

    def lost_sessions(self) -> set[int]:
        return self._sessions.lost_sessions()

    def close(self) -> None:
        self._link.close()

    # --- parts ---------------------------------------------------------------------------------------

    def _send(self, transport: Transport, step: Step, handoff: HandOff) -> None:
        if step.is_empty:
            return
        assert self._stream is not None
        try:
            if transport.post(step, handoff.captured):
                return
        except PeerLost:
            reason = PlainReason.UNAVAILABLE
        else:
            # So far behind that a deadline's worth of steps is queued: as bad as a missed deadline.
            reason = PlainReason.BUSY
            self._status.missed(self._stream)
        self._sessions.unsent(step)
        self._plain.update(dict.fromkeys(self._asked, reason))
        self._asked = {}

    def _take(self, collected: Collected, asked: dict[int, Block], drafts: Drafts) -> None:
        """Learn from all reports; keep the drafts of the blocks that were asked for last."""
        assert self._stream is not None
        if collected.latest is not None:
            self._status.answered(self._stream)
        elif asked:
            self._status.missed(self._stream)
        for report in collected.earlier:
            self._sessions.learn(report)
        for report in collected.latest or ():
            block = asked.get(report.session_id)
            if block is None:
                self._sessions.learn(report)
                continue
            reason = self._sessions.learn_of_block(report, block)
            if reason is not None:
                drafts.plain[report.session_id] = reason
            elif report.draft is not None:
                drafts.tokens[report.session_id] = report.draft
        reports = (*collected.earlier, *(collected.latest or ()))
        if any(report.outcome is Outcome.INVALID_TENSOR for report in reports):
            self._status.drop(self._stream, "captured rows were refused")

    def _settle(self) -> None:
        """Take over the connection that the link has now, if it is another one, and inline."""
        stream = self._status.stream
        if stream is not None and stream.agreement.ring is not None:
            stream = None
        if stream is not self._stream:
            self._stream = stream
            self._plain.update(dict.fromkeys(self._asked, PlainReason.UNAVAILABLE))
            self._asked = {}
            if stream is None:
                self._transport = None
                self._sessions.disconnected()
            else:
                agreement = stream.agreement
                self._transport = InlineTransport(
                    stream,
                    self._target,
                    agreement.draft,
                    target_instance_id=self._instance_id,
                    drafter_instance_id=agreement.drafter_instance_id,
                )
                self._sessions.connected(agreement.num_sessions_max)
        self._num_open = self._sessions.num_open

    def _reason_without_link(self) -> PlainReason:
        return PlainReason.BREAKER_OPEN if self._status.breaker_is_open else PlainReason.UNAVAILABLE
