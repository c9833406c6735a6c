"""What `sample` must do, on whichever device it is run."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from common.kernels import gumbel
from common.kernels.sampling import RowParams, SamplingWorkspace, min_p_reach, sample
from tests.reference.kernels import sampling as reference

# Sums of probabilities in fp32 against fp64, and noise through fp32 logarithms.
SHARE_SLACK, SCORE_SLACK = 1e-5, 1e-4


@dataclass(frozen=True)
class Params:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def some_params(rng: random.Random, vocab: int) -> Params:
    """Any mixture of filters, extreme values included."""
    return Params(
        temperature=rng.choice([0.0, 1e-2, 0.3, 0.8, 1.0, 2.0, 100.0]),
        top_k=rng.choice([0, 0, 1, 2, 40, rng.randint(1, vocab), vocab, 4 * vocab]),
        top_p=rng.choice([1.0, 1.0, 1e-9, 0.5, 0.95, 0.999999, rng.uniform(0.01, 1)]),
        min_p=rng.choice([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
        seed=rng.randrange(2**64),
        position=rng.randrange(2**20),
    )


def some_logits(rng: random.Random, vocab: int) -> torch.Tensor:
    """A row with outliers, equal values and tokens that are ruled out."""
    values = torch.Generator().manual_seed(rng.randrange(2**32))
    row = torch.randn(vocab, generator=values) * rng.choice([0.1, 3, 10])
    if rng.random() < 0.5:
        row = row.round(decimals=rng.choice([0, 1]))
    for _ in range(rng.choice([0, 3, vocab // 2])):
        row[rng.randrange(vocab)] = -math.inf
    if rng.random() < 0.3:
        row[rng.sample(range(vocab), 3)] = 9.0
    row[rng.randrange(vocab)] = rng.choice([0.0, -0.0, 12.0])
    return row


def run_sample(
    logits: torch.Tensor,
    params: list[Params],
    *,
    chunk: int,
    list_len: int,
    pdl: bool = False,
    sampled: bool = True,
) -> tuple[list[int], list[int]]:
    """Chosen ids and finite flags; every scratch and output is poisoned first."""
    device, (num_rows, vocab) = logits.device, logits.shape
    space = SamplingWorkspace.allocate(num_rows, vocab, device, chunk=chunk, list_len=list_len)
    for scratch in (
        space.best,
        space.noisy_best,
        space.unfit,
        space.num_listed,
        space.mass,
        space.listed_ids,
    ):
        scratch.fill_(77_777)
    space.listed.fill_(float("nan"))

    def column(dtype: torch.dtype, *values: float) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    signed = [p.seed - 2**64 if p.seed >= 2**63 else p.seed for p in params]
    rows = RowParams(
        temperature=column(torch.float32, *(p.temperature for p in params)),
        top_k=column(torch.int32, *(p.top_k for p in params)),
        top_p=column(torch.float32, *(p.top_p for p in params)),
        min_p_reach=column(torch.float32, *(min_p_reach(p.min_p) for p in params)),
        seed=column(torch.int64, *signed),
        position=column(torch.int64, *(p.position for p in params)),
    )
    chosen = torch.full((num_rows,), -7, dtype=torch.int64, device=device)
    finite = torch.full((num_rows,), -7, dtype=torch.int32, device=device)
    sample(logits, rows, chosen, finite, space, sampled=sampled, chunk=chunk, pdl=pdl)
    return chosen.tolist(), finite.tolist()


def assert_right(row: torch.Tensor, p: Params, token: int) -> None:
    """token is the choice of the definition, or one that rounding may prefer."""
    if p.temperature == 0:
        wide = row.float().cpu()
        assert token == int((wide == wide.max()).nonzero()[0]), p
        return
    kept_for_sure = reference.noisy_scores(row, **vars(p), slack=-SHARE_SLACK)
    kept_perhaps = reference.noisy_scores(row, **vars(p), slack=SHARE_SLACK)
    assert kept_perhaps[token] > -math.inf, (p, "a filter drops it")
    assert kept_perhaps[token] >= kept_for_sure.max() - SCORE_SLACK, (p, "another has the highest score")


def check_chooses_as_defined(
    device: str, dtype: torch.dtype, seed: int, *, num_rows: int, vocab: int, chunk: int, list_len: int,
    pdl: bool = False,
) -> None:  # fmt: skip
    rng = random.Random(seed)
    params = [some_params(rng, vocab) for _ in range(num_rows)]
    wide = torch.full((num_rows, vocab + 5), float("nan"), dtype=dtype, device=device)
    logits = wide[:, :vocab]
    for i in range(num_rows):
        logits[i] = some_logits(rng, vocab).to(device, dtype)
    chosen, finite = run_sample(logits, params, chunk=chunk, list_len=list_len, pdl=pdl)
    assert finite == [1] * num_rows
    for i, token in enumerate(chosen):
        assert_right(logits[i], params[i], token)


def check_a_row_alone_equals_the_row_in_a_batch(
    device: str, dtype: torch.dtype, seed: int, *, vocab: int, chunk: int, list_len: int
) -> None:
    rng = random.Random(seed)
    params = [some_params(rng, vocab) for _ in range(6)]
    logits = torch.stack([some_logits(rng, vocab) for _ in params]).to(device, dtype)
    together, _ = run_sample(logits, params, chunk=chunk, list_len=list_len)
    for i, p in enumerate(params):
        # Also where the row is read in other pieces, and its list is too short.
        for other in ((chunk, list_len), (chunk * 2, 8)):
            alone, _ = run_sample(logits[i : i + 1], [p], chunk=other[0], list_len=other[1])
            assert alone == [together[i]], (p, other)


def check_rows_that_are_not_finite_are_named(device: str, dtype: torch.dtype, *, chunk: int) -> None:
    vocab = 300
    logits = torch.zeros(5, vocab, dtype=dtype, device=device)
    logits[0, 299] = float("nan")
    logits[1, 7] = float("inf")
    logits[2] = float("-inf")
    logits[3, 1:] = float("-inf")
    for p in (Params(), Params(temperature=1.0), Params(temperature=1.0, top_k=5, top_p=0.9)):
        chosen, finite = run_sample(logits, [p] * 5, chunk=chunk, list_len=64)
        assert finite == [0, 0, 0, 1, 1]
        assert all(0 <= token < vocab for token in chosen) and chosen[3] == 0


def check_greedy_without_parameters(
    device: str, dtype: torch.dtype, seed: int, *, vocab: int, chunk: int
) -> None:
    rng = random.Random(seed)
    logits = torch.stack([some_logits(rng, vocab) for _ in range(4)]).to(device, dtype)
    chosen, _ = run_sample(logits, [Params(temperature=9.0)] * 4, chunk=chunk, list_len=8, sampled=False)
    for i, token in enumerate(chosen):
        assert_right(logits[i], Params(), token)


def check_words_are_the_published_ones(device: str, seed: int) -> None:
    """Bit for bit those of the reference, the noise to the rounding of fp32 logarithms."""

    # Decorated here, where it is decided whether kernels are compiled or interpreted.
    @triton.jit
    def write(words, noise, seeds, position, SIZE: tl.constexpr):
        fours = tl.arange(0, SIZE)
        seed = tl.load(seeds)
        w0, w1, w2, w3 = gumbel.hash_words(seed, position, fours)
        tl.store(words + fours * 4, w0.to(tl.int64))
        tl.store(words + fours * 4 + 1, w1.to(tl.int64))
        tl.store(words + fours * 4 + 2, w2.to(tl.int64))
        tl.store(words + fours * 4 + 3, w3.to(tl.int64))
        ids = tl.arange(0, 4 * SIZE)
        tl.store(noise + ids, gumbel.gumbel_noise(seed, position, ids))

    rng = random.Random(seed)
    for _ in range(5):
        seed, position = rng.randrange(2**64), rng.randrange(1, 2**31)
        words = torch.zeros(256, 4, dtype=torch.int64, device=device)
        noise = torch.zeros(1024, device=device)
        seeds = torch.tensor([seed - 2**64 if seed >= 2**63 else seed], device=device)
        write[(1,)](words, noise, seeds, position, SIZE=256)
        # uint32 reads back as int64 with its sign in some versions.
        assert torch.equal(words.cpu() & 0xFFFFFFFF, reference.hash_words(seed, position, 256))
        assert (noise.cpu().double() - reference.gumbel(seed, position, 1024)).abs().max() < 5e-6


def _telling_seeds(row: torch.Tensor, p: Params, ids: list[int]) -> list[int]:
    """For each of ids a seed under which it has the highest score of them: a filter that wrongly keeps or
    drops it is then seen."""
    seeds: dict[int, int] = {}
    for seed in range(100_000):
        scores = row.double() / p.temperature + reference.gumbel(seed, p.position, len(row))
        seeds.setdefault(ids[int(scores[ids].argmax())], seed)
        if len(seeds) == len(ids):
            return list(seeds.values())
    raise AssertionError("no seed tells them all apart")


def check_filters_keep_exactly_the_defined_tokens(
    device: str, dtype: torch.dtype, *, list_len: int, chunk: int = 128, stride: int = 1
) -> None:
    """stride: every so many of the cases."""
    vocab = 300
    ties = list(range(30, 250, 20))  # 11 tokens
    equal = torch.full((vocab,), -20.0)
    equal[ties] = 1.0
    tail = torch.full((vocab,), math.log(0.4 / 296))  # together 0.4
    heads = [9, 150, 151, 299]
    tail[heads] = math.log(0.15)
    stairs = torch.full((vocab,), -30.0)
    steps = [5, 6, 7, 8, 200]
    stairs[steps] = torch.tensor([1.0, 1.5, 1.5, 1.0, 1.25])
    cases = (
        (equal, ties, Params(1.0, top_k=5), {30, 50, 70, 90, 110}),
        (equal, ties, Params(1.0, top_p=0.5), {30, 50, 70, 90, 110, 130}),
        (equal, ties, Params(1.0, top_k=8, top_p=0.49), {30, 50, 70, 90}),
        (equal, ties, Params(1.0, top_k=8, top_p=0.51), {30, 50, 70, 90, 110}),
        (equal, ties, Params(1.0, top_k=8, min_p=1.0), set(range(30, 190, 20))),
        # The tail is too long for the list, and counts in the mass.
        (tail, heads, Params(1.0, top_p=0.5), {9, 150, 151, 299}),
        (tail, heads, Params(1.0, top_p=0.44), {9, 150, 151}),
        (tail, heads, Params(1.0, top_k=4, top_p=0.5), {9, 150}),
        (stairs, steps, Params(1.0, top_k=4), {5, 6, 7, 200}),
        (stairs, steps, Params(1.0, top_k=5, min_p=0.7), {6, 7, 200}),
        (stairs, steps, Params(1.0, top_p=0.65), {6, 7, 200}),
        (stairs, steps, Params(1.0, top_p=0.75), {5, 6, 7, 200}),
    )
    for row, ids, p, kept in cases[::stride]:
        row = row.to(dtype)
        params = [
            replace(p, seed=seed, position=3) for seed in _telling_seeds(row, replace(p, position=3), ids)
        ]
        rows = row.to(device).expand(len(params), vocab).contiguous()
        chosen, _ = run_sample(rows, params, chunk=chunk, list_len=list_len)
        for token, each in zip(chosen, params, strict=True):
            scores = reference.noisy_scores(
                row, **vars(replace(each, top_k=0, top_p=1.0, min_p=0.0)), slack=0
            )
            assert token == max(kept, key=lambda i, scores=scores: float(scores[i])), each
