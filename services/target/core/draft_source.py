"""Where the step loop gets drafts from. Knows no transport; `NoDrafts` is plain decoding.

A step posts what it captured and which blocks it wants, and collects them at the start of the next
step. Whatever goes wrong in between shows only as a reason for plain decoding.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class PlainReason(enum.Enum):
    """Why a decode step had no draft; the label values of plain_decode_steps_total."""

    DISABLED = "disabled"
    BREAKER_OPEN = "breaker_open"
    DEADLINE = "deadline"
    UNAVAILABLE = "unavailable"
    BUSY = "busy"
    NO_CAPACITY = "no_capacity"
    RESYNC = "resync"
    INVALID_DRAFT = "invalid_draft"
    NON_FINITE = "non_finite"


@dataclass(frozen=True)
class ContextRows:
    """Rows [row_start, row_stop) of the captured tensor are a session's context from `position` on."""

    session_id: int
    position: int
    row_start: int
    row_stop: int


@dataclass(frozen=True)
class WantedBlock:
    """A draft block is wanted: the anchor stands at `position` = committed_len - 1."""

    session_id: int
    position: int
    anchor: int


@dataclass(frozen=True)
class HandOff:
    """What one step hands to the drafter.

    captured `[N, num_captured_layers * hidden_size]` holds every row of the step; appends name the
    rows that became context. ended are sessions that are over.
    """

    appends: list[ContextRows]
    wanted: list[WantedBlock]
    ended: list[int]
    captured: torch.Tensor | None


@dataclass(frozen=True)
class Drafts:
    """Draft tokens by session (each num_draft_tokens long, already checked against the vocabulary),
    and for every wanted block that did not come, why."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    plain: dict[int, PlainReason] = field(default_factory=dict)


class DraftSource(Protocol):
    """Called by the core's thread only; only `collect` may wait, and at most the step deadline.

    A step calls collect, lost_sessions, captured_layer_ids and post, in this order, and so does an idle
    core now and then: a source may change what it wants captured in collect and at the end of post,
    and nowhere else.
    """

    @property
    def captured_layer_ids(self) -> tuple[int, ...]:
        """Layers to capture in this step; empty while nobody can use them."""

    def post(self, handoff: HandOff) -> None:
        """Hand a step over. Never waits, never raises for the peer's faults."""

    def collect(self) -> Drafts:
        """Drafts for the blocks that the last `post` wanted."""

    def lost_sessions(self) -> set[int]:
        """Sessions that could draft again if their context were captured anew from position 0.

        Each is named once. The caller may rewind the request, or do nothing: then its context starts
        at the next append.
        """

    def close(self) -> None:
        """Give sessions back and stop; the source is not used afterwards."""


class NoDrafts:
    """A DraftSource without a drafter."""

    captured_layer_ids: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._wanted: list[int] = []

    def post(self, handoff: HandOff) -> None:
        self._wanted = [block.session_id for block in handoff.wanted]

    def collect(self) -> Drafts:
        return Drafts(plain=dict.fromkeys(self._wanted, PlainReason.DISABLED))

    def lost_sessions(self) -> set[int]:
        return set()

    def close(self) -> None:
        self._wanted = []
