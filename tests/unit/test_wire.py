"""Tensors and contracts across protobuf: what goes in comes out, and the two sides' limits agree."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from common import limits
from common.contract import DraftContract, TargetContract, mismatches
from common.errors import InvalidTensor
from common.pb.tandem.v1 import tensor_pb2
from common.wire import (
    check_tensor,
    decode_draft_contract,
    decode_target_contract,
    decode_tensor,
    dtype_from_name,
    dtype_name,
    encode_draft_contract,
    encode_target_contract,
    encode_tensor,
)

SEED = 20261219
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32]


def some_tensor(rng: random.Random, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return (torch.randn(shape, generator=generator) * 1000).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_comes_out_bit_for_bit_as_it_went_in(dtype: torch.dtype) -> None:
    rng = random.Random(SEED)
    for _ in range(20):
        tensor = some_tensor(rng, dtype, (rng.randint(1, 9), rng.randint(1, 9)))
        tensor = rng.choice([tensor, tensor.T, tensor[::2]])
        message = tensor_pb2.Tensor.FromString(encode_tensor(tensor).SerializeToString())
        out = decode_tensor(message, "t", dtype, (None, tensor.shape[1]))
        assert out.dtype == dtype
        assert torch.equal(out, tensor)


def test_special_numbers_survive() -> None:
    tensor = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-45])
    out = decode_tensor(encode_tensor(tensor), "t", torch.float32, (5,))
    assert out.view(torch.int32).tolist() == tensor.view(torch.int32).tolist()


def test_the_message_holds_little_endian_rows() -> None:
    message = encode_tensor(torch.tensor([[1, 256], [-1, 0]], dtype=torch.int32))
    assert message.content == b"\1\0\0\0" b"\0\1\0\0" b"\xff\xff\xff\xff" b"\0\0\0\0"
    assert list(message.shape) == [2, 2]


def test_neither_side_sees_what_the_other_changes_later() -> None:
    tensor = torch.ones(3)
    message = encode_tensor(tensor)
    tensor.zero_()
    out = decode_tensor(message, "t", torch.float32, (3,))
    out += 1
    assert decode_tensor(message, "t", torch.float32, (3,)).tolist() == [1, 1, 1]


def test_the_largest_tensor_that_may_be_sent_may_be_received_and_one_row_more_may_not() -> None:
    rows = limits.TENSOR_BYTES_MAX // 4 // 64
    message = encode_tensor(torch.zeros(rows, 64))
    check_tensor(message, "t", torch.float32, (None, 64))
    message.shape[0] += 1
    message.content += bytes(4 * 64)
    with pytest.raises(InvalidTensor, match=f"at most {limits.TENSOR_BYTES_MAX} bytes"):
        check_tensor(message, "t", torch.float32, (None, 64))
    with pytest.raises(AssertionError):
        encode_tensor(torch.zeros(rows + 1, 64))


def test_types_have_names_and_others_are_unknown() -> None:
    assert [dtype_from_name(dtype_name(dtype)) for dtype in DTYPES] == DTYPES
    with pytest.raises(KeyError):
        dtype_from_name("int8")


def test_contracts_come_out_as_they_went_in() -> None:
    target = TargetContract(576, 30, 49152, "bfloat16", "0123456789abcdef")
    draft = DraftContract((27, 1, 7), 8, 7, 16, 2048, "fedcba")
    assert decode_target_contract(encode_target_contract(target)) == target
    assert decode_draft_contract(encode_draft_contract(draft)) == draft


def test_an_unknown_element_type_is_a_mismatch_that_is_named_not_an_exception() -> None:
    ours = TargetContract(576, 30, 49152, "float32", "x")
    message = encode_target_contract(ours)
    message.dtype = 77  # type: ignore[assignment]
    assert [str(m) for m in mismatches(ours, decode_target_contract(message))] == [
        "dtype: ours float32, theirs dtype 77"
    ]
    assert mismatches(ours, replace(ours)) == []
