"""Rows of prompts on the device: staged from what the host says and the lanes hold; the token after them.

The host knows a prompt's positions, the device its pages. Rows of several prompts lie one after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.kernels.lanes import TABLE_CHUNK, LaneState, Published, StagedRows, copy_pages, slot_of
from common.kernels.overlap import admit_next, await_previous

_ROW_BLOCK = 128


@dataclass(frozen=True)
class ExtendBatch:
    """Rows of F prompts as the host describes them, int32 on the device.

    ids, row_sequences `[N]`: token and which prompt it belongs to, -1 for padding. row_starts `[F + 1]`:
    prompt f has rows row_starts[f] … row_starts[f + 1] - 1, none for padding. Each `[F]`: lanes; starts,
    positions of their first rows; samples, 1 where the last row's token is chosen and becomes the anchor;
    ring_rows, where it is published, -1 for nowhere.
    """

    ids: torch.Tensor
    row_sequences: torch.Tensor
    row_starts: torch.Tensor
    lanes: torch.Tensor
    starts: torch.Tensor
    samples: torch.Tensor
    ring_rows: torch.Tensor


@triton.jit
def _stage_extends(
    row_sequences, row_starts, lanes, starts, page_table, temperatures, top_ks, top_ps, reaches, seeds,
    positions_out, slots_out, kv_lens_out, tables_out, last_rows_out,
    temperatures_out, top_ks_out, top_ps_out, reaches_out, seeds_out, chosen_positions_out,
    num_rows, num_sequences, num_pages_each, positions_max,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first programs take a sequence each, the rest blocks of rows."""
    await_previous(PDL)
    admit_next(PDL)
    program = tl.program_id(0)
    if program < num_sequences:
        lane = tl.load(lanes + program)
        num_own = tl.load(row_starts + program + 1) - tl.load(row_starts + program)
        stop = tl.load(starts + program) + num_own
        kv_len = tl.where(num_own > 0, tl.minimum(stop, positions_max), 0)
        tl.store(kv_lens_out + program, kv_len)
        tl.store(last_rows_out + program, tl.maximum(tl.load(row_starts + program + 1) - 1, 0))
        for first in range(0, kv_len, CHUNK * PAGE_SIZE):
            copy_pages(
                page_table, tables_out, lane, program, first // PAGE_SIZE, kv_len, num_pages_each,
                PAGE_SIZE, CHUNK,
            )  # fmt: skip
        tl.store(temperatures_out + program, tl.load(temperatures + lane))
        tl.store(top_ks_out + program, tl.load(top_ks + lane))
        tl.store(top_ps_out + program, tl.load(top_ps + lane))
        tl.store(reaches_out + program, tl.load(reaches + lane))
        tl.store(seeds_out + program, tl.load(seeds + lane))
        tl.store(chosen_positions_out + program, stop.to(tl.int64))
    else:
        row = (program - num_sequences) * ROWS + tl.arange(0, ROWS)
        exists = row < num_rows
        sequence = tl.load(row_sequences + row, mask=exists, other=-1)
        used = sequence >= 0
        row_lane = tl.load(lanes + sequence, mask=used, other=0)
        position = row - tl.load(row_starts + sequence, mask=used, other=0)
        position += tl.load(starts + sequence, mask=used, other=0)
        position = tl.where(used, position, 0)
        slot = slot_of(page_table, row_lane, position, num_pages_each, used, PAGE_SIZE)
        tl.store(slots_out + row, slot, mask=exists)
        tl.store(positions_out + row, tl.minimum(position, positions_max - 1), mask=exists)


def stage_extends(
    batch: ExtendBatch,
    lanes: LaneState,
    staged: StagedRows,
    last_rows: torch.Tensor,
    *,
    page_size: int,
    positions_max: int,
    pdl: bool = False,
) -> None:
    """Positions, slots, key lengths, page tables and the choice's parameters of prompt rows.

    staged: N rows, F sequences and F choices of batch's sizes; its ids are not written, batch.ids are the
    rows'. last_rows `[F]` int32: where each prompt's last row lies. Padding rows get position 0 and a slot of
    the sentinel page, padding sequences no keys. Positions and key lengths are cut at positions_max.
    Allocates nothing.
    """
    num_rows, num_sequences = batch.row_sequences.shape[0], batch.lanes.shape[0]
    p = staged.params
    _stage_extends[(num_sequences + triton.cdiv(num_rows, _ROW_BLOCK),)](
        batch.row_sequences, batch.row_starts, batch.lanes, batch.starts, lanes.page_table,
        lanes.temperature, lanes.top_k, lanes.top_p, lanes.min_p_reach, lanes.seed,
        staged.positions, staged.slots, staged.kv_lens, staged.page_table, last_rows,
        p.temperature, p.top_k, p.top_p, p.min_p_reach, p.seed, p.position,
        num_rows, num_sequences, lanes.page_table.shape[1], positions_max,
        PAGE_SIZE=page_size, ROWS=_ROW_BLOCK, CHUNK=TABLE_CHUNK, PDL=pdl, num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def _commit_extends(
    chosen, finite, row_starts, lanes, starts, samples, ring_rows, anchors, positions, results,
    ring_base, ring_count, ring_anchor, PUBLISH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    sequence = tl.program_id(0)
    token = tl.load(chosen + sequence)
    tl.store(results + sequence * 2, token)
    tl.store(results + sequence * 2 + 1, tl.load(finite + sequence))
    if tl.load(samples + sequence) != 0:
        lane = tl.load(lanes + sequence)
        stop = tl.load(starts + sequence)
        stop += tl.load(row_starts + sequence + 1) - tl.load(row_starts + sequence)
        tl.store(anchors + lane, token)
        tl.store(positions + lane, stop)
        if PUBLISH:
            ring_row = tl.load(ring_rows + sequence)
            if ring_row >= 0:
                tl.store(ring_base + ring_row, stop)
                tl.store(ring_count + ring_row, 0)
                tl.store(ring_anchor + ring_row, token)


def commit_extends(
    chosen: torch.Tensor,
    finite: torch.Tensor,
    batch: ExtendBatch,
    lanes: LaneState,
    results: torch.Tensor,
    published: Published | None,
    *,
    pdl: bool = False,
) -> None:
    """The token chosen at a prompt's end becomes its lane's anchor, at the position after its last row.

    chosen, finite `[F]` int32 as `sample` gives them; results `[F, 2]` int32 := both. published: where a
    prompt that has a ring row says so. Lanes without `samples` stay as they are. Allocates nothing.
    """
    ring = published or Published(lanes.anchors, lanes.anchors, lanes.anchors)
    _commit_extends[(batch.lanes.shape[0],)](
        chosen, finite, batch.row_starts, batch.lanes, batch.starts, batch.samples, batch.ring_rows,
        lanes.anchors, lanes.positions, results, ring.base, ring.count, ring.anchor,
        PUBLISH=published is not None, PDL=pdl, num_warps=1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
