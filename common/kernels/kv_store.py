"""What lies between a K/V projection and attention, in one launch: norm, rotation, store into slots.

Knows rows, positions and slots. A row whose V is not finite is stored as K = NaN, V = 0: every row that
sees that key still comes out NaN, but a row that it is hidden from does not (0 · NaN in the product with V
would spoil all rows of a tile, so a wild draft could change its neighbours' tokens).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.overlap import admit_next, await_previous


def store_qkv(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    q_out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    eps: float = 0.0,
    pdl: bool = False,
) -> None:
    """Split a fused projection: q normed and rotated into q_out, K/V into their slots.

    qkv `[N, (num_heads + 2 · num_kv_heads) · head_dim]`, q heads first, rows contiguous; positions, slots
    `[N]` int32 or int64; cos, sin `[max_positions, head_dim]` fp32, halves repeated (only the first is
    read); q_norm, k_norm `[head_dim]`, both or neither; q_out `[N, num_heads, head_dim]`; caches
    `[num_slots, num_kv_heads, head_dim]`. Padding rows need a position of the table and a slot of page 0.
    Rounds where common.layers does: after the norm, after its weight, after the rotation. pdl: see overlap.

    Bytes: qkv read and written once (12 KiB a row each way at Qwen3-8B's shapes): far below a launch.
    """
    num_rows, num_heads, head_dim = q_out.shape
    num_kv_heads = k_cache.shape[1]
    assert (
        qkv.stride(1) == 1 and q_out.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    )
    assert (q_norm is None) == (k_norm is None), "q and k are normed both or neither"
    _store_qkv_kernel[(num_rows, num_kv_heads)](
        qkv, positions, slots, cos, sin, cos if q_norm is None else q_norm, cos if k_norm is None else k_norm,
        q_out, k_cache, v_cache, eps, qkv.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        GROUP_BLOCK=triton.next_power_of_2(num_heads // num_kv_heads), HAS_NORM=q_norm is not None,
        PDL=pdl, num_warps=1, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


def store_context(
    context_kv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_norms: torch.Tensor,
    kv: torch.Tensor,
    finite: torch.Tensor,
    *,
    eps: float,
    pdl: bool = False,
) -> None:
    """Context K/V of all draft layers from the stacked projection, normed, rotated and stored.

    context_kv `[N, L · 2 · num_kv_heads · head_dim]`, a layer's K before its V; positions, slots, cos, sin
    as in store_qkv; k_norms `[L, head_dim]`; kv `[L, 2, num_slots, num_kv_heads, head_dim]` contiguous;
    finite `[N, L]` uint8 is written for every row: 1 where all that the projection gave is finite.
    Rows beyond an accept length may be stored: their slots are overwritten before they count.

    Bytes: context_kv read and written once, 20 KiB a row and way for 5 layers of Qwen3-8B's shapes.
    """
    num_layers, _, _, num_kv_heads, head_dim = kv.shape
    assert context_kv.stride(1) == 1 and kv.is_contiguous() and k_norms.is_contiguous()
    assert finite.is_contiguous() and finite.dtype == torch.uint8
    _store_context_kernel[(context_kv.shape[0], num_layers)](
        context_kv, positions, slots, cos, sin, k_norms, kv, finite, eps,
        context_kv.stride(0), kv.stride(0), kv.stride(1),
        NUM_LAYERS=num_layers, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim,
        HEADS_BLOCK=triton.next_power_of_2(num_kv_heads), PDL=pdl, num_warps=2,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def _norm_and_rotate(low, high, weight_ptr, cos, sin, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """RMS norm and rotation of heads given as halves `[heads, HEAD_DIM / 2]`; cos, sin `[HEAD_DIM / 2]`."""
    kind = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORM:
        half = tl.arange(0, HEAD_DIM // 2)
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        shrink = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight_low = tl.load(weight_ptr + half).to(tl.float32)[None, :]
        weight_high = tl.load(weight_ptr + HEAD_DIM // 2 + half).to(tl.float32)[None, :]
        low = ((low * shrink).to(kind).to(tl.float32) * weight_low).to(kind).to(tl.float32)
        high = ((high * shrink).to(kind).to(tl.float32) * weight_high).to(kind).to(tl.float32)
    cos, sin = cos[None, :], sin[None, :]
    return (low * cos - high * sin).to(kind), (high * cos + low * sin).to(kind)


@triton.jit
def _not_finite(x):
    """1 where x is NaN or infinite, as int32."""
    wide = x.to(tl.float32)
    return ((wide != wide) | (tl.abs(wide) == float("inf"))).to(tl.int32)


@triton.jit
def _store_qkv_kernel(
    qkv_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, q_out_ptr, k_ptr, v_ptr,
    eps, row_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A K/V head of a row and the query heads that share it."""
    await_previous(PDL)
    admit_next(PDL)
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    half = tl.arange(0, HALF)
    dims = tl.arange(0, HEAD_DIM)
    position = tl.load(positions_ptr + row).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    cos = tl.load(cos_ptr + position * HEAD_DIM + half)
    sin = tl.load(sin_ptr + position * HEAD_DIM + half)
    row_ptr = qkv_ptr + row * row_stride

    nth = tl.arange(0, GROUP_BLOCK)
    in_group = (nth < GROUP)[:, None]
    places = (kv_head * GROUP + nth)[:, None] * HEAD_DIM + half[None, :]
    low = tl.load(row_ptr + places, mask=in_group, other=0.0)
    high = tl.load(row_ptr + places + HALF, mask=in_group, other=0.0)
    low, high = _norm_and_rotate(low, high, q_norm_ptr, cos, sin, eps, HEAD_DIM, HAS_NORM)
    q_ptr = q_out_ptr + row * NUM_HEADS * HEAD_DIM
    tl.store(q_ptr + places, low, mask=in_group)
    tl.store(q_ptr + places + HALF, high, mask=in_group)

    k_row = row_ptr + (NUM_HEADS + kv_head) * HEAD_DIM
    low = tl.load(k_row + half)[None, :]
    high = tl.load(k_row + HALF + half)[None, :]
    v = tl.load(row_ptr + (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + dims)
    low, high = _norm_and_rotate(low, high, k_norm_ptr, cos, sin, eps, HEAD_DIM, HAS_NORM)
    wild = tl.max(_not_finite(v), 0) > 0
    low, high = tl.where(wild, float("nan"), low), tl.where(wild, float("nan"), high)
    v = tl.where(wild, 0.0, v)
    target = (slot * NUM_KV_HEADS + kv_head) * HEAD_DIM
    tl.store(k_ptr + target + half[None, :], low.to(k_ptr.dtype.element_ty))
    tl.store(k_ptr + target + HALF + half[None, :], high.to(k_ptr.dtype.element_ty))
    tl.store(v_ptr + target + dims, v.to(v_ptr.dtype.element_ty))


@triton.jit
def _store_context_kernel(
    both_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, k_norms_ptr, kv_ptr, finite_ptr, eps,
    row_stride, layer_stride, part_stride,
    NUM_LAYERS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All K/V heads of a row in a layer."""
    await_previous(PDL)
    admit_next(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    PART: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    row = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    half = tl.arange(0, HALF)
    dims = tl.arange(0, HEAD_DIM)
    heads = tl.arange(0, HEADS_BLOCK)
    exists = (heads < NUM_KV_HEADS)[:, None]
    position = tl.load(positions_ptr + row).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    cos = tl.load(cos_ptr + position * HEAD_DIM + half)
    sin = tl.load(sin_ptr + position * HEAD_DIM + half)

    k_places = heads[:, None] * HEAD_DIM + half[None, :]
    v_places = heads[:, None] * HEAD_DIM + dims[None, :]
    k_row = both_ptr + row * row_stride + layer * 2 * PART
    low = tl.load(k_row + k_places, mask=exists, other=0.0)
    high = tl.load(k_row + HALF + k_places, mask=exists, other=0.0)
    v = tl.load(k_row + PART + v_places, mask=exists, other=0.0)
    # Looked at before the norm: an infinite K would come out of it as NaN, a huge one as finite.
    wild_k = tl.max(tl.maximum(_not_finite(low), _not_finite(high)), 1)
    wild_v = tl.max(_not_finite(v), 1)
    low, high = _norm_and_rotate(low, high, k_norms_ptr + layer * HEAD_DIM, cos, sin, eps, HEAD_DIM, True)
    spoiled = (wild_v > 0)[:, None]
    low, high = tl.where(spoiled, float("nan"), low), tl.where(spoiled, float("nan"), high)
    v = tl.where(spoiled, 0.0, v)
    target = kv_ptr + layer.to(tl.int64) * layer_stride + slot * PART
    tl.store(target + k_places, low.to(kv_ptr.dtype.element_ty), mask=exists)
    tl.store(target + HALF + k_places, high.to(kv_ptr.dtype.element_ty), mask=exists)
    tl.store(target + part_stride + v_places, v.to(kv_ptr.dtype.element_ty), mask=exists)
    wild = tl.max(tl.maximum(wild_k, wild_v), 0)
    tl.store(finite_ptr + row * NUM_LAYERS + layer, (wild == 0).to(tl.uint8))
