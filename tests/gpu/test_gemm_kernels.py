"""The GEMM of few rows and the greedy head, compiled; the checks are those of tests/unit/kernels."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_checks import greedy_head, small_gemm

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(300),  # compiles
]

SEED = 20261205
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_equal_the_reference_and_nothing_beside_them_is_touched(
    dtype: torch.dtype, pdl: bool
) -> None:
    small_gemm.check_equals_reference("cuda", dtype, SEED, pdl=pdl)


@pytest.mark.parametrize("split", [1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_among_others_and_under_any_tile(
    dtype: torch.dtype, split: int
) -> None:
    small_gemm.check_rows_are_independent("cuda", dtype, SEED, split=split, pdl=True)


def test_plans_for_real_shapes_keep_a_rows_bits_for_any_number_of_rows() -> None:
    qwen3_8b = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))
    smollm2 = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
    small_gemm.check_plans_keep_a_rows_bits("cuda", SEED, qwen3_8b + smollm2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_ids_are_those_of_argmax_over_the_logits_also_among_equals(dtype: torch.dtype) -> None:
    greedy_head.check_chooses_as_argmax_over_the_logits("cuda", dtype, SEED, pdl=True)


def test_a_row_of_nan_gives_an_id_of_the_vocabulary_and_is_named() -> None:
    greedy_head.check_a_row_of_nan_gives_a_valid_id_and_says_so("cuda", torch.bfloat16, SEED)
