"""Kernels around the matrix products of a layer, compiled, at the shapes of real models."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(300),  # compiles
]
if torch.cuda.is_available():
    from tests.kernel_checks import kv_store, layer_chain, norm, swiglu

SEED = 20261206
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_a_fused_projection_is_split_normed_rotated_and_stored(dtype: torch.dtype, normed: bool) -> None:
    for heads in ((32, 8, 128), (9, 3, 64)):
        kv_store.check_qkv_is_normed_rotated_and_stored("cuda", dtype, SEED, heads, normed=normed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite_move_into_the_key(dtype: torch.dtype) -> None:
    kv_store.check_values_that_are_not_finite_move_into_the_key("cuda", dtype, SEED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_context_of_all_draft_layers_is_stored_by_one_launch(dtype: torch.dtype) -> None:
    kv_store.check_context_of_all_layers_is_stored_by_one_launch("cuda", dtype, SEED, 5, 8, 128)
    kv_store.check_context_of_all_layers_is_stored_by_one_launch("cuda", dtype, SEED, 3, 3, 64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [4096, 576, 5120])
def test_the_residual_is_added_normed_and_captured(dtype: torch.dtype, hidden: int) -> None:
    norm.check_norm_with_residual_and_capture("cuda", dtype, SEED, 16, hidden)
    norm.check_norm_without_residual("cuda", dtype, SEED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_opens_for_the_other_half(dtype: torch.dtype) -> None:
    for inner in (12288, 1536, 1000):
        swiglu.check_swiglu("cuda", dtype, SEED, 16, inner)


def test_overlapped_launches_give_the_bits_of_launches_in_turn() -> None:
    """Each kernel of the chain reads what the one before wrote; recorded as a graph, as they are served."""
    in_turn, overlapped = (layer_chain.run("cuda", torch.bfloat16, SEED, pdl=pdl) for pdl in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(in_turn, overlapped, strict=True))
