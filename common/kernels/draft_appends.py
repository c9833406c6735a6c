"""Prompt rows for the drafter's context: where each append's rows go, and whether all of them are finite.

The counterpart of draft_lanes for rows whose number and position the host knows; whether they continue the
lane's context is still decided on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.draft_lanes import (
    NON_FINITE,
    OK,
    DraftLanes,
    StagedContext,
    all_finite,
    judge,
    store_places,
)
from common.kernels.overlap import admit_next, await_previous

# Rows of an append, or flags of them, that a program moves at once.
_ROWS_STEP = 256


def stage_appends(
    appends: torch.Tensor,
    lanes: DraftLanes,
    context: StagedContext,
    results: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Take the rows of each append for its lane's context, by the rule of ring rows that do not begin.

    appends `[A, 4]` int32: lane, position, first row, number of rows; 0 rows are padding (UNKNOWN_SESSION).
    Rows of different appends do not overlap, and no lane stands there twice. context must hold zeros: only
    the rows of an append that is taken are written. results `[A, 2]` as for ring rows. Allocates nothing.
    """
    assert appends.is_contiguous() and appends.shape[1] == 4
    _stage_appends[(appends.shape[0],)](
        appends, lanes.start, lanes.context_len, lanes.page_table, context.positions, context.slots, results,
        lanes.sentinel, lanes.page_table.shape[1], lanes.page_table.stride(0), lanes.context_len_max,
        lanes.max_positions, PAGE_SIZE=lanes.page_size, STEP=_ROWS_STEP, PDL=pdl,
        num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def settle_appends(
    appends: torch.Tensor, finite: torch.Tensor, results: torch.Tensor, *, pdl: bool = False
) -> None:
    """Outcome NON_FINITE for an append that was taken and has a 0 among its rows of finite `[N, L]` uint8."""
    assert appends.is_contiguous() and finite.is_contiguous()
    _settle_appends[(appends.shape[0],)](
        appends, finite, results, NUM_LAYERS=finite.shape[1], STEP=_ROWS_STEP, PDL=pdl,
        num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def _stage_appends(
    appends_ptr, start_ptr, context_len_ptr, page_table_ptr, positions_ptr, slots_ptr, results_ptr,
    sentinel, table_width, table_stride, context_len_max, max_positions,
    PAGE_SIZE: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    nth = tl.program_id(0)
    lane = tl.load(appends_ptr + nth * 4)
    position = tl.load(appends_ptr + nth * 4 + 1)
    first_row = tl.load(appends_ptr + nth * 4 + 2)
    num_rows = tl.load(appends_ptr + nth * 4 + 3)
    is_lane = (lane >= 0) & (lane < sentinel) & (num_rows > 0)
    lane = tl.where(is_lane, lane, sentinel)
    start = tl.load(start_ptr + lane)
    old_len = tl.load(context_len_ptr + lane)
    outcome = judge(start, old_len, position, num_rows, False, is_lane, context_len_max)
    is_taken = outcome == OK
    tl.store(context_len_ptr + lane, position + num_rows, mask=is_taken)
    tl.store(results_ptr + nth * 2, outcome)
    tl.store(results_ptr + nth * 2 + 1, tl.where(is_taken, position + num_rows, old_len))
    page_row = page_table_ptr + lane.to(tl.int64) * table_stride
    num_taken = tl.where(is_taken, num_rows, 0)
    for at in range(0, num_taken, STEP):
        store_places(
            positions_ptr + first_row, slots_ptr + first_row, at + tl.arange(0, STEP), num_taken, num_taken,
            position, start, page_row, table_width, max_positions, PAGE_SIZE,
        )  # fmt: skip


@triton.jit
def _settle_appends(
    appends_ptr, finite_ptr, results_ptr, NUM_LAYERS: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    admit_next(PDL)
    nth = tl.program_id(0)
    first_row = tl.load(appends_ptr + nth * 4 + 2)
    num_rows = tl.load(appends_ptr + nth * 4 + 3)
    is_taken = tl.load(results_ptr + nth * 2) == OK
    num_flags = tl.where(is_taken, num_rows * NUM_LAYERS, 0)
    finite = all_finite(finite_ptr + first_row * NUM_LAYERS, num_flags, STEP)
    tl.store(results_ptr + nth * 2, NON_FINITE, mask=finite == 0)
