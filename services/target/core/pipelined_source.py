"""Where the pipelined step loop gets drafts from, without the host ever waiting for one.

The device waits, the drafter writes into the ring, and the host only says which row is whose. Knows no
transport; `NoPipelinedDrafter` is plain decoding. A drafter that can only be reached by messages is a
DraftSource: `inline` names it, and the loop then runs its steps one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from common.contract import DraftContract, Mismatch
from services.target.core.draft_source import DraftSource, PlainReason

if TYPE_CHECKING:
    from common.handoff.ring import Ring


class PostedExtend(NamedTuple):
    """Rows [row_start, row_start + num_rows) of ring.extend_captured are a session's context from
    `position` on."""

    session_id: int
    position: int
    row_start: int
    num_rows: int


class PostedRow(NamedTuple):
    """The session of a ring row. base, the anchor's position before the step, and that after it lie within
    [position_min, position_max]."""

    session_id: int
    position_min: int
    position_max: int


@dataclass(frozen=True, slots=True)
class PostedStep:
    """What one step hands to the drafter. rows: by ring row; None for one that nobody drafts for. ended
    are sessions that are over.

    Without extends and rows nothing was launched that captured anything: only `ended` matters.
    """

    number: int
    extends: list[PostedExtend]
    rows: list[PostedRow | None]
    ended: list[int]


class PipelinedDrafter(Protocol):
    """Called by the core's thread only, and never waits.

    A step calls settle, draft_rows, await_drafts and mark_ready (in a launch that writes the ring), post, and
    observe_completed for the step before. `post` comes once for each launch, and for ended sessions
    also without one; a draft can only be used by the launch right after its post.
    """

    @property
    def draft(self) -> DraftContract | None:
        """What to capture and how wide to verify; None is plain decoding. Changes only in settle and refuse,
        and where `inline` is set, also where that changes what it captures."""

    @property
    def ring(self) -> Ring | None:
        """Where the step publishes; there is one exactly while there is a contract. Raises DraftDoesNotFit
        when there is no memory for it."""

    @property
    def inline(self) -> DraftSource | None:
        """The source to ask instead, step by step, when drafts come by messages. Changes only in settle and
        refuse."""

    def settle(self) -> None:
        """At each step's start: take over a new connection, or a loss, and learn from replies."""

    def refuse(self, mismatch: Mismatch) -> None:
        """The device cannot do what the contract asks: from now on there is none."""

    def lost_sessions(self) -> set[int]:
        """See DraftSource.lost_sessions. A launch that is in flight for one of them is discarded."""

    def draft_rows(self, session_ids: list[int]) -> list[int]:
        """The ring row of each one's draft from the last post, -1 when none can be used."""

    def why_plain(self, session_id: int) -> PlainReason:
        """Why draft_rows just had none for this session."""

    def await_drafts(self) -> None:
        """Enqueue on the current stream the wait until all that was posted is done. The launch behind it
        writes over what the drafter reads, whether or not it uses a draft."""

    def mark_ready(self) -> None:
        """Enqueue on the current stream that what the launch wrote into the ring is there."""

    def post(self, step: PostedStep) -> None:
        """Hand a step over: say whose is what. Never raises for the peer's faults."""

    def observe_completed(self, step_number: int, invalid: Sequence[int] = ()) -> None:
        """The host has seen the results of that step's launch. invalid: sessions whose drafts in it were not
        all ids of the vocabulary."""

    def close(self) -> None:
        """Give sessions back and stop; the drafter is not used afterwards."""


class NoPipelinedDrafter:
    """Plain decoding."""

    draft: DraftContract | None = None
    ring: Ring | None = None
    inline: DraftSource | None = None

    def settle(self) -> None: ...

    def refuse(self, mismatch: Mismatch) -> None:
        raise AssertionError("there is no contract to refuse")

    def lost_sessions(self) -> set[int]:
        return set()

    def draft_rows(self, session_ids: list[int]) -> list[int]:
        return [-1] * len(session_ids)

    def why_plain(self, session_id: int) -> PlainReason:
        return PlainReason.DISABLED

    def await_drafts(self) -> None:
        raise AssertionError("there is no draft to wait for")

    def mark_ready(self) -> None:
        raise AssertionError("nobody reads what is ready")

    def post(self, step: PostedStep) -> None: ...

    def observe_completed(self, step_number: int, invalid: Sequence[int] = ()) -> None: ...

    def close(self) -> None: ...
