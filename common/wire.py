"""Tensors and contracts between protobuf and Python. Checks before it allocates.

Knows the messages and torch; knows nothing of streams, sessions or services.
"""

from __future__ import annotations

import torch

from common import limits
from common.contract import DraftContract, TargetContract
from common.errors import InvalidRequest, InvalidTensor
from common.pb.tandem.v1 import drafter_pb2, tensor_pb2

_TORCH_DTYPES = {
    tensor_pb2.DTYPE_FLOAT32: torch.float32,
    tensor_pb2.DTYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.DTYPE_FLOAT16: torch.float16,
    tensor_pb2.DTYPE_INT32: torch.int32,
}
_PROTO_DTYPES = {dtype: number for number, dtype in _TORCH_DTYPES.items()}
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _PROTO_DTYPES}
_BY_NAME = {name: dtype for dtype, name in _NAMES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return _NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """torch.float32 for `float32`; KeyError for a type that never crosses the wire."""
    return _BY_NAME[name]


def dtype_number(dtype: torch.dtype) -> tensor_pb2.Dtype:
    """DTYPE_FLOAT32 for torch.float32."""
    return _PROTO_DTYPES[dtype]


def dtype_from_number(field: str, number: tensor_pb2.Dtype) -> torch.dtype:
    """torch.float32 for DTYPE_FLOAT32. InvalidRequest naming the field for a number that is no type."""
    dtype = _TORCH_DTYPES.get(number)
    if dtype is None:
        raise InvalidRequest(field, limit="a known element type", given=number)
    return dtype


def encode_tensor(tensor: torch.Tensor) -> tensor_pb2.Tensor:
    """Copy a CPU tensor into a message. Fresh bytes: the tensor may change afterwards."""
    content = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    assert len(content) <= limits.TENSOR_BYTES_MAX, "the sender splits tensors before it encodes them"
    assert tensor.dim() <= limits.TENSOR_RANK_MAX
    return tensor_pb2.Tensor(dtype=_PROTO_DTYPES[tensor.dtype], shape=list(tensor.shape), content=content)


def check_tensor(
    message: tensor_pb2.Tensor, field: str, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> None:
    """Raise InvalidTensor unless the message holds exactly such a tensor. Allocates nothing.

    `shape` has None where any size from 1 up is right. All arithmetic is in Python integers, which
    do not overflow.
    """
    if _TORCH_DTYPES.get(message.dtype) is not dtype:
        raise InvalidTensor(f"{field}.dtype", limit=dtype_name(dtype), given=message.dtype)
    # A message has room for a shape of millions of dimensions: counted, not copied.
    if len(message.shape) != len(shape):
        raise InvalidTensor(f"{field}.shape", limit=f"{len(shape)} dimensions", given=len(message.shape))
    size = dtype.itemsize
    for axis, (expected, actual) in enumerate(zip(shape, message.shape, strict=True)):
        if not 1 <= actual <= limits.TENSOR_DIM_MAX or expected not in (None, actual):
            limit = expected if expected is not None else f"1 to {limits.TENSOR_DIM_MAX}"
            raise InvalidTensor(f"{field}.shape[{axis}]", limit=limit, given=actual)
        size *= actual
    if size > limits.TENSOR_BYTES_MAX:
        raise InvalidTensor(field, limit=f"at most {limits.TENSOR_BYTES_MAX} bytes", given=size)
    if size != len(message.content):
        raise InvalidTensor(f"{field}.content", limit=f"{size} bytes", given=len(message.content))


def decode_tensor(
    message: tensor_pb2.Tensor, field: str, dtype: torch.dtype, shape: tuple[int | None, ...]
) -> torch.Tensor:
    """Check as `check_tensor`, then copy into a fresh CPU tensor."""
    check_tensor(message, field, dtype, shape)
    return torch.frombuffer(bytearray(message.content), dtype=dtype).view(*message.shape)


def encode_target_contract(contract: TargetContract) -> drafter_pb2.TargetContract:
    return drafter_pb2.TargetContract(
        hidden_size=contract.hidden_size,
        num_layers=contract.num_layers,
        vocab_rows=contract.vocab_rows,
        dtype=_PROTO_DTYPES[_BY_NAME[contract.dtype]],
        weights_fingerprint=contract.weights_fingerprint,
    )


def decode_target_contract(message: drafter_pb2.TargetContract) -> TargetContract:
    """An unknown element type becomes its number as text, so that comparing names it."""
    dtype = _TORCH_DTYPES.get(message.dtype)
    return TargetContract(
        hidden_size=message.hidden_size,
        num_layers=message.num_layers,
        vocab_rows=message.vocab_rows,
        dtype=dtype_name(dtype) if dtype else f"dtype {message.dtype}",
        weights_fingerprint=message.weights_fingerprint,
    )


def encode_draft_contract(contract: DraftContract) -> drafter_pb2.DraftContract:
    return drafter_pb2.DraftContract(
        captured_layer_ids=contract.captured_layer_ids,
        block_size=contract.block_size,
        num_draft_tokens=contract.num_draft_tokens,
        mask_token_id=contract.mask_token_id,
        context_len_max=contract.context_len_max,
        weights_fingerprint=contract.weights_fingerprint,
    )


def decode_draft_contract(message: drafter_pb2.DraftContract) -> DraftContract:
    return DraftContract(
        captured_layer_ids=tuple(message.captured_layer_ids),
        block_size=message.block_size,
        num_draft_tokens=message.num_draft_tokens,
        mask_token_id=message.mask_token_id,
        context_len_max=message.context_len_max,
        weights_fingerprint=message.weights_fingerprint,
    )
