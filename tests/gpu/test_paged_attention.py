"""The attention kernel compiled, at the shapes of real models."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(300),  # compiles
]
if torch.cuda.is_available():
    from tests.kernel_checks import paged_attention as checks
    from tests.kernel_checks.paged_attention import Shape

    QWEN3_8B = Shape(heads=32, kv_heads=8, head_dim=128, page_size=16)
    SMOLLM2 = Shape(heads=9, kv_heads=3, head_dim=64, page_size=64)
    WIDE_GROUP = Shape(heads=64, kv_heads=8, head_dim=64, page_size=16)

SEED = 20261205
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("causal", "window"), [(True, None), (False, None), (True, 300), (False, 300)]
)
def test_rows_of_a_block_see_what_the_mask_lets_them(causal: bool, window: int | None, split: bool) -> None:
    for rows in (1, 16):
        for shape in (QWEN3_8B, WIDE_GROUP):
            checks.check_uniform_rows(
                "cuda", BF16, SEED, shape, rows, [1000, 0, 128, rows, 129, 2300],
                causal=causal, window=window, split=split,
            )  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_small_models_in_both_element_types(dtype: torch.dtype, split: bool) -> None:
    for rows in (1, 8):
        for causal in (True, False):
            checks.check_uniform_rows(
                "cuda", dtype, SEED, SMOLLM2, rows, [700, 0, 128, rows, 129],
                causal=causal, window=None, split=split,
            )  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
def test_wide_heads_in_fp32(split: bool) -> None:
    checks.check_uniform_rows(
        "cuda", FP32, SEED, QWEN3_8B, 16, [300, 65], causal=True, window=None, split=split
    )


def test_a_long_context() -> None:
    for split in (False, True):
        checks.check_uniform_rows(
            "cuda", BF16, SEED, QWEN3_8B, 16, [40000], causal=True, window=None, split=split
        )


@pytest.mark.parametrize("window", [None, 200])
def test_prompt_chunks_and_single_rows_share_a_ragged_launch(window: int | None) -> None:
    for shape in (QWEN3_8B, SMOLLM2):
        checks.check_ragged_rows(
            "cuda", BF16, SEED, shape, [1500, 1, 16, 256], [1500, 777, 300, 2300], window=window, split=None
        )


@pytest.mark.parametrize(("rows", "window"), [(16, None), (7, 200)])
def test_the_bits_of_a_row_do_not_depend_on_its_company(rows: int, window: int | None) -> None:
    checks.check_bits_of_a_row("cuda", BF16, SEED, QWEN3_8B, rows, [700, 131, 2500], window)
    checks.check_bits_of_a_row("cuda", BF16, SEED, SMOLLM2, rows, [700, 131, 2500], window)


def test_the_bits_of_an_fp32_row_do_not_depend_on_its_company() -> None:
    checks.check_bits_of_a_row("cuda", FP32, SEED, SMOLLM2, 8, [131, 600])


def test_keys_that_are_not_finite_reach_only_rows_that_see_them() -> None:
    checks.check_wild_keys_reach_only_rows_that_see_them("cuda", BF16, SEED, QWEN3_8B)


def test_the_same_launch_gives_the_same_bits_every_time() -> None:
    """A result that changes between runs is a race."""
    checks.check_repetition("cuda", BF16, SEED, QWEN3_8B, 16, [900, 2000], times=200)
