"""How a GEMM of few rows is cut into tiles, by the weight's shape: chosen by measurement, not derived.

A plan's split of K is part of the numerics and so the same for any number of rows. The rest of a tile
changes speed alone: on an H200 all tiles tried gave the same bits, whichever matrix instruction they use.
"""

from __future__ import annotations

from dataclasses import dataclass

# A split begins at a multiple of this, whatever a tile's block_k: the order of additions must not
# depend on the tile.
_SPLIT_STEP = 64


@dataclass(frozen=True)
class Tile:
    """block_n rows of the weight times block_m rows of x, block_k of K at a time.

    prefetch_k: columns of each weight row that are asked for in L2 before the previous kernel has ended.
    """

    block_n: int
    block_k: int
    block_m: int
    num_stages: int
    num_warps: int = 4
    prefetch_k: int = 0


@dataclass(frozen=True)
class GemmPlan:
    """split: into how many parts K is cut, each the work of one program. tiles: rising in block_m; the first
    that holds all rows is used, the last for any more."""

    split: int
    tiles: tuple[Tile, ...]

    def tile_for(self, num_rows: int) -> Tile:
        for tile in self.tiles:
            if num_rows <= tile.block_m:
                return tile
        return self.tiles[-1]

    def k_split(self, k: int) -> int:
        """Length of a part of K; the last may be shorter, none is empty."""
        length = -(-k // (self.split * _SPLIT_STEP)) * _SPLIT_STEP
        assert (self.split - 1) * length < k, f"K {k} has no {self.split} parts"
        return length

    def scratch_for(self, num_rows_max: int, n: int) -> tuple[int, int]:
        """Partial sums and tiles that any number of rows up to num_rows_max needs of a `GemmWorkspace`,
        for n rows of weight."""
        if self.split == 1:
            return 0, 0
        sizes = [(tile, -(-n // tile.block_n) * -(-num_rows_max // tile.block_m)) for tile in self.tiles]
        return (
            max(number * self.split * tile.block_n * tile.block_m for tile, number in sizes),
            max(number for _, number in sizes),
        )


# For more than 64 rows, where arithmetic costs as much as reading. Kept so that a row's bits stay the same;
# cuBLAS is faster there (µs, Qwen3-8B's qkv / o / gate_up / down at 512 rows: 36 / 25 / 139 / 69 against
# 51 / 33 / 173 / 77 here).
_MANY = (Tile(128, 64, 128, 4, num_warps=8), Tile(128, 64, 256, 4, num_warps=8))

# One H200 (132 SMs), bf16, 2026-12-01, µs for 16 / 32 / 64 rows; floor: the weight at 4.64 TB/s. What
# decides is bytes in flight: a few programs an SM with 60 kB of stages each or one with 120 kB and more,
# and as many programs as fit at once. Cutting K pays where 64-row tiles are fewer than SMs.
_PLANS = {
    # floor 10.8, here 14.8 / 17.0 / 16.9, cuBLAS 17.4 / 17.6 / 16.5
    (6144, 4096): GemmPlan(1, (Tile(64, 64, 16, 10), Tile(64, 128, 32, 4), Tile(64, 128, 64, 4), *_MANY)),
    # floor 7.2, here 10.5 / 12.0 / 12.1, cuBLAS 12.9 / 13.2 / 11.6
    (4096, 4096): GemmPlan(
        2, (Tile(64, 128, 16, 6, prefetch_k=256), Tile(64, 128, 32, 4), Tile(64, 128, 64, 4), *_MANY)
    ),
    # floor 43.4, here 48.9 / 51.4 / 55.6, cuBLAS 51.6 / 51.7 / 52.8
    (24576, 4096): GemmPlan(
        1, (Tile(64, 128, 16, 3), Tile(64, 64, 32, 5), Tile(128, 64, 64, 6, num_warps=8), *_MANY)
    ),
    # floor 21.7, here 26.5 / 29.8 / 29.5, cuBLAS 29.0 / 29.7 / 31.5
    (4096, 12288): GemmPlan(
        2, (Tile(64, 128, 16, 6, prefetch_k=256), Tile(64, 64, 32, 7), Tile(64, 128, 64, 4), *_MANY)
    ),
    # floor 268, here 288 / 296 / 306, cuBLAS 306 / 309 / 316
    (151936, 4096): GemmPlan(
        1, (Tile(64, 128, 16, 3), Tile(64, 128, 32, 4), Tile(128, 64, 64, 6, num_warps=8), *_MANY)
    ),
    # SmolLM2-135M, 8 rows: 3.8, cuBLAS 4.8. Its other matrices take the usual plan: qkv 2.6 (cuBLAS 3.4),
    # o 2.4 (3.0), gate_up 2.8 (3.9), lm_head 18.7 (16.8).
    (576, 1536): GemmPlan(2, (Tile(64, 128, 16, 4), Tile(64, 64, 64, 6), *_MANY)),
}
_USUAL_TILES = (Tile(64, 64, 16, 7), Tile(64, 64, 32, 5), Tile(64, 64, 64, 6), *_MANY)
# fp32 has no matrix instruction of full precision: one small tile, whose order of additions is its own.
_FP32_TILES = (Tile(64, 32, 16, 2),)


def plan_for(n: int, k: int, element_bytes: int) -> GemmPlan:
    """The plan of a weight `[n, k]`; shapes that were not measured are cut as the nearest that was."""
    if element_bytes == 4:
        return GemmPlan(1, _FP32_TILES)
    few_tiles = n <= 64 * 66 and k >= 2048
    return _PLANS.get((n, k)) or GemmPlan(2 if few_tiles else 1, _USUAL_TILES)
