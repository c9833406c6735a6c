"""A launch of lanes: what the loop needs of the device for it, and what it remembers of one on its way.

No torch. Knows a plan's rides and their drafts' rows; nothing of what a launch chose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from common.contract import DraftContract
from services.target.core.device_launch import ExtendRows, Launch, Results, Ticket
from services.target.core.draft_source import PlainReason
from services.target.core.lanes_scheduler import Plan, Ride
from services.target.core.request import SamplingParams

if TYPE_CHECKING:
    import torch

    from common.handoff.ring import Ring


class LaneEngine(Protocol):
    """The device; see device_engine.py for the meaning."""

    def prepare_drafting(self, draft: DraftContract, ring: Ring, *, by_messages: bool = ...) -> None: ...

    def join(self, lane: int, sampling: SamplingParams) -> None: ...

    def set_drafts(self, drafts: list[list[int]]) -> None: ...

    def launch(
        self, launch: Launch, enter: Callable[[], object] = ..., leave: Callable[[], object] = ...
    ) -> Ticket: ...

    def results_to_host(self, ticket: Ticket) -> Results: ...

    def captured_to_host(self, ticket: Ticket) -> torch.Tensor: ...

    def zero_pages(self, pages: list[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class DraftRows:
    """For each decoding ride of a plan: the row of its draft, or -1 and why, where that is worth telling."""

    rows: list[int]
    plain: list[PlainReason | None]

    @classmethod
    def place(
        cls, plan: Plan, rows: list[int], why_plain: Callable[[int], PlainReason | None]
    ) -> DraftRows:
        """rows: of the drafts that came. why_plain says for a session why none did."""
        placed = [row if may_draft else -1 for row, may_draft in zip(rows, plan.may_draft, strict=True)]
        plain = [
            None if row >= 0 else _why_plain(ride, came >= 0, why_plain)
            for ride, row, came in zip(plan.decodes, placed, rows, strict=True)
        ]
        return cls(placed, plain)


def _why_plain(ride: Ride, came: bool, of: Callable[[int], PlainReason | None]) -> PlainReason | None:
    if not ride.request.drafting:
        return PlainReason.DISABLED
    if came:
        # There were no pages for it.
        return PlainReason.NO_CAPACITY
    # With room for one token only, nobody wanted a draft.
    return of(ride.request.session_id) if ride.room_max > 1 else None


@dataclass(frozen=True, slots=True)
class Launched:
    """A launch on its way. num_rows_each: of a decoding ride. num_drafts: draft tokens that each of them
    verifies; plain: why none. captured_row_bytes: 0 when it captured nothing."""

    number: int
    ticket: Ticket
    plan: Plan
    num_rows_each: int
    num_drafts: list[int]
    plain: list[PlainReason | None]
    captured_row_bytes: int

    @property
    def is_nothing(self) -> bool:
        return self.plan.is_empty

    @property
    def captures(self) -> bool:
        return self.captured_row_bytes > 0


_NOBODY = np.empty((0, 1), np.int32)
NOTHING = Launched(0, Ticket(-1, 0, 0, 1, 0), Plan(), 1, [], [], 0)
NO_RESULTS = Results(
    tokens=_NOBODY, num_accepted=_NOBODY[:, 0], finite=_NOBODY[:, 0] > 0, num_clamped=_NOBODY[:, 0],
    extend_tokens=_NOBODY[:, 0], extend_finite=_NOBODY[:, 0] > 0, extend_s=0.0, verify_s=0.0, gpu_s=0.0,
)  # fmt: skip


def extend_rows(plan: Plan, captures: bool) -> list[ExtendRows]:
    """The plan's extends as the device takes them; published ones have the ring rows behind the decodes."""
    rows = []
    ring_row = len(plan.decodes)
    for extend in plan.extends:
        ride, is_published = extend.ride, captures and extend.is_published
        token_ids = ride.request.tokens[extend.start : extend.stop]
        rows.append(
            ExtendRows(ride.lane, extend.start, token_ids, extend.samples, ring_row if is_published else -1)
        )
        ring_row += is_published
    return rows
