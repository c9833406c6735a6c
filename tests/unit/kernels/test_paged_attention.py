"""The attention kernel in Triton's interpreter, small shapes; tests/gpu has the real ones."""

from __future__ import annotations

import pytest
import torch

from common.kernels.kv_chunks import num_chunks
from tests.kernel_checks import paged_attention as checks
from tests.kernel_checks.paged_attention import Shape

SEED = 20261201
GQA = Shape(heads=6, kv_heads=2, head_dim=16, page_size=16)  # three query heads a group: no power of two
DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize(
    ("rows", "causal", "window", "split"),
    [
        (1, True, None, False), (8, True, None, False), (8, False, None, True), (8, True, 50, True),
        (8, False, 50, False), (1, True, 1, True),
    ],
)  # fmt: skip
def test_rows_of_a_block_see_what_the_mask_lets_them(
    rows: int, causal: bool, window: int | None, split: bool
) -> None:
    # At and after a chunk's end; a block alone; padding. fp32 has tiles of its own.
    checks.check_uniform_rows(
        "cpu", torch.float16, SEED, GQA, rows, [128, 0, rows, 129], causal=causal, window=window, split=split
    )
    checks.check_uniform_rows(
        "cpu", torch.float32, SEED, GQA, rows, [131], causal=causal, window=window, split=split
    )


@pytest.mark.parametrize("split", [False, True])
def test_chunks_that_double_cover_every_key_once(split: bool) -> None:
    shape = Shape(heads=1, kv_heads=1, head_dim=16, page_size=64)
    for kv_len in (1024, 1025, 1300):
        checks.check_uniform_rows(
            "cpu", torch.float16, SEED, shape, 2, [kv_len], causal=True, window=None, split=split
        )


def test_more_rows_than_a_tile_holds_take_several() -> None:
    shape = Shape(heads=8, kv_heads=1, head_dim=16, page_size=8)
    for split in (False, True):
        checks.check_uniform_rows(
            "cpu", torch.float16, SEED, shape, 11, [140, 40], causal=True, window=None, split=split
        )


@pytest.mark.parametrize(("window", "split"), [(None, False), (40, True)])
def test_prompt_chunks_and_single_rows_share_a_ragged_launch(window: int | None, split: bool) -> None:
    checks.check_ragged_rows(
        "cpu", torch.float16, SEED, GQA, [70, 1, 9], [70, 130, 200], window=window, split=split
    )


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_of_a_row_do_not_depend_on_its_company(dtype: torch.dtype) -> None:
    shape = Shape(heads=3, kv_heads=1, head_dim=16, page_size=16)
    checks.check_bits_of_a_row("cpu", dtype, SEED, shape, 5, [131, 260])
    checks.check_bits_of_a_row("cpu", dtype, SEED, shape, 3, [200], window=70)


def test_keys_that_are_not_finite_reach_only_rows_that_see_them() -> None:
    for dtype in DTYPES:
        checks.check_wild_keys_reach_only_rows_that_see_them("cpu", dtype, SEED, GQA)


def test_the_number_of_chunks_grows_with_the_logarithm_of_the_length() -> None:
    edges = [0]
    for level in range(8):
        edges += [edges[-1] + (128 << level) * (i + 1) for i in range(8)]
    for num_keys in (*range(1, 9000), 40960, 65536):
        assert num_chunks(num_keys, 128) == sum(edge < num_keys for edge in edges)
    assert num_chunks(40960, 128) < 50
