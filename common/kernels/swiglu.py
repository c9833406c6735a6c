"""The gate of a feed-forward block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from common.kernels.overlap import admit_next, await_previous

_BLOCK = 1024


def swiglu(gate_up: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
    """out = silu(gate) · up. gate_up `[N, 2·I]`, gate first, out `[N, I]`, rows contiguous.

    The gate is rounded to gate_up's type before the product, as torch's silu does. pdl: see overlap.
    Bytes: gate_up read, out written; a launch is longer than that below 200 rows of 12288.
    """
    num_rows, inner = out.shape
    assert gate_up.shape == (num_rows, 2 * inner) and gate_up.stride(1) == 1 and out.stride(1) == 1
    _swiglu_kernel[(triton.cdiv(inner, _BLOCK), num_rows)](
        gate_up, out, inner, gate_up.stride(0), out.stride(0), BLOCK=_BLOCK, PDL=pdl, num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip


@triton.jit
def _swiglu_kernel(
    gate_up_ptr, out_ptr, inner, gate_up_stride, out_stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    row = tl.program_id(1).to(tl.int64)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = places < inner
    gate = tl.load(gate_up_ptr + row * gate_up_stride + places, mask=exists, other=0.0)
    up = tl.load(gate_up_ptr + row * gate_up_stride + inner + places, mask=exists, other=0.0)
    wide = gate.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    result = opened * up.to(tl.float32)
    tl.store(out_ptr + row * out_stride + places, result.to(out_ptr.dtype.element_ty), mask=exists)
