"""Before and after a verify, on the device: the rows that go in, and what of the draft is accepted.

A draft block may be anything at all (its writer is another process, perhaps late or gone): its ids are
clamped into the vocabulary and copied, and the copy is what is compared later, so that a draft that
changes meanwhile changes nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.overlap import admit_next, await_previous


@triton.jit
def _assemble_block(
    anchors, drafts, positions, ids, row_positions, num_clamped, draft_stride, vocab_rows,
    NUM_ROWS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    sequence = tl.program_id(0)
    row = tl.arange(0, WIDTH)
    is_draft = (row > 0) & (row < NUM_ROWS)
    given = tl.load(drafts + sequence * draft_stride + row - 1, mask=is_draft, other=0)
    fed = tl.minimum(tl.maximum(given, 0), vocab_rows - 1)
    tl.store(num_clamped + sequence, tl.sum((is_draft & (fed != given)).to(tl.int32), axis=0))
    anchor = tl.load(anchors + sequence)
    fed = tl.where(row == 0, tl.minimum(tl.maximum(anchor, 0), vocab_rows - 1).to(fed.dtype), fed)
    place = sequence * NUM_ROWS + row
    tl.store(ids + place, fed.to(ids.dtype.element_ty), mask=row < NUM_ROWS)
    position = tl.load(positions + sequence) + row
    tl.store(row_positions + place, position.to(row_positions.dtype.element_ty), mask=row < NUM_ROWS)


def assemble_block(
    anchors: torch.Tensor,
    drafts: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
    row_positions: torch.Tensor,
    num_clamped: torch.Tensor,
    vocab_rows: int,
    *,
    pdl: bool = False,
) -> None:
    """Rows [anchor, d1 … dK] of each sequence, at its position and the K after it.

    anchors, positions `[S]`, drafts `[S, K]` with touching columns: integers. Written: ids, row_positions
    `[S, K + 1]` contiguous, num_clamped `[S]` int32: how many of the drafts were not in [0, vocab_rows) and
    became the nearest id that is. Allocates nothing.
    """
    num_sequences, num_rows = ids.shape
    assert drafts.shape == (num_sequences, num_rows - 1) and drafts.stride(1) == 1
    assert ids.is_contiguous() and row_positions.shape == ids.shape and row_positions.is_contiguous()
    _assemble_block[(num_sequences,)](
        anchors, drafts, positions, ids, row_positions, num_clamped, drafts.stride(0), vocab_rows,
        NUM_ROWS=num_rows, WIDTH=triton.next_power_of_2(num_rows), PDL=pdl,
        num_warps=1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def _accept_drafts(
    chosen, ids, draft_lens, positions, num_accepted, next_anchors, next_positions,
    NUM_ROWS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    sequence = tl.program_id(0)
    row = tl.arange(0, WIDTH)
    draft_len = tl.load(draft_lens + sequence)
    # Row r's token was chosen after ids[: r + 1]; draft r + 1 stands iff it is that token.
    verified = (row < draft_len) & (row + 1 < NUM_ROWS)
    choice = tl.load(chosen + sequence * NUM_ROWS + row, mask=row < NUM_ROWS, other=0)
    draft = tl.load(ids + sequence * NUM_ROWS + row + 1, mask=verified, other=-1)
    first_wrong = tl.min(tl.where(verified & (draft.to(tl.int64) == choice.to(tl.int64)), WIDTH, row), axis=0)
    bonus = tl.sum(tl.where(row == first_wrong, choice, 0).to(tl.int64), axis=0)
    tl.store(num_accepted + sequence, first_wrong)
    # A padding sequence keeps its anchor and its position.
    live = draft_len >= 0
    tl.store(next_anchors + sequence, bonus.to(next_anchors.dtype.element_ty), mask=live)
    position = tl.load(positions + sequence)
    position += tl.where(live, first_wrong + 1, 0).to(position.dtype)
    tl.store(next_positions + sequence, position.to(next_positions.dtype.element_ty))


def accept_drafts(
    chosen: torch.Tensor,
    ids: torch.Tensor,
    draft_lens: torch.Tensor,
    positions: torch.Tensor,
    num_accepted: torch.Tensor,
    next_anchors: torch.Tensor,
    next_positions: torch.Tensor,
    *,
    pdl: bool = False,
) -> None:
    """Drafts are accepted while they equal the token chosen before them; the first after them is the bonus.

    chosen `[S, R]`: the target's token at each row; ids `[S, R]`: the rows as `assemble_block` wrote them;
    both contiguous. draft_lens `[S]`: drafts that may be accepted, 0 … R - 1; -1 marks a padding sequence,
    which accepts none and keeps anchor and position. positions `[S]`: of the anchors. All integers.
    Written, each `[S]`: num_accepted int32, next_anchors (the bonus token), next_positions = positions +
    num_accepted + 1 (may be positions itself). Allocates nothing.
    """
    num_sequences, num_rows = chosen.shape
    assert ids.shape == chosen.shape and chosen.is_contiguous() and ids.is_contiguous()
    _accept_drafts[(num_sequences,)](
        chosen, ids, draft_lens, positions, num_accepted, next_anchors, next_positions,
        NUM_ROWS=num_rows, WIDTH=triton.next_power_of_2(num_rows), PDL=pdl,
        num_warps=1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
