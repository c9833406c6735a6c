"""y = x · Wᵀ for few rows of x, where reading W is all that costs: the GEMM of decoding and verifying.

A tile of W's rows is the first operand of the matrix instruction and x's rows the second ("swapped"),
so one instruction serves 1 … 64 rows. A row's bits depend on x's row, W and the split of K, which is
fixed by W's shape: never on how many rows share the launch. Which tile is used is measured, see
`gemm_plans`. Above that many rows the same kernel goes on with several tiles of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.kernels.gemm_plans import GemmPlan, Tile
from common.kernels.overlap import admit_next, await_previous, prefetch_rows


@dataclass(frozen=True)
class GemmWorkspace:
    """Scratch of split GEMMs, shared by all launches of one stream; allocated once, see `allocate`.

    partials: fp32, flat. arrivals: int32, zero before and after each launch.
    """

    partials: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(cls, num_partials: int, num_tiles: int, device: torch.device | str) -> GemmWorkspace:
        return cls(
            torch.empty(num_partials, dtype=torch.float32, device=device),
            torch.zeros(num_tiles, dtype=torch.int32, device=device),
        )


@triton.jit
def tile_product(
    x, w, num_rows, n, k, x_stride, first_row, first_n, first_k, end_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):  # fmt: skip
    """Rows [first_row, +BLOCK_M) of x times rows [first_n, +BLOCK_N) of w over [first_k, end_k).

    fp32, `[BLOCK_N, BLOCK_M]`. Rows of x at num_rows and beyond are not read and give 0; rows of w at n
    and beyond give those of another row.
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    weight_rows = (first_n + tl.arange(0, BLOCK_N)) % n
    steps = first_k + tl.arange(0, BLOCK_K)
    x_places = x + rows[:, None] * x_stride + steps[None, :]
    w_places = w + weight_rows[:, None].to(tl.int64) * k + steps[None, :]
    present = (rows < num_rows)[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first_k, end_k, BLOCK_K):
        if EVEN_K:
            w_tile = tl.load(w_places)
            x_tile = tl.load(x_places, mask=present, other=0.0)
        else:
            inside = (step + tl.arange(0, BLOCK_K) < end_k)[None, :]
            w_tile = tl.load(w_places, mask=inside, other=0.0)
            x_tile = tl.load(x_places, mask=present & inside, other=0.0)
        total = tl.dot(w_tile, tl.trans(x_tile), total, input_precision="ieee")
        x_places += BLOCK_K
        w_places += BLOCK_K
    return total


@triton.jit
def _store_rows(
    y, product, num_rows, n, y_stride, first_row, first_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    product = tl.trans(product)
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = first_n + tl.arange(0, BLOCK_N)
    places = rows[:, None].to(tl.int64) * y_stride + columns[None, :]
    inside = (rows < num_rows)[:, None] & (columns < n)[None, :]
    tl.store(y + places, product.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "prefetch_k"])
def _small_gemm(
    x, w, y, partials, arrivals, num_rows, n, k, k_split, x_stride, y_stride, prefetch_k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    # Row tiles of one weight tile are neighbours in time, so that it is read from memory once.
    row_tiles = tl.cdiv(num_rows, BLOCK_M)
    item = tl.program_id(0) // row_tiles
    first_row = (tl.program_id(0) % row_tiles) * BLOCK_M
    split = item % SPLIT
    first_n = (item // SPLIT) * BLOCK_N
    first_k = split * k_split
    end_k = tl.minimum(first_k + k_split, k)

    if PDL and PIECES > 0:
        ELEMENT_BYTES: tl.constexpr = w.dtype.element_ty.primitive_bitwidth // 8
        prefetch_bytes = prefetch_k * ELEMENT_BYTES
        # Nothing past the weight's end is asked for: that might be nobody's memory.
        if prefetch_k > 0 and first_row == 0 and first_n + BLOCK_N <= n and first_k + prefetch_k <= k:
            place = w + first_n.to(tl.int64) * k + first_k
            prefetch_rows(place, k * ELEMENT_BYTES, prefetch_bytes, BLOCK_N, PIECES)
    await_previous(PDL)
    admit_next(PDL)

    total = tile_product(
        x, w, num_rows, n, k, x_stride, first_row, first_n, first_k, end_k,
        BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
    )  # fmt: skip
    if SPLIT == 1:
        _store_rows(y, total, num_rows, n, y_stride, first_row, first_n, BLOCK_M, BLOCK_N)
    else:
        # The last of a tile's splits to arrive adds them all, in the order of K: which one that is
        # makes no difference to the sum.
        SIZE: tl.constexpr = BLOCK_M * BLOCK_N
        tile = (item // SPLIT) * row_tiles + first_row // BLOCK_M
        inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        places = partials + tile.to(tl.int64) * (SPLIT * SIZE) + inner
        tl.store(places + split * SIZE, total)
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLIT - 1:
            tl.store(arrivals + tile, 0)
            total = tl.load(places, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                total += tl.load(places + other * SIZE, cache_modifier=".cg")
            _store_rows(y, total, num_rows, n, y_stride, first_row, first_n, BLOCK_M, BLOCK_N)


def small_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    workspace: GemmWorkspace,
    plan: GemmPlan,
    *,
    pdl: bool = False,
) -> None:
    """out = x · weightᵀ.

    x `[M, K]` and out `[M, N]`, both with rows that may lie apart and columns that touch; weight `[N, K]`
    contiguous; one type: bf16, fp16 or fp32. Accumulates in fp32.
    Allocates nothing. Reads each weight once: N·K·2 bytes, the floor.
    """
    num_rows, k = x.shape
    n = out.shape[1]
    tile = plan.tile_for(num_rows)
    split = plan.split
    k_split = plan.k_split(k) if split > 1 else k
    assert weight.shape == (n, k) and weight.is_contiguous() and out.shape[0] == num_rows
    assert x.stride(1) == 1 and out.stride(1) == 1
    num_tiles = triton.cdiv(n, tile.block_n) * triton.cdiv(num_rows, tile.block_m)
    if split > 1:
        num_partials = num_tiles * split * tile.block_n * tile.block_m
        assert workspace.partials.numel() >= num_partials, f"{num_partials} partials"
        assert workspace.arrivals.numel() >= num_tiles, f"{num_tiles} tiles"
    pieces, prefetch_k = _prefetch(tile, k, k_split)
    _small_gemm[(num_tiles * split,)](
        x, weight, out, workspace.partials, workspace.arrivals,
        num_rows, n, k, k_split, x.stride(0), out.stride(0), prefetch_k,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        SPLIT=split, EVEN_K=k_split % tile.block_k == 0 and k % tile.block_k == 0,
        PDL=pdl, PIECES=pieces if tile.prefetch_k else 0,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def _prefetch(tile: Tile, k: int, k_split: int) -> tuple[int, int]:
    """Into how many requests a weight row's prefetch is cut, so that each thread makes one; and how many
    of its columns are asked for: requests are of whole 16 bytes, 8 elements of bf16."""
    pieces = max(1, tile.num_warps * 32 // tile.block_n)
    return pieces, min(tile.prefetch_k, k_split) // (8 * pieces) * (8 * pieces) if k % 8 == 0 else 0
