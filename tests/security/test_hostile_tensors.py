"""A tensor from a peer that means harm: refused by arithmetic alone, with nothing allocated for it."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common import limits
from common.errors import InvalidTensor
from common.pb.tandem.v1 import tensor_pb2
from common.wire import check_tensor, decode_tensor

DIMENSIONS = st.one_of(
    st.integers(0, 8), st.sampled_from([2**31 - 1, 2**31, 2**32, 2**33 + 1, 2**62, 2**63, 2**64 - 1])
)
DTYPES = {1: torch.float32, 2: torch.bfloat16, 3: torch.float16, 4: torch.int32}
# A refusal is an error object, its traceback and a few integers.
ALLOCATED_BYTES_MAX = 64 * 1024


def agrees(message: tensor_pb2.Tensor, dtype: torch.dtype, shape: tuple[int | None, ...]) -> bool:
    """The definition: that type, that shape with no empty dimension, exactly its bytes, within limits."""
    if DTYPES.get(message.dtype) != dtype or len(message.shape) != len(shape):
        return False
    size = dtype.itemsize
    for wanted, given_ in zip(shape, message.shape, strict=True):
        if given_ < 1 or wanted not in (None, given_):
            return False
        size *= given_
    return size == len(message.content) and size <= limits.TENSOR_BYTES_MAX


@settings(max_examples=300, deadline=None)
@given(
    number=st.integers(-1, 9),
    given_shape=st.lists(DIMENSIONS, max_size=6),
    content=st.binary(max_size=64),
    dtype=st.sampled_from(list(DTYPES.values())),
    shape=st.lists(st.one_of(st.none(), st.integers(1, 4)), min_size=1, max_size=3).map(tuple),
)
@example(number=1, given_shape=[2**32, 2**32], content=b"", dtype=torch.float32, shape=(None, None))
@example(number=1, given_shape=[2**62, 4], content=b"", dtype=torch.float32, shape=(None, 4))
@example(number=2, given_shape=[0], content=b"", dtype=torch.bfloat16, shape=(None,))
def test_exactly_what_was_agreed_is_let_through(
    number: int, given_shape: list[int], content: bytes, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    message = tensor_pb2.Tensor(dtype=number, shape=given_shape, content=content)  # type: ignore[arg-type]
    if agrees(message, dtype, shape):
        out = decode_tensor(message, "states", dtype, shape)
        assert list(out.shape) == given_shape
        return
    with pytest.raises(InvalidTensor) as caught:
        decode_tensor(message, "states", dtype, shape)
    assert caught.value.field.startswith("states")


@settings(max_examples=100, deadline=None)
@given(dtype=st.sampled_from(list(DTYPES)), rows=st.integers(1, 3), columns=st.integers(1, 3), data=st.data())
def test_honest_tensors_are_let_through(dtype: int, rows: int, columns: int, data: st.DataObject) -> None:
    size = rows * columns * DTYPES[dtype].itemsize
    content = data.draw(st.binary(min_size=size, max_size=size))
    message = tensor_pb2.Tensor(dtype=dtype, shape=[rows, columns], content=content)  # type: ignore[arg-type]
    assert agrees(message, DTYPES[dtype], (None, columns))
    assert decode_tensor(message, "states", DTYPES[dtype], (None, columns)).shape == (rows, columns)


@pytest.mark.parametrize(
    ("given_shape", "content"),
    [
        ([2**31 - 1, 576], b""),
        ([2**62, 2**62], b""),
        # 8 MiB of zeros that claim to be one row less or more.
        ([3640, 576], bytes(8 * 1024 * 1024)),
        # It was copied into a list before its length was looked at: 8 MiB of message became 30 MiB.
        ([1] * 4_000_000, b""),
    ],
    ids=["one huge dimension", "overflow", "too many bytes", "millions of dimensions"],
)
def test_a_refusal_allocates_nothing_for_what_it_refuses(given_shape: list[int], content: bytes) -> None:
    message = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=given_shape, content=content)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidTensor):
            check_tensor(message, "states", torch.float32, (None, 576))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Reading `content` makes one Python copy of bytes that are already here.
    assert peak < ALLOCATED_BYTES_MAX + len(content)
