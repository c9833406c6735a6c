"""What the drafter's device engine is asked to launch, and what it says when that is done. No torch.

A lane is the row that a session has in the engine's device arrays. A ring row is a batch row of the target's
step, as it stands in the hand-off ring.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from common.handoff.transport import Outcome
from common.paged_kv import PageEntry


class DeviceAppend(NamedTuple):
    """Rows [row_start, row_start + num_rows) of ring.extend_captured are a lane's context from `position`
    on."""

    lane: int
    position: int
    row_start: int
    num_rows: int


@dataclass
class DraftWork:
    """One step. No lane stands twice in appends, nor in lanes; rows of appends do not overlap.

    pages: entries that are new, applied before anything else. lanes: by ring row, the sentinel lane for
    nobody. begins, by ring row: the lane's context starts there. blocks: whether drafts are wanted; otherwise
    the rows are context alone.
    """

    appends: list[DeviceAppend] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    begins: list[bool] = field(default_factory=list)
    pages: list[PageEntry] = field(default_factory=list)
    blocks: bool = True


class LaneResult(NamedTuple):
    """What became of a lane's rows, and where its context ends after them."""

    outcome: Outcome
    context_len: int


@dataclass(frozen=True)
class DraftResults:
    """By append and by ring row of the work. A row of nobody is UNKNOWN_SESSION."""

    appends: list[LaneResult]
    rows: list[LaneResult]
