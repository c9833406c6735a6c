"""The interface of the hand-off: what a step asks of the drafter, what comes back, and two verbs.

Both services speak of a step in these words. A transport moves a step and its captured rows to one
life of a drafter and brings reports and drafts back. It believes nothing about sessions and knows no
grpc; whoever posts decides what a report means. The contract of every field is that of the same name
in drafter.proto.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class Outcome(enum.IntEnum):
    """What became of a session in a message; names and numbers of tandem.v1.Outcome."""

    OK = 1
    UNKNOWN_SESSION = 2
    STALE_EPOCH = 3
    NEEDS_RESYNC = 4
    BUSY = 5
    NO_CAPACITY = 6
    INVALID_TENSOR = 7
    NON_FINITE = 8
    CONTEXT_LIMIT = 9
    INVALID_FIELD = 10


@dataclass(frozen=True)
class Close:
    """A session ends."""

    session_id: int
    epoch: int


@dataclass(frozen=True)
class Open:
    """A session begins, or begins again under a higher epoch."""

    session_id: int
    epoch: int
    start_position: int


@dataclass(frozen=True)
class Extend:
    """Rows [row_start, row_stop) of the step's captured tensor are context from `position` on."""

    session_id: int
    epoch: int
    position: int
    row_start: int
    row_stop: int

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start


@dataclass(frozen=True)
class Block:
    """A draft block is asked for; the anchor stands at `position`, the end of the context."""

    session_id: int
    epoch: int
    position: int
    anchor: int


@dataclass(frozen=True)
class Step:
    """What one step asks of the drafter, applied in the order of the fields."""

    closes: list[Close] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    extends: list[Extend] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.closes or self.opens or self.extends or self.blocks)


class DeviceRow(NamedTuple):
    """A batch row of the hand-off ring. The new anchor stands somewhere in [position_min, position_max];
    begins: the context starts with this row, wherever its first position turns out to be."""

    session_id: int
    epoch: int
    position_min: int
    position_max: int
    begins: bool


@dataclass(frozen=True)
class DeviceStep:
    """A step whose captured states are in the hand-off ring, applied in the order of the fields.

    Extends name rows of the ring's extend_captured. rows are the batch rows from 0; None: nobody's draft
    is wanted there.
    """

    sequence: int
    closes: list[Close] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    extends: list[Extend] = field(default_factory=list)
    rows: list[DeviceRow | None] = field(default_factory=list)

    @property
    def is_for_the_device(self) -> bool:
        """Whether anything in the ring is to be read."""
        return bool(self.extends) or any(row is not None for row in self.rows)

    @property
    def is_empty(self) -> bool:
        return not (self.closes or self.opens or self.is_for_the_device)


@dataclass(frozen=True)
class SessionReport:
    """What a reply says of one session.

    draft holds num_draft_tokens ids below vocab_rows, or is None. draft_is_faulty: the session's
    block was answered with something else than such ids, or not at all.
    """

    session_id: int
    epoch: int
    outcome: Outcome
    context_len: int
    draft: list[int] | None = None
    draft_is_faulty: bool = False


@dataclass(frozen=True)
class Collected:
    """Reports in the order in which they came.

    latest answers the whole of the step posted last, with the drafts; None while it is unanswered, or
    when it was collected before. earlier answers what came before: steps that were late, and parts
    of the last step that carried context only.
    """

    earlier: list[SessionReport]
    latest: list[SessionReport] | None


class PeerLost(Exception):
    """The connection to the drafter is gone; nothing more will come."""


class PeerFault(Exception):
    """A reply broke the contract in a way that makes every later reply meaningless."""


class Transport(Protocol):
    """One life of one connection. Used by one thread; only `collect` waits."""

    def post(self, step: Step, captured: torch.Tensor | None) -> bool:
        """Hand a step over; False, and nothing was handed over, when the drafter is so far behind
        that the bounded queue to it is full. The tensor may be changed after the call. Raises PeerLost.

        captured `[N, num_captured_layers * hidden_size]`; None only when no extend names a row.
        """

    def collect(self, deadline: float) -> Collected:
        """What has been answered; waits for all that was posted until `deadline` (monotonic
        seconds). Raises PeerLost, or PeerFault when a reply cannot be what was asked for."""
