"""A value and its token id in one int64 whose order is: higher value first, then lower id.

So an argmax is an integer maximum: exact, in any order, ties to the lowest id.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Below every packed choice.
NO_CHOICE = tl.constexpr(-(1 << 63))
# What a NaN counts as: below -inf.
LOWEST_KEY = tl.constexpr(-(1 << 31))


@triton.jit
def order_key(value):
    """int32 that orders as fp32 values do; both zeros are one, a NaN is below all."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), LOWEST_KEY)


@triton.jit
def key_value(key):
    """The fp32 value of an `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def pack_choice(key, token_id):
    """int64 of an `order_key` and an id of 0 … 2^31 - 1."""
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - token_id).to(tl.int64)


@triton.jit
def choice_id(packed):
    """int32 id of a packed choice."""
    return 0x7FFFFFFF - (packed & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def choice_key(packed):
    """int32 `order_key` of a packed choice."""
    return (packed >> 32).to(tl.int32)
