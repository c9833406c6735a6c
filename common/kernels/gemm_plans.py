"""How a GEMM of few rows is cut into tiles, by the weight's shape: chosen by measurement, not derived.

A plan's split of K is part of the numerics and so the same for any number of rows. The rest of a tile
changes speed alone.
"""

from __future__ import annotations

from dataclasses import dataclass

# A split begins at a multiple of this, whatever a tile's block_k: the order of additions must not
# depend on the tile.
_SPLIT_STEP = 64


@dataclass(frozen=True)
class Tile:
    """block_n rows of the weight times block_m rows of x, block_k of K at a time.

    swap: the weight is the first operand of the matrix instruction. prefetch_k: columns of each weight row
    that are asked for in L2 before the previous kernel has ended.
    """

    block_n: int
    block_k: int
    block_m: int
    num_stages: int
    num_warps: int = 4
    swap: bool = True
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
        assert (self.split - 1) * length < k
        return length
