"""Device code of paged attention: the walk over a row tile's keys, and the sum of its chunks.

What makes a row's bits independent of its launch is said in paged_attention. Pages of the next block are
loaded an iteration ahead and carried along: a load of K whose address is loaded in the same iteration is not
pipelined (2.3 us a block of 64 keys instead of what the memory needs).
"""

from __future__ import annotations

import triton
import triton.language as tl

from common.kernels.kv_chunks import add_chunk, chunk_of, chunk_start, whole_power
from common.kernels.overlap import admit_next, await_previous


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
def _load_pages(page_row, start, stop, PAGE_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Pages of the keys of a block."""
    keys = start + tl.arange(0, TILE_KEYS)
    return tl.load(page_row + keys // PAGE_SIZE, mask=keys < stop, other=0)


@triton.jit
def _add_block(
    peak, total, mixed, q, k_head, v_head, pages, positions, start, stop, window, scale_log2,
    KEY_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, CAUSAL: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """One block of keys [start, start + TILE_KEYS), cut at stop, added to a chunk's running sums."""
    keys = start + tl.arange(0, TILE_KEYS)
    dims = tl.arange(0, HEAD_DIM)
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
def attention_kernel(
    q_ptr, k_ptr, v_ptr, page_table_ptr, out_ptr, partial_ptr, peaks_totals_ptr,
    page_row_stride, scale_log2, kv_lens_ptr, row_starts_ptr, tiles_ptr, rows_each, window, chunks_max,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, FIRST_CHUNK: tl.constexpr,
    PDL: tl.constexpr, PAGE_SIZE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Program (pair, lane): all chunks of a pair's keys, or when SPLIT each lane-th one."""
    await_previous(PDL)
    admit_next(PDL)
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
            pages = _load_pages(page_row, chunk_low_key, chunk_stop, PAGE_SIZE, TILE_KEYS)
            for start in tl.range(chunk_low_key, chunk_stop, TILE_KEYS):
                next_pages = _load_pages(page_row, start + TILE_KEYS, chunk_stop, PAGE_SIZE, TILE_KEYS)
                peak, total, mixed = _add_block(
                    peak, total, mixed, q, k_head, v_head, pages, positions, start, stop, window,
                    scale_log2, KEY_STRIDE, HEAD_DIM, PAGE_SIZE, CAUSAL, TILE_KEYS,
                )  # fmt: skip
                pages = next_pages
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
        chunk = chunk_of(low, FIRST_CHUNK)
        pages = _load_pages(page_row, low, stop, PAGE_SIZE, TILE_KEYS)
        for start in tl.range(low, stop, TILE_KEYS):
            next_pages = _load_pages(page_row, start + TILE_KEYS, stop, PAGE_SIZE, TILE_KEYS)
            chunk_peak, chunk_total, chunk_mixed = _add_block(
                chunk_peak, chunk_total, chunk_mixed, q, k_head, v_head, pages, positions, start, stop,
                window, scale_log2, KEY_STRIDE, HEAD_DIM, PAGE_SIZE, CAUSAL, TILE_KEYS,
            )  # fmt: skip
            pages = next_pages
            after = start + TILE_KEYS
            if (after >= stop) | (after == chunk_start(chunk + 1, FIRST_CHUNK)):
                chunk += 1
                peak, total, mixed = add_chunk(peak, total, mixed, chunk_peak, chunk_total, chunk_mixed)
                chunk_peak, chunk_total, chunk_mixed = nothing, zero, zeros
        result = _divide(mixed, total).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + places, result, mask=exists[:, None])


@triton.jit(do_not_specialize=["rows_each", "window", "chunks_max"])
def add_kernel(
    out_ptr, partial_ptr, peaks_totals_ptr,
    kv_lens_ptr, row_starts_ptr, tiles_ptr, rows_each, window, chunks_max,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, CAUSAL: tl.constexpr,
    RAGGED: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, FIRST_CHUNK: tl.constexpr,
    PDL: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Program (pair, i): ROWS rows of a pair's tile. Nothing to do where one chunk was all."""
    await_previous(PDL)
    admit_next(PDL)
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
