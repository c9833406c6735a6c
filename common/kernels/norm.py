"""RMS norm of the residual stream, with the layer's output added on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.overlap import admit_next, await_previous


def add_rms_norm(
    x: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    eps: float,
    captured: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """x += added; out = x / sqrt(mean(x²) + eps) · weight, statistics in fp32.

    x, added, out `[N, H]` with contiguous rows, weight `[H]`; x is changed in place unless added is None.
    captured `[N, H]` with any row stride gets a copy of the sum: the residual stream after the layer before,
    which the drafter asks for, without a launch of its own. Rounds where common.layers.norm does.
    pdl: see overlap.

    Bytes: x and added read, x and out written; a launch is longer than that below 500 rows of 4096.
    """
    num_rows, hidden = x.shape
    assert x.stride(1) == 1 and out.stride(1) == 1 and (added is None or added.stride(1) == 1)
    assert captured is None or captured.stride(1) == 1
    block = triton.next_power_of_2(hidden)
    _add_rms_norm_kernel[(num_rows,)](
        x, x if added is None else added, weight, out, x if captured is None else captured, eps, hidden,
        x.stride(0), 0 if added is None else added.stride(0), out.stride(0),
        0 if captured is None else captured.stride(0),
        BLOCK=block, HAS_ADDED=added is not None, HAS_CAPTURED=captured is not None, PDL=pdl,
        num_warps=min(16, max(1, block // 512)), **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, added_ptr, weight_ptr, out_ptr, captured_ptr, eps, hidden,
    x_stride, added_stride, out_stride, captured_stride,
    BLOCK: tl.constexpr, HAS_ADDED: tl.constexpr, HAS_CAPTURED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    exists = places < hidden
    weight = tl.load(weight_ptr + places, mask=exists, other=0.0).to(tl.float32)
    await_previous(PDL)
    admit_next(PDL)
    x = tl.load(x_ptr + row * x_stride + places, mask=exists, other=0.0)
    kind = x.dtype
    if HAS_ADDED:
        added = tl.load(added_ptr + row * added_stride + places, mask=exists, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(kind)
        tl.store(x_ptr + row * x_stride + places, x, mask=exists)
    if HAS_CAPTURED:
        tl.store(captured_ptr + row * captured_stride + places, x, mask=exists)
    wide = x.to(tl.float32)
    shrink = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    normed = (wide * shrink).to(kind).to(tl.float32) * weight
    tl.store(out_ptr + row * out_stride + places, normed.to(out_ptr.dtype.element_ty), mask=exists)
