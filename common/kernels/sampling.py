"""A token for each row of logits, on the device: greedy, or sampled under min-p, top-k and top-p.

The meaning is services/target/core/sampling.py's: token = argmax(logits / T + Gumbel(seed, position, id))
over the tokens that the filters keep. The same launches whatever the rows ask for:

    scan    (row, chunk)  best token of the chunk, whether it holds NaN or +inf
    thin    (row, chunk)  unfiltered rows: best noisy token; filtered rows: how many tokens lie how far
                          under the best
    gather  (row, chunk)  filtered rows: list the best tokens, as many as matter or fit
    choose  (row)         the best of the chunks; filtered rows: filter the list, or the whole row where the
                          list is not enough, and choose

A row's token depends on nothing beside it. Greedy rows read their logits once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from common.kernels.choice import NO_CHOICE, choice_id, choice_key, key_value, order_key, pack_choice
from common.kernels.gumbel import hash_words, noise_of_words
from common.kernels.overlap import admit_next, await_previous
from common.kernels.token_filter import filter_and_choose, mass, mass_from, scale

CHUNK = 4096
# Tokens that a row may list. A chat model's top-p of 0.95 has some hundred.
LIST_LEN = 4096

# Noise lies within (-2.9, 22.9): a token this far under the best never wins.
_NOISE_SPAN = tl.constexpr(26.0)
# Tokens are counted by their distance from the best in steps of 1/4, up to 64; the last is of no token.
_NUM_STEPS = tl.constexpr(256)
_STEPS_A_UNIT = tl.constexpr(4.0)
# Low bits of the fp32 form that are empty.
_EMPTY_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


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
    `[R, chunks]`, steps `[R, 256]`, num_listed `[R]` int32; mass `[R]` int64; listed fp32, listed_ids int32
    `[R, LIST_LEN]`."""

    best: torch.Tensor
    noisy_best: torch.Tensor
    unfit: torch.Tensor
    steps: torch.Tensor
    num_listed: torch.Tensor
    mass: torch.Tensor
    listed: torch.Tensor
    listed_ids: torch.Tensor

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_rows: int, device: torch.device | str, *, chunk: int = CHUNK,
        list_len: int = LIST_LEN,
    ) -> SamplingWorkspace:  # fmt: skip
        num_chunks = triton.cdiv(vocab_rows, chunk)

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(num_rows, *shape, dtype=dtype, device=device)

        return cls(
            best=empty(torch.int64, num_chunks),
            noisy_best=empty(torch.int64, num_chunks),
            unfit=empty(torch.int32, num_chunks),
            steps=empty(torch.int32, _NUM_STEPS.value),
            num_listed=empty(torch.int32),
            mass=empty(torch.int64),
            listed=empty(torch.float32, list_len),
            listed_ids=empty(torch.int32, list_len),
        )


@triton.jit
def _scan(
    logits, best, unfit, steps, num_listed, masses, row_stride, vocab_rows, num_chunks,
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
        tl.store(steps + row * _NUM_STEPS + tl.arange(0, _NUM_STEPS), tl.zeros([_NUM_STEPS], tl.int32))
        tl.store(num_listed + row, 0)
        tl.store(masses + row, tl.zeros([], tl.int64))


@triton.jit
def _best_logit(best, row, num_chunks, CHUNKS: tl.constexpr):
    of_chunks = tl.arange(0, CHUNKS)
    bests = tl.load(best + row * num_chunks + of_chunks, mask=of_chunks < num_chunks, other=NO_CHOICE)
    return key_value(choice_key(tl.max(bests, axis=0)))


@triton.jit
def _read_chunk(logits, row, chunk, row_stride, vocab_rows, CHUNK: tl.constexpr):
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(logits + row * row_stride + ids, mask=ids < vocab_rows, other=float("-inf"))
    values = values.to(tl.float32)
    return ids, tl.where(values == values, values, float("-inf"))


@triton.jit
def _step(below, kept):
    """Which step of distance a token belongs to; the last is of those that are not kept."""
    return tl.where(kept, tl.minimum(below * _STEPS_A_UNIT, _NUM_STEPS - 2.0), _NUM_STEPS - 1.0).to(tl.int32)


@triton.jit
def _thin(
    logits, best, noisy_best, steps, masses, temperatures, top_ks, top_ps, reaches, seeds, positions,
    row_stride, vocab_rows, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        place = row * num_chunks + chunk
        largest = _best_logit(best, row, num_chunks, CHUNKS)
        inverse_t = 1.0 / temperature
        nearest = (largest - key_value(choice_key(tl.load(best + place)))) * inverse_t
        reach = tl.load(reaches + row)
        if (tl.load(top_ks + row) == 0) & (tl.load(top_ps + row) >= 1.0):
            reach = tl.minimum(reach, _NOISE_SPAN)
            winner = tl.full([], NO_CHOICE, tl.int64)
            if nearest <= reach:
                seed, position = tl.load(seeds + row), tl.load(positions + row)
                fours = chunk * (CHUNK // 4) + tl.arange(0, CHUNK // 4)
                word_0, word_1, word_2, word_3 = hash_words(seed, position, fours)
                # [CHUNK / 4, 4] in the order of ids.
                words = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
                noise = noise_of_words(tl.reshape(words, [CHUNK]))
                ids, values = _read_chunk(logits, row, chunk, row_stride, vocab_rows, CHUNK)
                kept = ((largest - values) * inverse_t <= reach) & (values > float("-inf"))
                packed = pack_choice(order_key(scale(values, temperature) + noise), ids)
                winner = tl.max(tl.where(kept, packed, NO_CHOICE), axis=0)
            tl.store(noisy_best + place, winner)
        elif nearest <= reach:
            ids, values = _read_chunk(logits, row, chunk, row_stride, vocab_rows, CHUNK)
            below = (largest - values) * inverse_t
            kept = (below <= reach) & (values > float("-inf"))
            tl.atomic_add(masses + row, tl.sum(tl.where(kept, mass(below), 0), axis=0), sem="relaxed")
            counts = tl.histogram(_step(below, kept), _NUM_STEPS)
            of_steps = tl.arange(0, _NUM_STEPS)
            tl.atomic_add(steps + row * _NUM_STEPS + of_steps, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _list_until(steps, row, top_k, list_len):
    """The last step of distance that is listed, the number of tokens up to it, and of all that min-p keeps.

    With top-k, as many steps as hold top_k tokens; else as many as fit the list, -1 if none does.
    """
    of_steps = tl.arange(0, _NUM_STEPS)
    tokens = of_steps < _NUM_STEPS - 1
    counts = tl.load(steps + row * _NUM_STEPS + of_steps)
    sums = tl.cumsum(tl.where(tokens, counts, 0), axis=0)
    by_number = tl.min(tl.where(tokens & (sums >= top_k), of_steps, _NUM_STEPS - 2), axis=0)
    by_room = tl.max(tl.where(tokens & (sums <= list_len), of_steps, -1), axis=0)
    last = tl.where(top_k > 0, by_number, by_room)
    return last, tl.sum(tl.where(of_steps == last, sums, 0), axis=0), tl.max(sums, axis=0)


@triton.jit
def _gather(
    logits, best, steps, num_listed, listed, listed_ids, temperatures, top_ks, top_ps, reaches,
    row_stride, vocab_rows, num_chunks, list_len,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    if (temperature > 0) & ((top_k > 0) | (tl.load(top_ps + row) < 1.0)):
        largest = _best_logit(best, row, num_chunks, CHUNKS)
        inverse_t = 1.0 / temperature
        nearest = (largest - key_value(choice_key(tl.load(best + row * num_chunks + chunk)))) * inverse_t
        reach = tl.load(reaches + row)
        last, number, num_kept = _list_until(steps, row, top_k, list_len)
        # The last step that is counted has no far end.
        in_steps = (nearest * _STEPS_A_UNIT <= last + 1) | (last >= _NUM_STEPS - 2)
        if (number <= list_len) & in_steps & (nearest <= reach):
            ids, values = _read_chunk(logits, row, chunk, row_stride, vocab_rows, CHUNK)
            below = (largest - values) * inverse_t
            kept = (below <= reach) & (values > float("-inf"))
            wanted = (_step(below, kept) <= last).to(tl.int32)
            # The list's order differs from run to run; nothing that is made of it does.
            first = tl.atomic_add(num_listed + row, tl.sum(wanted, axis=0), sem="relaxed")
            place = row * list_len + first + tl.cumsum(wanted, axis=0) - 1
            tl.store(listed + place, values, mask=wanted != 0)
            tl.store(listed_ids + place, ids, mask=wanted != 0)


@triton.jit
def _choose(
    logits, best, noisy_best, unfit, steps, masses, listed, listed_ids,
    temperatures, top_ks, top_ps, reaches, seeds, positions, chosen, finite,
    row_stride, vocab_rows, num_chunks, list_len,
    CHUNKS: tl.constexpr, LIST_TILE: tl.constexpr, ROW_TILE: tl.constexpr, SHIFT: tl.constexpr,
    SAMPLED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    admit_next(PDL)
    row = tl.program_id(0).to(tl.int64)
    of_chunks = tl.arange(0, CHUNKS)
    present = of_chunks < num_chunks
    greedy = tl.max(tl.load(best + row * num_chunks + of_chunks, mask=present, other=NO_CHOICE), axis=0)
    num_unfit = tl.sum(tl.load(unfit + row * num_chunks + of_chunks, mask=present, other=0), axis=0)
    largest = key_value(choice_key(greedy))
    is_finite = (num_unfit == 0) & (tl.abs(largest) < float("inf"))
    tl.store(finite + row, is_finite.to(finite.dtype.element_ty))
    winner = greedy
    if SAMPLED:
        temperature = tl.load(temperatures + row)
        if (temperature > 0) & is_finite:
            top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
            if (top_k == 0) & (top_p >= 1.0):
                noisy = tl.load(noisy_best + row * num_chunks + of_chunks, mask=present, other=NO_CHOICE)
                winner = tl.max(noisy, axis=0)
            else:
                reach = tl.load(reaches + row)
                row_mass = tl.load(masses + row)
                seed, position = tl.load(seeds + row), tl.load(positions + row)
                list_start, ids_start = listed + row * list_len, listed_ids + row * list_len
                last, number, num_kept = _list_until(steps, row, top_k, list_len)
                enough = (number <= list_len) & ((number == num_kept) | ((top_k > 0) & (number >= top_k)))
                if (last >= 0) & (top_k == 0) & (number < num_kept):
                    in_list = mass_from(
                        list_start, ids_start, number, largest, 1.0 / temperature, reach,
                        -(1 << 31), -(1 << 31), vocab_rows, False, SHIFT, LIST_TILE,
                    )  # fmt: skip
                    enough = in_list.to(tl.float64) >= row_mass.to(tl.float64) * top_p.to(tl.float64)
                if enough:
                    winner = filter_and_choose(
                        list_start, ids_start, number, largest, temperature, reach, row_mass, top_k, top_p,
                        seed, position, vocab_rows, False, SHIFT, LIST_TILE,
                    )  # fmt: skip
                else:
                    winner = filter_and_choose(
                        logits + row * row_stride, ids_start, vocab_rows, largest, temperature, reach,
                        row_mass, top_k, top_p, seed, position, vocab_rows, True, SHIFT, ROW_TILE,
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
    w, p = workspace, params
    num_chunks = triton.cdiv(vocab_rows, chunk)
    list_len = w.listed.shape[1]
    assert logits.stride(1) == 1 and w.listed.shape[0] >= num_rows, f"{num_rows} rows"
    assert w.best.numel() >= num_rows * num_chunks, f"workspace is too small for chunks of {chunk}"
    grid, sizes = (num_rows, num_chunks), (logits.stride(0), vocab_rows, num_chunks)
    chunks = triton.next_power_of_2(num_chunks)
    options = {"PDL": pdl, **({"launch_pdl": True} if pdl else {})}
    _scan[grid](
        logits, w.best, w.unfit, w.steps, w.num_listed, w.mass, *sizes, CHUNK=chunk, num_warps=4, **options
    )
    if sampled:
        _thin[grid](
            logits, w.best, w.noisy_best, w.steps, w.mass, p.temperature, p.top_k, p.top_p, p.min_p_reach,
            p.seed, p.position, *sizes, CHUNK=chunk, CHUNKS=chunks, num_warps=8, **options,
        )  # fmt: skip
        _gather[grid](
            logits, w.best, w.steps, w.num_listed, w.listed, w.listed_ids, p.temperature, p.top_k, p.top_p,
            p.min_p_reach, *sizes, list_len, CHUNK=chunk, CHUNKS=chunks, num_warps=8, **options,
        )  # fmt: skip
    _choose[(num_rows,)](
        logits, w.best, w.noisy_best, w.unfit, w.steps, w.mass, w.listed, w.listed_ids, p.temperature,
        p.top_k, p.top_p, p.min_p_reach, p.seed, p.position, chosen, finite, *sizes, list_len,
        CHUNKS=chunks, LIST_TILE=triton.next_power_of_2(list_len), ROW_TILE=chunk,
        SHIFT=_EMPTY_BITS[logits.dtype], SAMPLED=sampled, num_warps=8 if sampled else 1, **options,
    )  # fmt: skip
