"""The drafter's books on the device: where context rows and draft blocks go, and what became of them.

A lane is the row that a session has in the device's arrays while it runs. Whether rows continue a lane's
context is decided here, for only here is it known in time; a batch row whose lane refuses it is staged as
padding and changes nothing. The rows' positions come from another process and may be anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.handoff.transport import Outcome
from common.kernels.overlap import admit_next, await_previous

OK = tl.constexpr(int(Outcome.OK))
NOBODY = tl.constexpr(int(Outcome.UNKNOWN_SESSION))
NEEDS_RESYNC = tl.constexpr(int(Outcome.NEEDS_RESYNC))
CONTEXT_LIMIT = tl.constexpr(int(Outcome.CONTEXT_LIMIT))
NON_FINITE = tl.constexpr(int(Outcome.NON_FINITE))
# What a program moves at once: page numbers of a lane, flags, page entries.
_PAGES_STEP = 512
_FLAGS_STEP = 128
_ENTRIES_STEP = 256
_ENTRY_PROGRAMS = 8


@dataclass(frozen=True)
class DraftLanes:
    """What is known of each lane, all int32. The last lane is the sentinel: no kernel changes it.

    start, context_len `[num_lanes + 1]`: the context is positions [start, context_len). page_table
    `[num_lanes + 1, width]`: page i holds positions start + i · page_size and on; 0, the sentinel page,
    where there is none. context_len_max: end of the longest context. max_positions: of the RoPE table.
    """

    start: torch.Tensor
    context_len: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    context_len_max: int
    max_positions: int

    @property
    def sentinel(self) -> int:
        return self.start.shape[0] - 1


@dataclass(frozen=True)
class StagedContext:
    """Where rows of captured states go: positions, slots `[N]` int32, zero for a row that nobody takes."""

    positions: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True)
class StagedBlocks:
    """S draft blocks of B rows, all int32: ids, positions, slots `[S · B]`; kv_lens `[S]` counts the lane's
    keys with the block's, 0 is padding; page_table `[S, width]`, filled as far as kv_lens reaches."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    page_table: torch.Tensor


def enter_pages(entries: torch.Tensor, num_entries: torch.Tensor, lanes: DraftLanes) -> None:
    """page_table[lane, index] = page for the first num_entries `[1]` of entries `[N, 3]`, int32.

    They must lie in the table; none is named twice. Allocates nothing.
    """
    assert entries.is_contiguous() and entries.shape[1] == 3
    _enter_pages[(_ENTRY_PROGRAMS,)](
        entries, num_entries, lanes.page_table, lanes.page_table.stride(0), STEP=_ENTRIES_STEP, num_warps=1
    )


def stage_ring_rows(
    base: torch.Tensor,
    count: torch.Tensor,
    anchor: torch.Tensor,
    row_lanes: torch.Tensor,
    begins: torch.Tensor,
    lanes: DraftLanes,
    context: StagedContext,
    blocks: StagedBlocks,
    counts: torch.Tensor,
    results: torch.Tensor,
    *,
    vocab_rows: int,
    mask_token_id: int,
    pdl: bool = False,
) -> None:
    """Take each ring row's captured states for its lane's context from base on, and stage the block after.

    base, count, anchor `[n]`; row_lanes, begins `[S]`, S >= n: of all integers are int32. A row is taken when
    start <= base <= context_len, where base < context_len crops first; or when it begins: then start = base.
    Either way 0 <= count <= B, and base + count <= context_len_max. Then context_len = base + count; all B
    rows are staged at base and on, of which the last B - count are written over by the block: row 0 is the
    anchor, clamped into the vocabulary, the others are masks. Rows past the table's last page go to the
    sentinel page, positions past the RoPE table to its last.

    Written: lanes, context `[S · B]`, blocks `[S]`; counts `[S]`: rows that became context; results `[S, 2]`:
    Outcome (UNKNOWN_SESSION for the sentinel's rows) and the end of the lane's context. No lane may stand in
    row_lanes twice. Allocates nothing.
    """
    num_rows = row_lanes.shape[0]
    block_size = context.slots.shape[0] // num_rows
    assert context.slots.shape == blocks.ids.shape == (num_rows * block_size,) and base.shape[0] <= num_rows
    _stage_ring_rows[(num_rows,)](
        base, count, anchor, row_lanes, begins, lanes.start, lanes.context_len, lanes.page_table,
        context.positions, context.slots, blocks.ids, blocks.positions, blocks.slots, blocks.kv_lens,
        blocks.page_table, counts, results, base.shape[0], lanes.sentinel, lanes.page_table.shape[1],
        lanes.page_table.stride(0), blocks.page_table.stride(0), lanes.context_len_max, lanes.max_positions,
        vocab_rows, mask_token_id, BLOCK_SIZE=block_size, WIDTH=triton.next_power_of_2(block_size),
        PAGE_SIZE=lanes.page_size, STEP=_PAGES_STEP, PDL=pdl,
        num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def publish_drafts(
    drafted: torch.Tensor,
    wanted: torch.Tensor,
    finite: torch.Tensor,
    counts: torch.Tensor,
    results: torch.Tensor,
    drafts: torch.Tensor,
    *,
    mask_token_id: int,
    pdl: bool = False,
) -> None:
    """Give each ring row its draft; Outcome NON_FINITE where a row that became context is not finite.

    drafted `[S, K]`; finite `[S · B, L]` uint8, of which counts `[S]` rows of each B are looked at; results
    `[S, 2]` as staged, whose outcome is changed; drafts `[n, K]`, n <= S, is written: the mask id for a row
    whose outcome is not OK, and for all rows unless wanted `[1]`. Allocates nothing.
    """
    num_rows, num_drafts = drafted.shape
    block_size, num_layers = finite.shape[0] // num_rows, finite.shape[1]
    assert drafted.is_contiguous() and finite.is_contiguous() and drafts.stride(1) == 1
    assert finite.shape[0] == num_rows * block_size and drafts.shape[0] <= num_rows
    _publish_drafts[(num_rows,)](
        drafted, wanted, finite, counts, results, drafts, drafts.shape[0], drafts.stride(0), mask_token_id,
        BLOCK_SIZE=block_size, NUM_DRAFTS=num_drafts, NUM_LAYERS=num_layers,
        WIDTH=triton.next_power_of_2(num_drafts), STEP=_FLAGS_STEP, PDL=pdl,
        num_warps=1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def _enter_pages(entries_ptr, num_entries_ptr, page_table_ptr, table_stride, STEP: tl.constexpr):
    num_entries = tl.load(num_entries_ptr)
    for at in range(tl.program_id(0) * STEP, num_entries, tl.num_programs(0) * STEP):
        nth = at + tl.arange(0, STEP)
        exists = nth < num_entries
        lane = tl.load(entries_ptr + nth * 3, mask=exists, other=0).to(tl.int64)
        index = tl.load(entries_ptr + nth * 3 + 1, mask=exists, other=0)
        page = tl.load(entries_ptr + nth * 3 + 2, mask=exists, other=0)
        tl.store(page_table_ptr + lane * table_stride + index, page, mask=exists)


@triton.jit
def judge(start, context_len, position, num_rows, begins, is_lane, context_len_max):
    """Outcome of rows that want to be context from position on. num_rows >= 0 is far below 2^31."""
    follows = tl.where(begins, position >= 0, (position >= start) & (position <= context_len))
    fits = position <= context_len_max - num_rows
    outcome = tl.where(follows, tl.where(fits, OK, CONTEXT_LIMIT), NEEDS_RESYNC)
    return tl.where(is_lane, outcome, NOBODY)


@triton.jit
def store_places(
    positions_ptr, slots_ptr, nth, num_rows, num_taken, first_position, start, page_row, table_width,
    max_positions, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Position and slot of rows nth of num_rows, which follow each other from first_position on; the
    sentinel's from num_taken on."""
    # Bounds instead of conditions: the interpreter widens a scalar condition that meets a tensor's.
    is_taken = nth < num_taken
    place = tl.where(is_taken, first_position + nth - start, 0)
    in_table = is_taken & (place < table_width * PAGE_SIZE)
    page = tl.load(page_row + place // PAGE_SIZE, mask=in_table, other=0)
    slot = tl.where(in_table, page * PAGE_SIZE + place % PAGE_SIZE, 0)
    position = tl.where(is_taken, tl.minimum(first_position + nth, max_positions - 1), 0)
    tl.store(slots_ptr + nth, slot, mask=nth < num_rows)
    tl.store(positions_ptr + nth, position, mask=nth < num_rows)


@triton.jit
def all_finite(finite_ptr, num_flags, STEP: tl.constexpr):
    """Whether the first num_flags flags are set."""
    lowest = 1
    for at in range(0, num_flags, STEP):
        nth = at + tl.arange(0, STEP)
        flags = tl.load(finite_ptr + nth, mask=nth < num_flags, other=1).to(tl.int32)
        lowest = tl.minimum(lowest, tl.min(flags, 0))
    return lowest > 0


@triton.jit(do_not_specialize=["num_ring_rows"])
def _stage_ring_rows(
    base_ptr, count_ptr, anchor_ptr, row_lanes_ptr, begins_ptr, start_ptr, context_len_ptr, page_table_ptr,
    context_positions_ptr, context_slots_ptr, ids_ptr, positions_ptr, slots_ptr, kv_lens_ptr, pages_ptr,
    counts_ptr, results_ptr, num_ring_rows, sentinel, table_width, table_stride, pages_stride,
    context_len_max, max_positions, vocab_rows, mask_token_id,
    BLOCK_SIZE: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, STEP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    row = tl.program_id(0)
    in_ring = row < num_ring_rows
    # Each word of the ring is read once: its writer may change it meanwhile.
    base = tl.load(base_ptr + row, mask=in_ring, other=0)
    count = tl.load(count_ptr + row, mask=in_ring, other=0)
    anchor = tl.load(anchor_ptr + row, mask=in_ring, other=0)
    lane = tl.load(row_lanes_ptr + row)
    is_lane = in_ring & (lane >= 0) & (lane < sentinel)
    lane = tl.where(is_lane, lane, sentinel)
    begins = tl.load(begins_ptr + row) != 0
    start = tl.load(start_ptr + lane)
    old_len = tl.load(context_len_ptr + lane)
    is_count = (count >= 0) & (count <= BLOCK_SIZE)
    count = tl.where(is_count, count, 0)
    outcome = judge(start, old_len, base, count, begins, is_lane, context_len_max)
    outcome = tl.where(is_lane & (is_count == 0), NEEDS_RESYNC, outcome)
    is_taken = outcome == OK
    start = tl.where(begins, base, start)
    context_len = base + count
    tl.store(start_ptr + lane, start, mask=is_taken)
    tl.store(context_len_ptr + lane, context_len, mask=is_taken)
    tl.store(counts_ptr + row, tl.where(is_taken, count, 0))
    tl.store(results_ptr + row * 2, outcome)
    tl.store(results_ptr + row * 2 + 1, tl.where(is_taken, context_len, old_len))

    nth = tl.arange(0, WIDTH)
    at = row * BLOCK_SIZE
    num_taken = tl.where(is_taken, BLOCK_SIZE, 0)
    page_row = page_table_ptr + lane.to(tl.int64) * table_stride
    store_places(
        context_positions_ptr + at, context_slots_ptr + at, nth, BLOCK_SIZE, num_taken, base, start,
        page_row, table_width, max_positions, PAGE_SIZE,
    )  # fmt: skip
    store_places(
        positions_ptr + at, slots_ptr + at, nth, BLOCK_SIZE, num_taken, context_len, start,
        page_row, table_width, max_positions, PAGE_SIZE,
    )  # fmt: skip
    anchor = tl.where(is_taken, tl.minimum(tl.maximum(anchor, 0), vocab_rows - 1), mask_token_id)
    tl.store(ids_ptr + at + nth, tl.where(nth == 0, anchor, mask_token_id), mask=nth < BLOCK_SIZE)
    kv_len = tl.minimum(context_len - start + BLOCK_SIZE, table_width * PAGE_SIZE)
    kv_len = tl.where(is_taken, kv_len, 0)
    tl.store(kv_lens_ptr + row, kv_len)
    num_pages = tl.cdiv(kv_len, PAGE_SIZE)
    for first in range(0, num_pages, STEP):
        index = first + tl.arange(0, STEP)
        page = tl.load(page_row + index, mask=index < num_pages, other=0)
        tl.store(pages_ptr + row.to(tl.int64) * pages_stride + index, page, mask=index < num_pages)


@triton.jit(do_not_specialize=["num_ring_rows"])
def _publish_drafts(
    drafted_ptr, wanted_ptr, finite_ptr, counts_ptr, results_ptr, drafts_ptr, num_ring_rows, draft_stride,
    mask_token_id,
    BLOCK_SIZE: tl.constexpr, NUM_DRAFTS: tl.constexpr, NUM_LAYERS: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    row = tl.program_id(0)
    num_flags = tl.load(counts_ptr + row) * NUM_LAYERS
    finite = all_finite(finite_ptr + row * BLOCK_SIZE * NUM_LAYERS, num_flags, STEP)
    outcome = tl.load(results_ptr + row * 2)
    outcome = tl.where((outcome == OK) & (finite == 0), NON_FINITE, outcome)
    tl.store(results_ptr + row * 2, outcome)
    is_given = (outcome == OK) & (tl.load(wanted_ptr) != 0)
    num_given = tl.where(is_given, NUM_DRAFTS, 0)
    num_stored = tl.where(row < num_ring_rows, NUM_DRAFTS, 0)
    nth = tl.arange(0, WIDTH)
    drafted = tl.load(drafted_ptr + row * NUM_DRAFTS + nth, mask=nth < num_given, other=mask_token_id)
    tl.store(drafts_ptr + row * draft_stride + nth, drafted, mask=nth < num_stored)
