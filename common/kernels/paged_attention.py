"""Attention of ragged rows over paged K/V: decode, verify, draft and extend are one kernel.

Knows rows, pages and slots; nothing of requests. A row's bits depend on its own query, keys and position
alone, because

- keys are cut into chunks at fixed positions, and a chunk is summed from zero, block after block;
- chunks are added in order of position. Whether one program walks over all of them, or many take one each
  and a second kernel adds, changes who adds, never what is added to what;
- the running maximum is rounded up to a whole power of two, so rescaling is exact in fp32;
- keys that are hidden from a row add exact zeros, and every launch uses the same tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.kernels.attention_kernels import add_kernel, attention_kernel
from common.kernels.kv_chunks import num_chunks

# Up to so many (row tile, K/V head) pairs the keys are split over programs; above, pairs fill the GPU.
SPLIT_PAIRS_MAX = 96
# Programs that a split launch aims at: two for each of an H200's 132 multiprocessors.
_SPLIT_PROGRAMS = 264
# With one program or fewer on each of them, a walk has another block of keys in flight: 2 % of a step of
# 16 sequences of 320 keys on an H200. With two it costs 6 %. Changes speed alone.
_DEEP_PAIRS_MAX = 132
# Rows of a tile that a program of the adding kernel takes, and chunks whose loads it has in flight.
_ADD_ROWS = 4
_ADD_UNROLL = 8
_NO_WINDOW = 1 << 30
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Tile:
    """What a program multiplies at once: rows (a query head of a token is a row) and keys.

    first_chunk: keys of the first chunks. All of it is part of a row's arithmetic, so there is one tile for
    an element type.
    """

    rows: int
    keys: int
    first_chunk: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, dtype: torch.dtype) -> Tile:
        """The tile of an element type. Never of a row count."""
        # fp32 is multiplied without tensor cores, and each product is unrolled: small tiles compile.
        return cls(16, 32, 128, 4, 2) if dtype == torch.float32 else cls(64, 64, 128, 4, 3)


@dataclass(frozen=True)
class AttentionWorkspace:
    """Partial sums of split launches; one serves all layers, used one after another on a stream.

    partial `[pairs, chunks, tile rows, head_dim]` fp32; peaks_totals `[pairs, chunks, 2, tile rows]` fp32.
    """

    partial: torch.Tensor
    peaks_totals: torch.Tensor

    @classmethod
    def allocate(
        cls, num_keys_max: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> AttentionWorkspace:
        """For sequences of at most num_keys_max keys whose q is of dtype."""
        tile = Tile.of(dtype)
        shape = (SPLIT_PAIRS_MAX, num_chunks(num_keys_max, tile.first_chunk), tile.rows)
        return cls(
            torch.empty(*shape, head_dim, dtype=torch.float32, device=device),
            torch.empty(*shape[:2], 2, shape[2], dtype=torch.float32, device=device),
        )


@dataclass(frozen=True)
class RaggedRows:
    """Which rows belong to which sequence where their number differs.

    row_starts `[S + 1]` int32: sequence s has rows row_starts[s] … row_starts[s+1]-1, the last of its keys.
    tiles `[num_tiles, 2]` int32: sequence and number of the row tile in it; sequence -1 is padding.
    """

    row_starts: torch.Tensor
    tiles: torch.Tensor


def row_tiles(num_rows: list[int], group: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Tiles of sequences with num_rows rows each, for RaggedRows.tiles. group: query heads per K/V head."""
    per_tile = Tile.of(dtype).rows
    return [(s, t) for s, rows in enumerate(num_rows) for t in range(-(-rows * group // per_tile))]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    kv_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: AttentionWorkspace,
    *,
    rows: int | RaggedRows,
    page_size: int,
    scale: float,
    causal: bool,
    window: int | None = None,
    split: bool | None = None,
    pdl: bool = False,
) -> None:
    """out = softmax(q·kᵀ·scale)·v for rows that are the last of their sequence's keys.

    q, out `[N, num_heads, head_dim]` (fp32, fp16, bf16), caches `[num_slots, num_kv_heads, head_dim]` of the
    same type, all contiguous, head_dim a power of two from 16; page_table `[S, pages]` int32 with unit
    stride along pages; kv_lens `[S]` int32 counts the keys including the rows just stored; 0 is padding.
    rows: each sequence's number of rows (N = S · rows; decode 1, verify and draft block_size), or RaggedRows.
    causal hides keys after a row; window hides keys `window` or more before it. split is for tests and
    measurements: None lets the launch's shape decide, which does not change a bit. pdl: see overlap.

    Never read: keys beyond kv_lens and the pages that would hold them. Never written: rows of padding
    sequences. A key hidden from a row does not reach it even when K is NaN (see kv_store for V).
    Bytes: K and V once for each tile of 64 // group tokens (once in all for a verify of 16 rows at group
    4), q and out once; the floor is K and V over the read bandwidth. Split launches add 512 bytes (at
    head_dim 128) of partial sums a row, head and chunk, written and read once, in L2 when few.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    num_sequences = kv_lens.shape[0]
    tile = Tile.of(q.dtype)
    if isinstance(rows, RaggedRows):
        num_tiles, ragged, rows_each = rows.tiles.shape[0], rows, 0
    else:
        assert num_rows == num_sequences * rows, f"{num_rows} rows are not {num_sequences} x {rows}"
        tiles_each = -(-rows * num_heads // num_kv_heads // tile.rows)
        num_tiles, ragged, rows_each = num_sequences * tiles_each, None, rows
    assert q.is_contiguous() and out.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()
    assert head_dim >= 16 and head_dim & (head_dim - 1) == 0, f"head_dim {head_dim} must be a power of two"
    num_pairs = num_tiles * num_kv_heads
    chunks_max = workspace.partial.shape[1]
    if split is None:
        split = num_pairs <= SPLIT_PAIRS_MAX
    assert not split or num_pairs <= workspace.partial.shape[0], f"{num_pairs} pairs exceed the workspace"
    # Few enough that programs without a chunk do not queue before those with one.
    lanes = min(-(-_SPLIT_PROGRAMS // num_pairs), chunks_max) if split else 1
    where = (
        kv_lens,
        ragged.row_starts if ragged else kv_lens,
        ragged.tiles if ragged else kv_lens,
        rows_each,
        _NO_WINDOW if window is None else window,
        chunks_max,
    )
    fixed = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "CAUSAL": causal,
        "RAGGED": ragged is not None,
        "TILE_ROWS": tile.rows,
        "TILE_KEYS": tile.keys,
        "FIRST_CHUNK": tile.first_chunk,
        "PDL": pdl,
        **({"launch_pdl": True} if pdl else {}),
    }
    attention_kernel[(num_pairs, lanes)](
        q, k_cache, v_cache, page_table, out, workspace.partial, workspace.peaks_totals,
        page_table.stride(0), scale * _LOG2_E, *where, **fixed, PAGE_SIZE=page_size, SPLIT=split,
        num_warps=tile.num_warps, num_stages=tile.num_stages + (not split and num_pairs <= _DEEP_PAIRS_MAX),
    )  # fmt: skip
    if split:
        add_kernel[(num_pairs, tile.rows // _ADD_ROWS)](
            out, workspace.partial, workspace.peaks_totals, *where, **fixed, ROWS=_ADD_ROWS,
            UNROLL=_ADD_UNROLL, num_warps=4,
        )  # fmt: skip
