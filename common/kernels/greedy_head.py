"""The token of the highest logit for each row, without the logits: lm_head's GEMM keeps a tile's best only.

Gives exactly the ids that argmax over `small_gemm`'s logits would: the products are summed in the same
order and rounded to the same type before they are compared, ties go to the lowest id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.choice import (
    LOWEST_KEY,
    NO_CHOICE,
    choice_id,
    choice_key,
    key_value,
    order_key,
    pack_choice,
)
from common.kernels.gemm_plans import GemmPlan
from common.kernels.overlap import admit_next, await_previous
from common.kernels.small_gemm import tile_product


@triton.jit(do_not_specialize=["num_rows"])
def _best_of_tiles(
    x, w, best, num_rows, n, k, x_stride, num_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    tile = tl.program_id(0) // row_tiles
    first_row = (tl.program_id(0) % row_tiles) * BLOCK_M
    await_previous(PDL)
    admit_next(PDL)
    logits = tile_product(
        x, w, num_rows, n, k, x_stride, first_row, tile * BLOCK_N, 0, k,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
    )  # fmt: skip
    # Key and id apart: packed in int64 they would take twice the registers.
    keys = order_key(logits.to(x.dtype.element_ty).to(tl.float32))
    ids = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    keys = tl.where((ids < n)[:, None], keys, LOWEST_KEY)
    highest = tl.max(keys, axis=0)
    first = tl.min(tl.where((keys == highest[None, :]) & (ids < n)[:, None], ids[:, None], n), axis=0)
    winner = pack_choice(highest, first)
    rows = first_row + tl.arange(0, BLOCK_M)
    tl.store(best + rows * num_tiles + tile, winner, mask=rows < num_rows)


@triton.jit
def _best_of_rows(best, chosen, finite, num_tiles, WIDTH: tl.constexpr, PDL: tl.constexpr):
    await_previous(PDL)
    admit_next(PDL)
    row = tl.program_id(0)
    tile = tl.arange(0, WIDTH)
    winner = tl.max(tl.load(best + row * num_tiles + tile, mask=tile < num_tiles, other=NO_CHOICE), axis=0)
    value = key_value(choice_key(winner))
    tl.store(chosen + row, choice_id(winner).to(chosen.dtype.element_ty))
    tl.store(finite + row, (tl.abs(value) < float("inf")).to(finite.dtype.element_ty))


def greedy_head(
    x: torch.Tensor,
    lm_head: torch.Tensor,
    best: torch.Tensor,
    chosen: torch.Tensor,
    finite: torch.Tensor,
    plan: GemmPlan,
    *,
    pdl: bool = False,
) -> None:
    """argmax of x · lm_headᵀ: x `[M, H]` normed rows, lm_head `[V, H]` contiguous, of one type.

    Written: chosen `[M]` integers in [0, V), whatever x holds; finite `[M]` integers, 0 where the best logit
    is no finite number. best: int64 scratch of `greedy_head_scratch` elements. Allocates nothing. Reads
    lm_head once; writes 8 bytes a row and tile instead of 2 a logit.
    """
    num_rows, k = x.shape
    n = lm_head.shape[0]
    tile = plan.tile_for(num_rows)
    assert plan.split == 1 and lm_head.shape[1] == k and lm_head.is_contiguous() and x.stride(1) == 1
    num_tiles = triton.cdiv(n, tile.block_n)
    assert best.numel() >= num_rows * num_tiles
    options = {"launch_pdl": True} if pdl else {}
    _best_of_tiles[(num_tiles * triton.cdiv(num_rows, tile.block_m),)](
        x, lm_head, best, num_rows, n, k, x.stride(0), num_tiles,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        EVEN_K=k % tile.block_k == 0, PDL=pdl,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **options,
    )  # fmt: skip
    _best_of_rows[(num_rows,)](
        best, chosen, finite, num_tiles, WIDTH=triton.next_power_of_2(num_tiles), PDL=pdl,
        num_warps=4, **options,
    )  # fmt: skip


def greedy_head_scratch(num_rows_max: int, vocab_rows: int, plan: GemmPlan) -> int:
    """Elements of `best` that any number of rows up to num_rows_max needs."""
    return num_rows_max * triton.cdiv(vocab_rows, min(tile.block_n for tile in plan.tiles))
