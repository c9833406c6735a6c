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
import triton
import triton.language as tl

from common.kernels.kv_chunks import add_chunk, chunk_of, chunk_start, num_chunks, whole_power

# Up to so many (row tile, K/V head) pairs the keys are split over programs; above, pairs fill the GPU.
SPLIT_PAIRS_MAX = 96
# Programs that a split launch aims at: two for each of an H200's 132 multiprocessors.
_SPLIT_PROGRAMS = 264
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
        return cls(16, 32, 128, 4, 2) if dtype == torch.float32 else cls(64, 64, 128, 4, 5)


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
) -> None:
    """out = softmax(q·kᵀ·scale)·v for rows that are the last of their sequence's keys.

    q, out `[N, num_heads, head_dim]` (fp32, fp16, bf16), caches `[num_slots, num_kv_heads, head_dim]` of the
    same type, all contiguous, head_dim a power of two from 16; page_table `[S, pages]` int32 with unit
    stride along pages; kv_lens `[S]` int32 counts the keys including the rows just stored; 0 is padding.
    rows: each sequence's number of rows (N = S · rows; decode 1, verify and draft block_size), or RaggedRows.
    causal hides keys after a row; window hides keys `window` or more before it. split is for tests and
    measurements: None lets the launch's shape decide, which does not change a bit.

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
    }
    _attention_kernel[(num_pairs, lanes)](
        q, k_cache, v_cache, page_table, out, workspace.partial, workspace.peaks_totals,
        page_table.stride(0), scale * _LOG2_E, *where, **fixed, PAGE_SIZE=page_size, SPLIT=split,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    if split:
        _add_kernel[(num_pairs, tile.rows // _ADD_ROWS)](
            out, workspace.partial, workspace.peaks_totals, *where, **fixed, ROWS=_ADD_ROWS,
            UNROLL=_ADD_UNROLL, num_warps=4,
        )  # fmt: skip


@triton.jit
def _find_rows(
    pair, kv_lens_ptr, row_starts_ptr, tiles_ptr, rows_each,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, RAGGED: tl.constexpr, TILE_ROWS: tl.constexpr,
):  # fmt: skip
    """Sequence of a pair, its kv_len (0: nothing to do), first row, number of rows, and the pair's tile."""
    if RAGGED:
        sequence = tl.load(tiles_ptr + pair // NUM_KV_HEADS * 2)
        tile = tl.load(tiles_ptr + pair // NUM_KV_HEADS * 2 + 1)
        exists = sequence >= 0
        sequence = tl.maximum(sequence, 0)
        row_start = tl.load(row_starts_ptr + sequence)
        num_rows = tl.load(row_starts_ptr + sequence + 1) - row_start
        kv_len = tl.load(kv_lens_ptr + sequence, mask=exists, other=0)
    else:
        tiles_each = tl.cdiv(rows_each * (NUM_HEADS // NUM_KV_HEADS), TILE_ROWS)
        sequence = pair // NUM_KV_HEADS // tiles_each
        tile = pair // NUM_KV_HEADS % tiles_each
        row_start = sequence * rows_each
        num_rows = rows_each
        kv_len = tl.load(kv_lens_ptr + sequence)
    return sequence, kv_len, row_start, num_rows, tile


@triton.jit
def _reach(
    kv_len, num_rows, tile, window,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """Keys [low, stop) that a tile's rows see; low in whole blocks, as a chunk is always cut the same."""
    first = kv_len - num_rows
    stop = kv_len
    if CAUSAL:
        last_row = tl.minimum((tile * TILE_ROWS + TILE_ROWS - 1) // GROUP, num_rows - 1)
        stop = first + last_row + 1
    low = tl.maximum(first + tile * TILE_ROWS // GROUP - window + 1, 0) // TILE_KEYS * TILE_KEYS
    return low, stop


@triton.jit
def _add_block(
    peak, total, mixed, q, k_head, v_head, page_row, positions, start, stop, window, scale_log2,
    KEY_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """One block of keys [start, start + TILE_KEYS), cut at stop, added to a chunk's running sums."""
    keys = start + tl.arange(0, TILE_KEYS)
    dims = tl.arange(0, HEAD_DIM)
    pages = tl.load(page_row + keys // PAGE_SIZE, mask=keys < stop, other=0)
    slots = pages.to(tl.int64) * PAGE_SIZE + keys % PAGE_SIZE
    offsets = slots[:, None] * KEY_STRIDE + dims[None, :]
    k = tl.load(k_head + offsets, mask=(keys < stop)[:, None], other=0.0)
    v = tl.load(v_head + offsets, mask=(keys < stop)[:, None], other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    visible = (keys < stop)[None, :] & (positions[:, None] - keys[None, :] < window)
    if CAUSAL:
        visible = visible & (keys[None, :] <= positions[:, None])
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.ceil(tl.max(scores, 1) * scale_log2))
    # A row that has seen no key yet: -inf minus -inf would be NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    # A named fma: a compiler that fuses in one launch's kernel and not in another's would change bits.
    weights = tl.exp2(tl.fma(scores, scale_log2, -base[:, None]))
    fade = whole_power(peak - base)
    total = total * fade + tl.sum(weights, 1)
    mixed = tl.dot(weights.to(v.dtype), v, mixed * fade[:, None], input_precision="ieee")
    return new_peak, total, mixed


@triton.jit
def _divide(mixed, total):
    """Mixed values over the total weight; rows that do not exist have none."""
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _sum_of_chunks(
    partial_ptr, peaks_totals_ptr, num_chunks, rows, exists,
    TILE_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Partial sums of a pair's chunks, added in order, for some rows of its tile; divided at the end."""
    places = rows[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for base in range(0, num_chunks, UNROLL):
        # Unrolled so that loads of several chunks are in flight; what is past the end adds exact zeros.
        for i in tl.static_range(UNROLL):
            mask = exists & (rows * 0 + base + i < num_chunks)
            row_ptr = peaks_totals_ptr + (base + i) * 2 * TILE_ROWS + rows
            chunk_peak = tl.load(row_ptr, mask=mask, other=float("-inf"), cache_modifier=".cg")
            chunk_total = tl.load(row_ptr + TILE_ROWS, mask=mask, other=0.0, cache_modifier=".cg")
            chunk_mixed = tl.load(
                partial_ptr + (base + i) * TILE_ROWS * HEAD_DIM + places, mask=mask[:, None], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            peak, total, mixed = add_chunk(peak, total, mixed, chunk_peak, chunk_total, chunk_mixed)
    return _divide(mixed, total)


@triton.jit(do_not_specialize=["page_row_stride", "rows_each", "window", "chunks_max"])
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, page_table_ptr, out_ptr, partial_ptr, peaks_totals_ptr,
    page_row_stride, scale_log2, kv_lens_ptr, row_starts_ptr, tiles_ptr, rows_each, window, chunks_max,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, FIRST_CHUNK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (pair, lane): all chunks of a pair's keys, or when SPLIT each lane-th one."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    KEY_STRIDE: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    pair = tl.program_id(0)
    lane = tl.program_id(1)
    kv_head = pair % NUM_KV_HEADS
    sequence, kv_len, row_start, num_rows, tile = _find_rows(
        pair, kv_lens_ptr, row_starts_ptr, tiles_ptr, rows_each, NUM_HEADS, NUM_KV_HEADS, RAGGED, TILE_ROWS
    )
    if kv_len == 0:
        return
    low, stop = _reach(kv_len, num_rows, tile, window, GROUP, CAUSAL, TILE_ROWS, TILE_KEYS)
    chunk_low = 0
    chunks_here = 1
    if SPLIT:
        chunk_low = chunk_of(low, FIRST_CHUNK)
        chunks_here = chunk_of(stop - 1, FIRST_CHUNK) + 1 - chunk_low
        if lane >= chunks_here:
            return

    # The query heads of a token that share a K/V head are rows side by side.
    in_tile = tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, HEAD_DIM)
    rows = (tile * TILE_ROWS + in_tile) // GROUP
    heads = kv_head * GROUP + (tile * TILE_ROWS + in_tile) % GROUP
    places = ((row_start + rows).to(tl.int64) * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    exists = rows < num_rows
    q = tl.load(q_ptr + places, mask=exists[:, None], other=0.0)
    positions = kv_len - num_rows + rows

    page_row = page_table_ptr + sequence.to(tl.int64) * page_row_stride
    k_head = k_ptr + kv_head * HEAD_DIM
    v_head = v_ptr + kv_head * HEAD_DIM
    nothing = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    zero = tl.zeros([TILE_ROWS], tl.float32)
    zeros = tl.zeros([TILE_ROWS, HEAD_DIM], tl.float32)

    if SPLIT:
        for nth in range(lane, chunks_here, tl.num_programs(1)):
            chunk_low_key = tl.maximum(chunk_start(chunk_low + nth, FIRST_CHUNK), low)
            chunk_stop = tl.minimum(chunk_start(chunk_low + nth + 1, FIRST_CHUNK), stop)
            peak, total, mixed = nothing, zero, zeros
            for start in tl.range(chunk_low_key, chunk_stop, TILE_KEYS):
                peak, total, mixed = _add_block(
                    peak, total, mixed, q, k_head, v_head, page_row, positions, start, stop, window,
                    scale_log2, KEY_STRIDE, HEAD_DIM, PAGE_SIZE, CAUSAL, TILE_KEYS,
                )  # fmt: skip
            if chunks_here == 1:
                result = _divide(mixed, total).to(out_ptr.dtype.element_ty)
                tl.store(out_ptr + places, result, mask=exists[:, None])
            else:
                at = pair.to(tl.int64) * chunks_max + nth
                squares = in_tile[:, None] * HEAD_DIM + dims[None, :]
                tl.store(partial_ptr + at * TILE_ROWS * HEAD_DIM + squares, mixed, mask=exists[:, None])
                tl.store(peaks_totals_ptr + at * 2 * TILE_ROWS + in_tile, peak)
                tl.store(peaks_totals_ptr + at * 2 * TILE_ROWS + TILE_ROWS + in_tile, total)
    else:
        peak, total, mixed = nothing, zero, zeros
        chunk_peak, chunk_total, chunk_mixed = nothing, zero, zeros
        for start in tl.range(low, stop, TILE_KEYS):
            chunk_peak, chunk_total, chunk_mixed = _add_block(
                chunk_peak, chunk_total, chunk_mixed, q, k_head, v_head, page_row, positions, start, stop,
                window, scale_log2, KEY_STRIDE, HEAD_DIM, PAGE_SIZE, CAUSAL, TILE_KEYS,
            )  # fmt: skip
            # By selection, not by a branch: a branch would end the pipelining of loads.
            after = start + TILE_KEYS
            ends = (after >= stop) | (chunk_start(chunk_of(after, FIRST_CHUNK), FIRST_CHUNK) == after)
            new_peak, new_total, new_mixed = add_chunk(
                peak, total, mixed, chunk_peak, chunk_total, chunk_mixed
            )
            peak, total = tl.where(ends, new_peak, peak), tl.where(ends, new_total, total)
            mixed = tl.where(ends, new_mixed, mixed)
            chunk_peak, chunk_total = tl.where(ends, nothing, chunk_peak), tl.where(ends, zero, chunk_total)
            chunk_mixed = tl.where(ends, zeros, chunk_mixed)
        result = _divide(mixed, total).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + places, result, mask=exists[:, None])


@triton.jit(do_not_specialize=["rows_each", "window", "chunks_max"])
def _add_kernel(
    out_ptr, partial_ptr, peaks_totals_ptr,
    kv_lens_ptr, row_starts_ptr, tiles_ptr, rows_each, window, chunks_max,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, FIRST_CHUNK: tl.constexpr,
    ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Program (pair, i): ROWS rows of a pair's tile. Nothing to do where one chunk was all."""
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    pair = tl.program_id(0)
    sequence, kv_len, row_start, num_rows, tile = _find_rows(
        pair, kv_lens_ptr, row_starts_ptr, tiles_ptr, rows_each, NUM_HEADS, NUM_KV_HEADS, RAGGED, TILE_ROWS
    )
    in_tile = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    rows = (tile * TILE_ROWS + in_tile) // GROUP
    if (kv_len == 0) | ((tile * TILE_ROWS + tl.program_id(1) * ROWS) // GROUP >= num_rows):
        return
    low, stop = _reach(kv_len, num_rows, tile, window, GROUP, CAUSAL, TILE_ROWS, TILE_KEYS)
    chunks_here = chunk_of(stop - 1, FIRST_CHUNK) + 1 - chunk_of(low, FIRST_CHUNK)
    if chunks_here == 1:
        return
    at = pair.to(tl.int64) * chunks_max
    exists = rows < num_rows
    result = _sum_of_chunks(
        partial_ptr + at * TILE_ROWS * HEAD_DIM, peaks_totals_ptr + at * 2 * TILE_ROWS, chunks_here, in_tile,
        exists, TILE_ROWS, HEAD_DIM, ROWS, UNROLL,
    )  # fmt: skip
    heads = pair % NUM_KV_HEADS * GROUP + (tile * TILE_ROWS + in_tile) % GROUP
    places = (row_start + rows).to(tl.int64) * NUM_HEADS + heads
    places = places[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(out_ptr + places, result.to(out_ptr.dtype.element_ty), mask=exists[:, None])
