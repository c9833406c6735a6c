"""Arrays by lane on the device, how the host changes them, and what is staged from them for a forward.

A lane is the row that a running request has in these arrays. The last lane is the sentinel: its pages are
the sentinel page, its position is 0; padding uses it, and nothing ever changes it. The host never reads
these arrays and sends only what is new: whole lanes that begin (joins) and entries of page tables.
Rows are staged in verify.py and extend_rows.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.kernels.overlap import admit_next, await_previous
from common.kernels.sampling import RowParams

# Words of the control buffer: numbers of joins and of page entries; where inline drafts begin, 0 for none.
NUM_JOINS, NUM_ENTRIES, DRAFTS_START, HEADER_WORDS = 0, 1, 2, 4
# A join: lane, temperature, top_k, top_p, min_p_reach (fp32 as their bits), low and high half of the seed.
JOIN_WORDS = 7
# A page entry: lane, index in its table, page.
ENTRY_WORDS = 3

_UPDATE_WIDTH = 1024
# Entries of a page table that a program copies at once.
TABLE_CHUNK = 1024


@dataclass(frozen=True)
class LaneState:
    """By lane, `[num_lanes + 1]`, the sentinel last. int32 but for what RowParams says.

    anchors; positions of the anchors, that is the tokens whose K/V is stored; page_table
    `[num_lanes + 1, P]`, 0 where no page is; how its tokens are chosen.
    """

    anchors: torch.Tensor
    positions: torch.Tensor
    page_table: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p_reach: torch.Tensor
    seed: torch.Tensor

    @classmethod
    def allocate(cls, num_lanes: int, num_pages_each: int, device: torch.device | str) -> LaneState:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(num_lanes + 1, *shape, dtype=dtype, device=device)

        return cls(
            anchors=zeros(),
            positions=zeros(),
            page_table=zeros(num_pages_each),
            temperature=zeros(dtype=torch.float32),
            top_k=zeros(),
            top_p=zeros(dtype=torch.float32),
            min_p_reach=zeros(dtype=torch.float32),
            seed=zeros(dtype=torch.int64),
        )

    @property
    def sentinel(self) -> int:
        return self.anchors.shape[0] - 1


@dataclass(frozen=True)
class StagedRows:
    """What a forward over N rows of S sequences takes, made on the device; int32 but for params.

    ids, positions, slots `[N]`; kv_lens `[S]`, page_table `[S, P]` as paged_attention takes them; params: of
    each row at which a token is chosen.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    page_table: torch.Tensor
    params: RowParams

    @classmethod
    def allocate(
        cls, num_rows: int, num_sequences: int, num_chosen: int, num_pages_each: int,
        device: torch.device | str,
    ) -> StagedRows:  # fmt: skip
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        params = RowParams(
            temperature=zeros(num_chosen, dtype=torch.float32),
            top_k=zeros(num_chosen),
            top_p=zeros(num_chosen, dtype=torch.float32),
            min_p_reach=zeros(num_chosen, dtype=torch.float32),
            seed=zeros(num_chosen, dtype=torch.int64),
            position=zeros(num_chosen, dtype=torch.int64),
        )
        return cls(
            zeros(num_rows), zeros(num_rows), zeros(num_rows), zeros(num_sequences),
            zeros(num_sequences, num_pages_each), params,
        )  # fmt: skip

    def first(self, num_rows: int, num_sequences: int, num_chosen: int) -> StagedRows:
        """Views of the first rows, sequences and choices."""
        p = self.params
        return StagedRows(
            self.ids[:num_rows], self.positions[:num_rows], self.slots[:num_rows],
            self.kv_lens[:num_sequences], self.page_table[:num_sequences],
            RowParams(
                p.temperature[:num_chosen], p.top_k[:num_chosen], p.top_p[:num_chosen],
                p.min_p_reach[:num_chosen], p.seed[:num_chosen], p.position[:num_chosen],
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class Published:
    """By ring row, `[S_max]` int32: what the drafter reads of a step, see common/handoff/ring.py."""

    base: torch.Tensor
    count: torch.Tensor
    anchor: torch.Tensor


@triton.jit
def _apply_updates(
    control, anchors, positions, page_table, temperatures, top_ks, top_ps, reaches, seeds,
    num_pages_each, first_join, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program, because a lane's old entries must be gone before new ones come."""
    await_previous(PDL)
    admit_next(PDL)
    num_joins, num_entries = tl.load(control), tl.load(control + 1)
    nth = tl.arange(0, WIDTH)
    for join in range(num_joins):
        words = control + first_join + join * 7
        lane = tl.load(words)
        for first in range(0, num_pages_each, WIDTH):
            index = first + nth
            tl.store(page_table + lane * num_pages_each + index, 0, mask=index < num_pages_each)
        tl.store(anchors + lane, 0)
        tl.store(positions + lane, 0)
        tl.store(temperatures + lane, tl.load(words + 1).to(tl.float32, bitcast=True))
        tl.store(top_ks + lane, tl.load(words + 2))
        tl.store(top_ps + lane, tl.load(words + 3).to(tl.float32, bitcast=True))
        tl.store(reaches + lane, tl.load(words + 4).to(tl.float32, bitcast=True))
        low, high = tl.load(words + 5).to(tl.int64), tl.load(words + 6).to(tl.int64)
        tl.store(seeds + lane, (high << 32) | (low & 0xFFFFFFFF))
    tl.debug_barrier()
    for first in range(0, num_entries, WIDTH):
        entry = control + first_join + num_joins * 7 + (first + nth) * 3
        given = first + nth < num_entries
        lane = tl.load(entry, mask=given, other=0)
        index = tl.load(entry + 1, mask=given, other=0)
        page = tl.load(entry + 2, mask=given, other=0)
        tl.store(page_table + lane * num_pages_each + index, page, mask=given)
    tl.debug_barrier()
    tl.store(control, 0)
    tl.store(control + 1, 0)


def apply_updates(control: torch.Tensor, first_join: int, lanes: LaneState, *, pdl: bool = False) -> None:
    """Begin the lanes that join and enter new pages, each once.

    control int32: the header, at first_join the joins, right after them the page entries (see the constants
    above). A joining lane gets position and anchor 0 and a page table of the sentinel page. The two numbers
    are 0 afterwards: the second graph of a launch does nothing here. Lanes and indices must be in range.
    """
    _apply_updates[(1,)](
        control, lanes.anchors, lanes.positions, lanes.page_table, lanes.temperature, lanes.top_k,
        lanes.top_p, lanes.min_p_reach, lanes.seed, lanes.page_table.shape[1], first_join,
        WIDTH=_UPDATE_WIDTH, PDL=pdl, num_warps=8, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def slot_of(page_table, lane, position, num_pages_each, mask, PAGE_SIZE: tl.constexpr):
    """Slots of a lane's positions; the sentinel page's where the table ends or mask is false."""
    index = position // PAGE_SIZE
    page = tl.load(page_table + lane * num_pages_each + index, mask=mask & (index < num_pages_each), other=0)
    return page * PAGE_SIZE + position % PAGE_SIZE


@triton.jit
def copy_pages(page_table, out, lane, sequence, first, kv_len, num_pages_each,
               PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Entries [first, first + WIDTH) of a lane's table, as far as kv_len keys need them."""
    index = first + tl.arange(0, WIDTH)
    needed = (index * PAGE_SIZE < kv_len) & (index < num_pages_each)
    pages = tl.load(page_table + lane * num_pages_each + index, mask=needed, other=0)
    tl.store(out + sequence * num_pages_each + index, pages, mask=needed)
