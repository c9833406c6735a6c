"""What the drafter holds for one request of a target: soft state that may vanish at any moment.

Plain facts, no torch, no grpc, no rules: those are in session_table.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Effect:
    """What a step in flight does to the end of a context, as far as the host can know.

    set_to: the end is at least here once the step's known rows are in; None when it has none.
    position_min: then the device moves the end to here at least, or leaves it; None when it does not.
    """

    set_to: int | None = None
    position_min: int | None = None

    def least_end(self, context_len: int) -> int:
        """The least end after the step, of a context whose end was at least `context_len`."""
        least = context_len if self.set_to is None else self.set_to
        return least if self.position_min is None else min(least, self.position_min)


@dataclass
class LaneState:
    """The row that a session has in the engine's device arrays, and what the device was told of it.

    start_position_max: the context begins here at the latest; equal to start_position but for a session
    that began at a position which only the device knew. num_pages_told: pages, from the first, whose
    entries were handed over. effects: of the steps in flight, oldest first.
    """

    lane: int
    start_position_max: int
    has_joined: bool = False
    num_pages_told: int = 0
    effects: deque[Effect] = field(default_factory=deque)


@dataclass(eq=False)
class Session:
    """Context of one request: captured rows of positions [start_position, context_len).

    `pages` are indexed by position - start_position and hold the block's temporary rows too. Both positions
    are lower bounds while steps are in flight on a device. lane_state is None where sessions have no lanes.
    is_spoiled: rows that are not finite were stored.
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

    @property
    def first_append(self) -> int:
        """Lowest position that surely lies in the context or at its start."""
        return self.start_position if self.lane_state is None else self.lane_state.start_position_max
