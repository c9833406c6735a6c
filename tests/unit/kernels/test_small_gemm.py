"""The GEMM of few rows, in Triton's interpreter; tests/gpu runs the same checks compiled."""

from __future__ import annotations

import pytest
import torch

from common.kernels.gemm_plans import GemmPlan, Tile, plan_for
from tests.kernel_checks import small_gemm as checks

SEED = 20261201


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_products_equal_the_reference_and_nothing_beside_them_is_touched(dtype: torch.dtype) -> None:
    checks.check_equals_reference("cpu", dtype, SEED)


@pytest.mark.parametrize("split", [1, 3])
def test_a_row_has_the_same_bits_alone_and_among_others(split: int) -> None:
    checks.check_rows_are_independent("cpu", torch.float32, SEED, split=split)


def test_a_plan_takes_the_smallest_tile_that_holds_all_rows_and_the_largest_beyond() -> None:
    small, large = Tile(64, 64, 16, 3), Tile(64, 64, 64, 3)
    plan = GemmPlan(1, (small, large))
    assert [plan.tile_for(n) for n in (1, 16, 17, 64, 65)] == [small, small, large, large, large]


def test_parts_of_k_cover_it_and_none_is_empty() -> None:
    for k, split in ((4096, 4), (12288, 12), (576, 2), (1536, 8), (400, 3)):
        length = GemmPlan(split, ()).k_split(k)
        assert (split - 1) * length < k <= split * length


def test_scratch_of_a_plan_is_enough_for_any_number_of_rows() -> None:
    for n, k in ((4096, 4096), (4096, 12288), (576, 1536), (1000, 2048)):
        plan = plan_for(n, k, 2)
        num_partials, num_tiles = plan.scratch_for(300, n)
        for num_rows in range(1, 301):
            tile = plan.tile_for(num_rows)
            tiles = -(-n // tile.block_n) * -(-num_rows // tile.block_m)
            assert tiles <= num_tiles
            assert plan.split == 1 or tiles * plan.split * tile.block_n * tile.block_m <= num_partials
