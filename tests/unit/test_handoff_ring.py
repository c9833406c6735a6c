"""The ring's layout: what both processes must compute alike."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import limits
from common.errors import InvalidRequest
from common.handoff.ring import ALIGNMENT_BYTES, Ring, RingShape

SHAPE = RingShape(
    num_rows=3, block_size=4, num_draft_tokens=3, captured_width=10, dtype=torch.bfloat16, extend_rows_max=7
)
NAMES = ("base", "count", "anchor", "drafts", "verify_captured", "extend_captured")


def test_every_tensor_has_the_shape_and_type_of_the_contract() -> None:
    ring = Ring.local(SHAPE, "cpu")
    assert ring.verify_captured.shape == (12, 10) and ring.verify_captured.dtype is torch.bfloat16
    assert ring.extend_captured.shape == (7, 10) and ring.extend_captured.dtype is torch.bfloat16
    for tensor in (ring.base, ring.count, ring.anchor):
        assert tensor.shape == (3,) and tensor.dtype is torch.int32
    assert ring.drafts.shape == (3, 3) and ring.drafts.dtype is torch.int32


def test_writing_one_tensor_changes_no_other() -> None:
    ring = Ring.local(SHAPE, "cpu")
    for written in NAMES:
        ring.buffer.zero_()
        getattr(ring, written).fill_(1)
        for other in NAMES:
            assert bool(getattr(ring, other).any()) == (other == written)


def test_two_rings_over_the_same_bytes_are_one() -> None:
    buffer = torch.zeros(SHAPE.num_bytes + 5, dtype=torch.uint8)
    ours, theirs = Ring.over(SHAPE, buffer), Ring.over(dataclasses.replace(SHAPE), buffer)
    ours.verify_captured.copy_(torch.arange(120.0).view(12, 10))
    theirs.drafts.fill_(7)
    assert torch.equal(theirs.verify_captured, ours.verify_captured)
    assert ours.drafts.tolist() == [[7] * 3] * 3


@given(
    num_rows=st.integers(1, 256), block_size=st.integers(2, 64), captured_width=st.integers(1, 20480),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    extend_rows_max=st.integers(1, 8192),
)  # fmt: skip
def test_regions_are_aligned_apart_and_inside(
    num_rows: int, block_size: int, captured_width: int, dtype: torch.dtype, extend_rows_max: int
) -> None:
    shape = RingShape(num_rows, block_size, block_size - 1, captured_width, dtype, extend_rows_max)
    regions = sorted(shape.regions.values())
    assert all(region.offset % ALIGNMENT_BYTES == 0 for region in regions)
    assert all(a.offset + a.num_bytes <= b.offset for a, b in pairwise(regions))
    assert regions[-1].offset + regions[-1].num_bytes <= shape.num_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_rows", 0),
        ("num_rows", limits.REQUESTS_RUNNING_MAX + 1),
        ("block_size", 1),
        ("block_size", limits.BLOCK_SIZE_MAX + 1),
        ("num_draft_tokens", 0),
        ("num_draft_tokens", 4),
        ("captured_width", 0),
        ("captured_width", limits.CAPTURED_WIDTH_MAX + 1),
        ("extend_rows_max", 0),
        ("extend_rows_max", limits.EXTEND_ROWS_MAX + 1),
        ("dtype", torch.int32),
    ],
)
def test_a_number_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as error:
        dataclasses.replace(SHAPE, **{field: value})
    assert error.value.field == field


def test_numbers_that_are_fine_alone_may_be_too_many_bytes_together() -> None:
    with pytest.raises(InvalidRequest, match="ring bytes"):
        dataclasses.replace(SHAPE, captured_width=limits.CAPTURED_WIDTH_MAX, extend_rows_max=1 << 16)


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="ring bytes"):
        Ring.over(SHAPE, torch.zeros(SHAPE.num_bytes - 1, dtype=torch.uint8))
