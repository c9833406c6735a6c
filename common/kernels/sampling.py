"""A token for each row of logits, on the device: greedy, or sampled under min-p, top-k and top-p.

The meaning is services/target/core/sampling.py's: token = argmax(logits / T + Gumbel(seed, position, id))
over the tokens that the filters keep. Three launches, whatever the rows ask for:

    scan    (row, chunk)  best choice of the chunk, whether it holds NaN or +inf
    thin    (row, chunk)  unfiltered rows: best noisy choice; filtered rows: the tokens near the top, listed
    choose  (row)         the best of the chunks; filtered rows: cut the list (or the whole row) and choose

Masses are sums of integers (2^-40 of the largest probability), so they are the same in any order, and a
row's token depends on nothing beside it. Greedy rows read their logits once, sampled ones twice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.kernels.choice import (
    NO_CHOICE,
    choice_id,
    choice_key,
    key_value,
    order_key,
    pack_choice,
)
from common.kernels.gumbel import gumbel_noise, hash_words, noise_of_words
from common.kernels.overlap import admit_next, await_previous

CHUNK = 4096
# Tokens that a row may list. A chat model at T = 1 has some hundred within _LIST_REACH of its best.
LIST_LEN = 4096
_LIST_TILE = 1024
_ROW_TILE = 4096

# Noise lies within (-2.9, 22.9): a token this far under the best never wins.
_NOISE_SPAN = tl.constexpr(26.0)
# What lies further under the best has together at most V * e^-16, 2 % of the mass for V = 152k.
_LIST_REACH = tl.constexpr(16.0)
_MASS_ONE = tl.constexpr(float(1 << 40))
_NO_KEY_LIMIT = tl.constexpr(-(1 << 31))
_NO_ID_LIMIT = tl.constexpr((1 << 31) - 1)


@dataclass(frozen=True)
class RowParams:
    """How each row's token is chosen, `[R]` each, on the device.

    temperature fp32, 0 is greedy; top_k int32, 0 is off; top_p fp32, 1 is off; min_p_reach fp32, see
    `min_p_reach`; seed int64, the 64 bits of it; position int64 of the token to choose.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p_reach: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


def min_p_reach(min_p: float) -> float:
    """How far under the best a logit / T may lie for min-p to keep it; infinity when min_p is 0."""
    return -math.log(min_p) if min_p > 0 else math.inf


@dataclass(frozen=True)
class SamplingWorkspace:
    """Scratch for up to R rows of V logits, see `allocate`. best, noisy_best `[R, chunks]` int64; unfit
    `[R, chunks]` int32; num_listed, mass `[R]`; listed, listed_ids `[R, LIST_LEN]`."""

    best: torch.Tensor
    noisy_best: torch.Tensor
    unfit: torch.Tensor
    num_listed: torch.Tensor
    mass: torch.Tensor
    listed: torch.Tensor
    listed_ids: torch.Tensor

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_rows: int, device: torch.device | str, *, chunk: int = CHUNK,
        list_len: int = LIST_LEN,
    ) -> SamplingWorkspace:  # fmt: skip
        chunks = (num_rows, triton.cdiv(vocab_rows, chunk))

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            best=empty(chunks, torch.int64),
            noisy_best=empty(chunks, torch.int64),
            unfit=empty(chunks, torch.int32),
            num_listed=empty((num_rows,), torch.int32),
            mass=empty((num_rows,), torch.int64),
            listed=empty((num_rows, list_len), torch.float32),
            listed_ids=empty((num_rows, list_len), torch.int32),
        )


@triton.jit
def _scan(
    logits, best, unfit, num_listed, mass, row_stride, vocab_rows, num_chunks,
    CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab_rows
    values = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    place = row * num_chunks + chunk
    packed = tl.where(inside, pack_choice(order_key(values), ids), NO_CHOICE)
    tl.store(best + place, tl.max(packed, axis=0))
    tl.store(unfit + place, tl.sum(((values != values) | (values == float("inf"))).to(tl.int32), axis=0))
    if chunk == 0:
        tl.store(num_listed + row, 0)
        tl.store(mass + row, tl.zeros([], tl.int64))


@triton.jit
def _scaled(values, temperature):
    """logits / T as the reference rounds it; a NaN becomes -inf."""
    return tl.where(values == values, tl.div_rn(values, tl.zeros_like(values) + temperature), float("-inf"))


@triton.jit
def _mass(scaled, largest):
    return (tl.exp(scaled - largest) * _MASS_ONE).to(tl.int64)


@triton.jit
def _thin(
    logits, best, noisy_best, num_listed, mass, listed, listed_ids,
    temperatures, top_ks, top_ps, reaches, seeds, positions, row_stride, vocab_rows, num_chunks, list_len,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        place = row * num_chunks + chunk
        of_chunks = tl.arange(0, CHUNKS)
        bests = tl.load(best + row * num_chunks + of_chunks, mask=of_chunks < num_chunks, other=NO_CHOICE)
        largest = _scaled(key_value(choice_key(tl.max(bests, axis=0))), temperature)
        here = _scaled(key_value(choice_key(tl.load(best + place))), temperature)
        reach = tl.load(reaches + row)
        if (tl.load(top_ks + row) == 0) & (tl.load(top_ps + row) >= 1.0):
            winner = tl.full([], NO_CHOICE, tl.int64)
            floor = largest - tl.minimum(reach, _NOISE_SPAN)
            if here >= floor:
                seed, position = tl.load(seeds + row), tl.load(positions + row)
                fours = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
                word_0, word_1, word_2, word_3 = hash_words(seed, position, fours)
                # [CHUNK / 4, 4] in the order of ids.
                words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
                words = tl.reshape(words, [CHUNK])
                ids = chunk * CHUNK + tl.arange(0, CHUNK)
                values = tl.load(logits + row * row_stride + ids, mask=ids < vocab_rows, other=float("-inf"))
                scaled = _scaled(values.to(tl.float32), temperature)
                kept = (scaled >= floor) & (scaled > float("-inf"))
                noisy = scaled + noise_of_words(words)
                winner = tl.max(tl.where(kept, pack_choice(order_key(noisy), ids), NO_CHOICE), axis=0)
            tl.store(noisy_best + place, winner)
        elif here >= largest - reach:
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            values = tl.load(logits + row * row_stride + ids, mask=ids < vocab_rows, other=float("-inf"))
            scaled = _scaled(values.to(tl.float32), temperature)
            kept = (scaled >= largest - reach) & (scaled > float("-inf"))
            tl.atomic_add(
                mass + row, tl.sum(tl.where(kept, _mass(scaled, largest), 0), axis=0), sem="relaxed"
            )
            near = (kept & (scaled >= largest - _LIST_REACH)).to(tl.int32)
            num_near = tl.sum(near, axis=0)
            if num_near > 0:
                # The list's order differs from run to run; nothing that is made of it does.
                first = tl.atomic_add(num_listed + row, num_near, sem="relaxed")
                index = first + tl.cumsum(near, axis=0) - 1
                fits = (near != 0) & (index < list_len)
                tl.store(listed + row * list_len + index, scaled, mask=fits)
                tl.store(listed_ids + row * list_len + index, ids, mask=fits)


@triton.jit
def _tokens(source, source_ids, begin, count, temperature, floor, FROM_ROW: tl.constexpr, TILE: tl.constexpr):
    """Key, logit / T and id of a tile of tokens, and which of them min-p keeps."""
    place = begin + tl.arange(0, TILE)
    values = tl.load(source + place, mask=place < count, other=float("-inf")).to(tl.float32)
    if FROM_ROW:
        ids = place
        values = _scaled(values, temperature)
    else:
        ids = tl.load(source_ids + place, mask=place < count, other=0)
    kept = (values >= floor) & (values > float("-inf"))
    return order_key(values), values, ids, kept


@triton.jit
def _tally(
    source, source_ids, count, temperature, floor, largest, least_key, cut_key, cut_id,
    FROM_ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Number and mass of the tokens of key >= least_key, less those that (cut_key, cut_id) cuts: of lower
    key, or of that key and a higher id."""
    number = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.int64)
    for begin in range(0, count, TILE):
        keys, values, ids, kept = _tokens(
            source, source_ids, begin, count, temperature, floor, FROM_ROW, TILE
        )
        kept = kept & (keys >= least_key) & ((keys > cut_key) | ((keys == cut_key) & (ids <= cut_id)))
        number += kept.to(tl.int32)
        mass += tl.where(kept, _mass(values, largest), 0)
    return tl.sum(number, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _cut_ties(
    source, source_ids, count, temperature, floor, key, num_wanted, vocab_rows,
    FROM_ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The lowest id up to which num_wanted tokens have this key."""
    low = tl.zeros([], tl.int32) - 1
    high = tl.zeros([], tl.int32) + vocab_rows - 1
    while high - low > 1:
        middle = (low + high) // 2
        number = tl.zeros([TILE], tl.int32)
        for begin in range(0, count, TILE):
            keys, values, ids, kept = _tokens(
                source, source_ids, begin, count, temperature, floor, FROM_ROW, TILE
            )
            number += (kept & (keys == key) & (ids <= middle)).to(tl.int32)
        if tl.sum(number, axis=0) >= num_wanted:
            high = middle
        else:
            low = middle
    return high


@triton.jit
def _filter_and_choose(
    source, source_ids, count, temperature, floor, largest, mass, top_k, top_p, seed, position, vocab_rows,
    FROM_ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Packed noisy choice among what top-k, then top-p keep. mass: of all that min-p keeps, also where the
    count tokens are not all of them."""
    cut_key = tl.full([], _NO_KEY_LIMIT, tl.int32)
    cut_id = tl.full([], _NO_ID_LIMIT, tl.int32)
    highest = order_key(largest)
    lowest_kept = tl.zeros([TILE], tl.int32) + highest
    for begin in range(0, count, TILE):
        keys, values, ids, kept = _tokens(
            source, source_ids, begin, count, temperature, floor, FROM_ROW, TILE
        )
        lowest_kept = tl.minimum(lowest_kept, tl.where(kept, keys, highest))
    lowest = tl.min(lowest_kept, axis=0).to(tl.int64)
    number, held = _tally(
        source, source_ids, count, temperature, floor, largest, cut_key, cut_key, cut_id, FROM_ROW, TILE
    )
    total = tl.where(top_k > 0, held, mass)
    if (top_k > 0) & (number > top_k):
        # The highest key that top_k tokens reach: keys of [low, high) are left.
        low, high = lowest, highest.to(tl.int64) + 1
        num_above = tl.zeros([], tl.int32)
        while high - low > 1:
            middle = (low + high) // 2
            num_from, mass_from = _tally(
                source, source_ids, count, temperature, floor, largest, middle.to(tl.int32),
                cut_key, cut_id, FROM_ROW, TILE,
            )  # fmt: skip
            if num_from >= top_k:
                low = middle
            else:
                high = middle
                num_above = num_from
        cut_id = _cut_ties(
            source, source_ids, count, temperature, floor, low.to(tl.int32), top_k - num_above, vocab_rows,
            FROM_ROW, TILE,
        )  # fmt: skip
        cut_key = low.to(tl.int32)
        number, held = _tally(
            source, source_ids, count, temperature, floor, largest, cut_key, cut_key, cut_id, FROM_ROW, TILE
        )
        total = held
        lowest = low
    if top_p < 1.0:
        exact = total.to(tl.float64) * top_p.to(tl.float64)
        wanted = exact.to(tl.int64)
        wanted = tl.maximum(wanted + (wanted.to(tl.float64) < exact).to(tl.int64), 1)
        # The highest key from which on there is the wanted mass.
        low, high = lowest, highest.to(tl.int64) + 1
        num_above = tl.zeros([], tl.int32)
        mass_above = tl.zeros([], tl.int64)
        num_low, mass_low = number, held
        while high - low > 1:
            middle = (low + high) // 2
            num_from, mass_from = _tally(
                source, source_ids, count, temperature, floor, largest, middle.to(tl.int32),
                cut_key, cut_id, FROM_ROW, TILE,
            )  # fmt: skip
            if mass_from >= wanted:
                low = middle
                num_low, mass_low = num_from, mass_from
            else:
                high = middle
                num_above, mass_above = num_from, mass_from
        # Tokens of this key have one mass, and as many stay as are begun before the wanted mass is there.
        num_ties = tl.maximum(num_low - num_above, 1)
        each = tl.maximum((mass_low - mass_above) // num_ties, 1)
        num_wanted = (wanted - mass_above + each - 1) // each
        if num_wanted < num_ties:
            cut_id = _cut_ties(
                source, source_ids, count, temperature, floor, low.to(tl.int32), num_wanted.to(tl.int32),
                vocab_rows, FROM_ROW, TILE,
            )  # fmt: skip
        elif low.to(tl.int32) > cut_key:
            cut_id = tl.full([], _NO_ID_LIMIT, tl.int32)
        cut_key = low.to(tl.int32)
    winner = tl.full([TILE], NO_CHOICE, tl.int64)
    for begin in range(0, count, TILE):
        keys, values, ids, kept = _tokens(
            source, source_ids, begin, count, temperature, floor, FROM_ROW, TILE
        )
        kept = kept & ((keys > cut_key) | ((keys == cut_key) & (ids <= cut_id)))
        noisy = values + gumbel_noise(seed, position, ids)
        winner = tl.maximum(winner, tl.where(kept, pack_choice(order_key(noisy), ids), NO_CHOICE))
    return tl.max(winner, axis=0)


@triton.jit
def _choose(
    logits, best, noisy_best, unfit, num_listed, mass, listed, listed_ids,
    temperatures, top_ks, top_ps, reaches, seeds, positions, chosen, finite,
    row_stride, vocab_rows, num_chunks, list_len,
    CHUNKS: tl.constexpr, LIST_TILE: tl.constexpr, ROW_TILE: tl.constexpr, SAMPLED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    of_chunks = tl.arange(0, CHUNKS)
    present = of_chunks < num_chunks
    greedy = tl.max(tl.load(best + row * num_chunks + of_chunks, mask=present, other=NO_CHOICE), axis=0)
    num_unfit = tl.sum(tl.load(unfit + row * num_chunks + of_chunks, mask=present, other=0), axis=0)
    is_finite = (num_unfit == 0) & (tl.abs(key_value(choice_key(greedy))) < float("inf"))
    tl.store(finite + row, is_finite.to(finite.dtype.element_ty))
    winner = greedy
    if SAMPLED:
        temperature = tl.load(temperatures + row)
        if (temperature > 0) & is_finite:
            top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
            if (top_k == 0) & (top_p >= 1.0):
                winner = tl.max(
                    tl.load(noisy_best + row * num_chunks + of_chunks, mask=present, other=NO_CHOICE), axis=0
                )
            else:
                largest = _scaled(key_value(choice_key(greedy)), temperature)
                reach = tl.load(reaches + row)
                floor = largest - reach
                row_mass = tl.load(mass + row)
                seed, position = tl.load(seeds + row), tl.load(positions + row)
                number = tl.load(num_listed + row)
                # The list will do if it holds all that min-p keeps, or what top-k or top-p will.
                enough = (number <= list_len) & (reach <= _LIST_REACH)
                if (number <= list_len) & (reach > _LIST_REACH):
                    if top_k > 0:
                        enough = number >= top_k
                    else:
                        num_in_list, mass_in_list = _tally(
                            listed + row * list_len, listed_ids + row * list_len, number, temperature, floor,
                            largest, _NO_KEY_LIMIT, _NO_KEY_LIMIT, _NO_ID_LIMIT, False, LIST_TILE,
                        )  # fmt: skip
                        wanted = row_mass.to(tl.float64) * top_p.to(tl.float64)
                        enough = mass_in_list.to(tl.float64) >= wanted
                if enough:
                    winner = _filter_and_choose(
                        listed + row * list_len, listed_ids + row * list_len, number, temperature, floor,
                        largest, row_mass, top_k, top_p, seed, position, vocab_rows, False, LIST_TILE,
                    )  # fmt: skip
                else:
                    winner = _filter_and_choose(
                        logits + row * row_stride, listed_ids, vocab_rows, temperature, floor,
                        largest, row_mass, top_k, top_p, seed, position, vocab_rows, True, ROW_TILE,
                    )  # fmt: skip
    # A row that is not finite may have no choice at all.
    token_id = tl.minimum(choice_id(winner), vocab_rows - 1)
    tl.store(chosen + row, token_id.to(chosen.dtype.element_ty))


def sample(
    logits: torch.Tensor,
    params: RowParams,
    chosen: torch.Tensor,
    finite: torch.Tensor,
    workspace: SamplingWorkspace,
    *,
    sampled: bool = True,
    chunk: int = CHUNK,
    pdl: bool = False,
) -> None:
    """A token for each row of logits `[R, V]`: fp32, fp16 or bf16, columns that touch.

    Written: chosen `[R]` integers in [0, V); finite `[R]` integers, 0 where a logit is NaN or +inf or all
    are -inf: such a row's token is any id. sampled False: all rows are greedy, params is not read. Allocates
    nothing, waits for nothing. Floor: the bytes of the logits.
    """
    num_rows, vocab_rows = logits.shape
    w = workspace
    num_chunks = triton.cdiv(vocab_rows, chunk)
    list_len = w.listed.shape[1]
    assert logits.stride(1) == 1 and w.best.numel() >= num_rows * num_chunks and w.listed.shape[0] >= num_rows
    chunks = triton.next_power_of_2(num_chunks)
    options = {"PDL": pdl, **({"launch_pdl": True} if pdl else {})}
    row_params = (
        params.temperature, params.top_k, params.top_p, params.min_p_reach, params.seed, params.position
    )  # fmt: skip
    grid = (num_rows, num_chunks)
    _scan[grid](
        logits, w.best, w.unfit, w.num_listed, w.mass, logits.stride(0), vocab_rows, num_chunks,
        CHUNK=chunk, num_warps=4, **options,
    )  # fmt: skip
    if sampled:
        _thin[grid](
            logits, w.best, w.noisy_best, w.num_listed, w.mass, w.listed, w.listed_ids, *row_params,
            logits.stride(0), vocab_rows, num_chunks, list_len,
            CHUNK=chunk, CHUNKS=chunks, num_warps=8, **options,
        )  # fmt: skip
    _choose[(num_rows,)](
        logits, w.best, w.noisy_best, w.unfit, w.num_listed, w.mass, w.listed, w.listed_ids, *row_params,
        chosen, finite, logits.stride(0), vocab_rows, num_chunks, list_len,
        CHUNKS=chunks, LIST_TILE=min(_LIST_TILE, chunk), ROW_TILE=min(_ROW_TILE, chunk), SAMPLED=sampled,
        num_warps=8 if sampled else 1, **options,
    )  # fmt: skip
