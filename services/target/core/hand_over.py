"""What a launch hands to the drafter: before its results are known, or after. Pure; no torch.

Captured rows of a launch lie extend after extend, each as long as it is; then block after block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.target.core.draft_source import ContextRows, HandOff, WantedBlock
from services.target.core.lane_launch import Launched
from services.target.core.lane_outcome import Outcome
from services.target.core.lanes_scheduler import Ride
from services.target.core.pipelined_source import PostedExtend, PostedRow, PostedStep
from services.target.core.request import Phase

if TYPE_CHECKING:
    import torch


def posted_step(launched: Launched, ended: list[int]) -> PostedStep:
    """A launch that captures: bounds, where nobody knows the tokens yet."""
    plan = launched.plan
    extends = []
    row = 0
    for extend in plan.extends:
        if extend.ride.request.drafting:
            extends.append(
                PostedExtend(extend.ride.request.session_id, extend.start, row, extend.num_tokens)
            )
        row += extend.num_tokens
    rows = [_posted_row(ride, ride.position_min - 1) for ride in plan.decodes]
    rows += [_posted_row(extend.ride, extend.stop) for extend in plan.extends if extend.is_published]
    return PostedStep(launched.number, extends, rows, ended)


def _posted_row(ride: Ride, base_min: int) -> PostedRow | None:
    request = ride.request
    if not request.drafting or ride.room_max < 2:
        return None
    # No position past the last token's matters: there the request is over.
    position_max = min(ride.position_max, request.len_max - 1)
    return PostedRow(request.session_id, base_min, position_max)


def hand_off(
    launched: Launched, outcomes: Sequence[Outcome], captured: torch.Tensor | None, ended: list[int]
) -> HandOff:
    """A launch with its outcomes (of the extends, then of the decodes): rows that became context, and a
    block for each request that can use one."""
    plan = launched.plan
    appends: list[ContextRows] = []
    wanted: list[WantedBlock] = []
    row = 0
    of_extends, of_decodes = outcomes[: len(plan.extends)], outcomes[len(plan.extends) :]
    for extend, outcome in zip(plan.extends, of_extends, strict=True):
        request = outcome.request
        row_start, row = row, row + extend.num_tokens
        if request.phase is Phase.RUNNING and request.drafting:
            appends.append(ContextRows(request.session_id, extend.start, row_start, row))
            wanted += _wanted(outcome)
    for _, outcome in zip(plan.decodes, of_decodes, strict=True):
        request = outcome.request
        row_start, row = row, row + launched.num_rows_each
        if request.phase is Phase.RUNNING and request.drafting and outcome.verified:
            # Nothing was cut from a request that goes on: each committed token stands for a row before it.
            num_context = len(outcome.verified.tokens)
            position = request.committed_len - 1 - num_context
            appends.append(ContextRows(request.session_id, position, row_start, row_start + num_context))
            wanted += _wanted(outcome)
    return HandOff(appends if captured is not None else [], wanted, ended, captured)


def _wanted(outcome: Outcome) -> list[WantedBlock]:
    """With room for one token only, a draft could not be used."""
    request = outcome.request
    if outcome.verified is None or request.room < 2:
        return []
    return [WantedBlock(request.session_id, request.committed_len - 1, request.tokens[-1])]
