"""Before and after a verify, on the device: the rows that go in, and what of the draft is accepted.

Plain decoding is a verify of blocks of one row. A draft block may be anything at all (its writer is another
process, perhaps late or gone): its ids are clamped into the vocabulary and copied, and the copy is what is
compared later, so that a draft that changes meanwhile changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.kernels.gumbel import hash_words
from common.kernels.lanes import (
    DRAFTS_START,
    TABLE_CHUNK,
    LaneState,
    Published,
    StagedRows,
    copy_pages,
    slot_of,
)
from common.kernels.overlap import admit_next, await_previous

# Words of a sequence's results after its tokens: num_accepted, finite, num_clamped.
RESULT_WORDS = 3

_DRAFTS_START = tl.constexpr(DRAFTS_START)


@dataclass(frozen=True)
class BlockBatch:
    """Which lanes decode, int32 on the device.

    lanes `[S]`, the sentinel for padding; draft_rows `[S]`: the row of `drafts` that is the lane's draft, -1
    for none. drafts `[any, K]`: where it lies unless control `[words]` says that drafts came with it, see
    lanes.DRAFTS_START.
    """

    lanes: torch.Tensor
    draft_rows: torch.Tensor
    drafts: torch.Tensor
    control: torch.Tensor


@triton.jit
def _stage_blocks(
    lanes, draft_rows, drafts, control, anchors, positions, page_table,
    temperatures, top_ks, top_ps, reaches, seeds,
    ids_out, positions_out, slots_out, kv_lens_out, tables_out,
    temperatures_out, top_ks_out, top_ps_out, reaches_out, seeds_out, chosen_positions_out, num_clamped,
    sentinel, num_pages_each, positions_max, vocab_rows, draft_stride,
    NUM_ROWS: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    sequence, chunk = tl.program_id(0), tl.program_id(1)
    lane = tl.load(lanes + sequence)
    anchor_position = tl.load(positions + lane)
    kv_len = tl.minimum(anchor_position + NUM_ROWS, positions_max)
    kv_len = tl.where(lane == sentinel, 0, kv_len)
    copy_pages(
        page_table, tables_out, lane, sequence, chunk * CHUNK, kv_len, num_pages_each, PAGE_SIZE, CHUNK
    )
    if chunk == 0:
        tl.store(kv_lens_out + sequence, kv_len)
        row = tl.arange(0, WIDTH)
        exists = row < NUM_ROWS
        place = sequence * NUM_ROWS + row
        fed = tl.zeros([WIDTH], tl.int32)
        if NUM_ROWS > 1:
            draft_row = tl.load(draft_rows + sequence)
            stop = tl.where(draft_row >= 0, NUM_ROWS, 0)
            drafts_start = tl.load(control + _DRAFTS_START)
            sent_stop = tl.where(drafts_start > 0, stop, 0)
            index = draft_row * (NUM_ROWS - 1) + row - 1
            sent = tl.load(control + drafts_start + index, mask=(row > 0) & (row < sent_stop), other=0)
            index = draft_row.to(tl.int64) * draft_stride + row - 1
            given = tl.load(drafts + index, mask=(row > 0) & (row < stop - sent_stop), other=0) + sent
            fed = tl.minimum(tl.maximum(given, 0), vocab_rows - 1)
            tl.store(num_clamped + sequence, tl.sum((fed != given).to(tl.int32), axis=0))
        else:
            tl.store(num_clamped + sequence, 0)
        anchor = tl.minimum(tl.maximum(tl.load(anchors + lane), 0), vocab_rows - 1)
        tl.store(ids_out + place, tl.where(row == 0, anchor, fed), mask=exists)
        position = anchor_position + row
        slot = slot_of(page_table, lane, position, num_pages_each, exists, PAGE_SIZE)
        tl.store(slots_out + place, slot, mask=exists)
        tl.store(positions_out + place, tl.minimum(position, positions_max - 1), mask=exists)
        # The token chosen at a row stands one position after it.
        tl.store(chosen_positions_out + place, position.to(tl.int64) + 1, mask=exists)
        tl.store(temperatures_out + place, tl.load(temperatures + lane), mask=exists)
        tl.store(top_ks_out + place, tl.load(top_ks + lane), mask=exists)
        tl.store(top_ps_out + place, tl.load(top_ps + lane), mask=exists)
        tl.store(reaches_out + place, tl.load(reaches + lane), mask=exists)
        tl.store(seeds_out + place, tl.load(seeds + lane), mask=exists)


def stage_blocks(
    batch: BlockBatch,
    lanes: LaneState,
    staged: StagedRows,
    num_clamped: torch.Tensor,
    *,
    vocab_rows: int,
    page_size: int,
    positions_max: int,
    pdl: bool = False,
) -> None:
    """Rows [anchor, d1 … dK] of each sequence, at its lane's position and the K after it.

    staged: S sequences, S · R rows and choices, R = K + 1; all of it is written. A lane without a draft gets
    id 0 in its place. Written too: num_clamped `[S]` int32, how many drafts were not in [0, vocab_rows) and
    became the nearest id that is. A padding sequence has no keys; its slots lie in the sentinel page. So do
    those of positions that a lane has no page for. Positions and key lengths are cut at positions_max, which
    only a request that is over can reach. Allocates nothing.
    """
    num_sequences, num_rows = batch.lanes.shape[0], staged.ids.shape[0]
    rows_each, num_pages_each = num_rows // num_sequences, lanes.page_table.shape[1]
    assert batch.drafts.shape[1] >= rows_each - 1 and batch.drafts.stride(1) == 1
    p = staged.params
    _stage_blocks[(num_sequences, triton.cdiv(num_pages_each, TABLE_CHUNK))](
        batch.lanes, batch.draft_rows, batch.drafts, batch.control, lanes.anchors, lanes.positions,
        lanes.page_table, lanes.temperature, lanes.top_k, lanes.top_p, lanes.min_p_reach, lanes.seed,
        staged.ids, staged.positions, staged.slots, staged.kv_lens, staged.page_table,
        p.temperature, p.top_k, p.top_p, p.min_p_reach, p.seed, p.position, num_clamped,
        lanes.sentinel, num_pages_each, positions_max, vocab_rows, batch.drafts.stride(0),
        NUM_ROWS=rows_each, WIDTH=triton.next_power_of_2(rows_each), PAGE_SIZE=page_size, CHUNK=TABLE_CHUNK,
        PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def _accept_blocks(
    chosen, finite, ids, lanes, draft_rows, num_clamped, anchors, positions, results,
    ring_base, ring_count, ring_anchor, sentinel, mean_accepted,
    NUM_ROWS: tl.constexpr, WIDTH: tl.constexpr, PUBLISH: tl.constexpr, SYNTHETIC: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    sequence = tl.program_id(0)
    row = tl.arange(0, WIDTH)
    exists = row < NUM_ROWS
    lane = tl.load(lanes + sequence)
    position = tl.load(positions + lane)
    choice = tl.load(chosen + sequence * NUM_ROWS + row, mask=exists, other=0)
    draft_len = tl.where(tl.load(draft_rows + sequence) >= 0, NUM_ROWS - 1, 0)
    # Row r's token was chosen after ids[: r + 1]; draft r + 1 stands iff it is that token.
    verified = row < draft_len
    draft = tl.load(ids + sequence * NUM_ROWS + row + 1, mask=verified, other=-1)
    num_accepted = tl.min(tl.where(verified & (draft == choice), WIDTH, row), axis=0)
    if SYNTHETIC:
        word_0, word_1, word_2, word_3 = hash_words(lane.to(tl.int64), position, position * 0)
        whole = tl.floor(mean_accepted)
        more = (word_0 >> 8).to(tl.float32) / 16777216.0 < mean_accepted - whole
        num_accepted = tl.minimum(whole.to(tl.int32) + more.to(tl.int32), draft_len)
    bonus = tl.sum(tl.where(row == num_accepted, choice, 0), axis=0)
    row_finite = tl.load(finite + sequence * NUM_ROWS + row, mask=row <= num_accepted, other=1)
    result = results + sequence * (NUM_ROWS + 3)
    tl.store(result + row, choice, mask=exists)
    tl.store(result + NUM_ROWS, num_accepted)
    tl.store(result + NUM_ROWS + 1, tl.min(row_finite, axis=0))
    tl.store(result + NUM_ROWS + 2, tl.load(num_clamped + sequence))
    if lane != sentinel:
        tl.store(anchors + lane, bonus)
        tl.store(positions + lane, position + num_accepted + 1)
        if PUBLISH:
            tl.store(ring_base + sequence, position)
            tl.store(ring_count + sequence, num_accepted + 1)
            tl.store(ring_anchor + sequence, bonus)


def accept_blocks(
    chosen: torch.Tensor,
    finite: torch.Tensor,
    batch: BlockBatch,
    lanes: LaneState,
    staged: StagedRows,
    num_clamped: torch.Tensor,
    results: torch.Tensor,
    published: Published | None,
    *,
    synthetic_accepted: float | None = None,
    pdl: bool = False,
) -> None:
    """Drafts are accepted while they equal the token chosen before them; the first after them is the bonus.

    chosen, finite `[S, R]` int32: the target's token at each row, and whether its logits were finite; batch,
    staged, num_clamped as `stage_blocks` was given them. Written: the lanes' anchors (the bonus tokens) and
    positions (num_accepted + 1 further); results `[S, R + RESULT_WORDS]` int32: the tokens, num_accepted,
    1 if rows 0 … num_accepted are finite, num_clamped; published: the position before, num_accepted + 1 and
    the bonus of each ring row. Padding sequences change and publish nothing.
    synthetic_accepted: for measurements, drafts are taken for right so that so many are accepted in the
    mean, by a hash of lane and position. Allocates nothing.
    """
    num_sequences, rows_each = chosen.shape
    assert results.shape == (num_sequences, rows_each + RESULT_WORDS) and results.is_contiguous()
    assert chosen.is_contiguous() and finite.is_contiguous()
    ring = published or Published(lanes.anchors, lanes.anchors, lanes.anchors)
    _accept_blocks[(num_sequences,)](
        chosen, finite, staged.ids, batch.lanes, batch.draft_rows, num_clamped, lanes.anchors,
        lanes.positions, results, ring.base, ring.count, ring.anchor, lanes.sentinel,
        0.0 if synthetic_accepted is None else synthetic_accepted,
        NUM_ROWS=rows_each, WIDTH=triton.next_power_of_2(rows_each), PUBLISH=published is not None,
        SYNTHETIC=synthetic_accepted is not None, PDL=pdl, num_warps=1,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
