"""What drafters in the target's own process have in common: stream order is all the waiting there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.contract import DraftContract, Mismatch
from services.target.core.draft_fit import DraftDoesNotFit
from services.target.core.draft_source import DraftSource, PlainReason

if TYPE_CHECKING:
    from common.handoff.ring import Ring


class SameStreamDrafter:
    """The part of a PipelinedDrafter that needs no peer. Whoever extends it posts, and fills `_rows`: the
    ring row of each session's draft from the last post."""

    inline: DraftSource | None = None

    def __init__(self, draft: DraftContract, ring: Ring) -> None:
        self.draft: DraftContract | None = draft
        self.ring: Ring | None = ring
        self._rows: dict[int, int] = {}

    def settle(self) -> None: ...

    def refuse(self, mismatch: Mismatch) -> None:
        """A bench that does not fit the GPU ends: raises DraftDoesNotFit."""
        raise DraftDoesNotFit(mismatch)

    def lost_sessions(self) -> set[int]:
        return set()

    def draft_rows(self, session_ids: list[int]) -> list[int]:
        return [self._rows.get(session_id, -1) for session_id in session_ids]

    def why_plain(self, session_id: int) -> PlainReason:
        # Its prompt ended in the step before, or it does not draft: nothing else happens in one process.
        return PlainReason.UNAVAILABLE

    def await_drafts(self) -> None:
        """The stream is the one that drafted."""

    def mark_ready(self) -> None:
        """What drafts comes later on the same stream."""
