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
    NON_FINITE = "non_finite"


@dataclass
class Session:
    """Context of one request: captured rows of positions [start_position, context_len).

    `pages` are indexed by position - start_position and hold the block's temporary rows too.
    """

    key: SessionKey
    epoch: int
    start_position: int
    context_len: int
    pages: PageTable
    last_seen_s: float

    @property
    def num_rows(self) -> int:
        """Rows of context that are stored."""
        return self.context_len - self.start_position
