"""What the drafter holds for one request of a target: soft state that may vanish at any moment.

Plain facts, no torch, no grpc, no rules: those are in session_table.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from common.paged_kv import PageTable


class SessionKey(NamedTuple):
    """Names a session among all targets."""

    target_instance_id: str
    session_id: int


class CloseReason(enum.Enum):
    """Why a session ended; the label values of sessions_closed_total."""

    ASKED = "asked"
    REPLACED = "replaced"
    LEASE_EXPIRED = "lease_expired"
    INSTANCE_GONE = "instance_gone"
    STREAM_LOST = "stream_lost"
    NON_FINITE = "non_finite"


@dataclass
class LaneState:
    """The row that a session has in the engine's device arrays, and what the device was told of it.

    num_pages_told: pages, from the first, whose entries were handed over. num_in_flight: steps that name the
    session and are launched, not over.
    """

    lane: int
    has_joined: bool = False
    num_pages_told: int = 0
    num_in_flight: int = 0


@dataclass(eq=False)
class Session:
    """Context of one request: captured rows of positions [start_position, context_len).

    `pages` are indexed by position - start_position and hold the block's temporary rows too. is_spoiled: rows
    that are not finite were stored.

    On a device the truth of both positions is there: start_position is a lower bound, with which pages are
    counted, and context_len the end after the last step that is over. Without lanes lane_state is None.
    """

    key: SessionKey
    epoch: int
    start_position: int
    context_len: int
    pages: PageTable
    last_seen_s: float
    lane_state: LaneState | None = None
    is_spoiled: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of context that are stored."""
        return self.context_len - self.start_position
