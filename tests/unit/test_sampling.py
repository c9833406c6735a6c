"""Sampling: the noise against published vectors and plain integers, filters against their definition."""

from __future__ import annotations

import math
import random

import pytest
import torch

from services.target.core import sampling
from services.target.core.request import SamplingParams
from services.target.core.sampling import choose_tokens, gumbel_noise, philox, surviving_tokens
from tests.reference.naive_sampling import gumbel, philox4x32, survivors

SEED = 20261207
# Rounding of fp32 against fp64 in a sum of probabilities.
SLACK = 1e-5

# Known-answer vectors for philox4x32 with 10 rounds, published with Random123 (kat_vectors):
# counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]  # fmt: skip


def some_params(rng: random.Random, vocab: int) -> SamplingParams:
    """Any mixture of filters, extreme values included."""
    return SamplingParams(
        temperature=rng.choice([1e-3, 0.3, 0.8, 1.0, 2.0, 100.0]),
        top_k=rng.choice([0, 0, 1, 2, rng.randint(1, vocab), vocab, 4 * vocab]),
        top_p=rng.choice([1.0, 1.0, 1e-9, 0.5, 0.95, 0.999999, rng.uniform(0.01, 1)]),
        min_p=rng.choice([0.0, 0.0, 1e-6, 0.05, 0.5, 1.0]),
        seed=rng.randrange(2**64),
    )


def some_logits(rng: random.Random, vocab: int) -> torch.Tensor:
    """A row with outliers, equal values and tokens that are ruled out."""
    row = torch.tensor([rng.gauss(0, rng.choice([0.1, 3])) for _ in range(vocab)])
    if rng.random() < 0.5:
        row = row.round(decimals=rng.choice([0, 1]))
    for _ in range(rng.choice([0, 3, vocab // 2])):
        row[rng.randrange(vocab)] = -math.inf
    if rng.random() < 0.3:
        row[rng.sample(range(vocab), 3)] = 9.0
    if row.max() == -math.inf:
        row[rng.randrange(vocab)] = 0.0
    return row


def naive_survivors(row: torch.Tensor, p: SamplingParams, slack: float) -> list[int]:
    return survivors(
        row.tolist(), temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p, slack=slack
    )


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_plain_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == expected


def test_the_tensor_philox_equals_the_plain_one_at_random_and_extreme_words() -> None:
    rng = random.Random(SEED)
    extremes = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
    for _ in range(60):
        seed = rng.choice([0, 2**32 - 1, 2**32, 2**64 - 1, rng.randrange(2**64)])
        position = rng.choice([*extremes, rng.randrange(2**20)])
        ids = [*extremes, *(rng.randrange(2**32) for _ in range(20))]
        words = torch.stack(philox(seed, torch.tensor(ids), position), dim=1).tolist()
        key = (seed & 0xFFFFFFFF, seed >> 32)
        assert words == [list(philox4x32((i, position, 0, 0), key)) for i in ids], (seed, position)


def test_the_noise_is_gumbel_of_the_plain_uniform_number() -> None:
    rng = random.Random(SEED + 1)
    # Few of many ids, and most of few: two ways to the same words.
    for vocab_rows, count in [(200_000, 50), (4, 1), (61, 16), (61, 60), (64, 64), (5, 5), (1, 1)] * 3:
        seed, position = rng.randrange(2**64), rng.randrange(2**20)
        ids = rng.sample(range(vocab_rows), count)
        noise = gumbel_noise(seed, position, torch.tensor(ids), vocab_rows)
        expected = torch.tensor([gumbel(seed, position, i) for i in ids])
        torch.testing.assert_close(noise, expected, rtol=1e-5, atol=1e-5)


def test_the_noise_of_the_extreme_words_spans_less_than_the_cut_assumes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampling, "philox", lambda *_: (torch.tensor([0]), torch.tensor([2**32 - 1])) * 2)
    noise = gumbel_noise(0, 0, torch.arange(2), 2)
    assert torch.isfinite(noise).all()
    assert 0 < (noise.max() - noise.min()).item() < sampling._NOISE_SPAN


@pytest.mark.parametrize("round_", range(12))
def test_the_filters_keep_what_their_definition_keeps(round_: int) -> None:
    rng = random.Random(SEED * 100 + round_)
    for _ in range(25):
        vocab = rng.choice([5, 40, 300])
        row, p = some_logits(rng, vocab), some_params(rng, vocab)
        ids, values = surviving_tokens(row, p)
        kept = set(ids.tolist())
        assert len(kept) == len(ids) >= 1, p
        torch.testing.assert_close(values, row[ids] / p.temperature)
        surely = set(naive_survivors(row, p, -SLACK))
        perhaps = set(naive_survivors(row, p, SLACK))
        if p.top_k == 0 and p.top_p == 1:
            # Tokens that no noise could lift to the top are left out early.
            reachable = (row / p.temperature).max() - sampling._NOISE_SPAN
            surely = {i for i in surely if row[i] / p.temperature > reachable + 1e-4}
        assert surely <= kept <= perhaps, p


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.9999])
def test_a_flat_row_of_a_large_vocabulary_is_cut_where_the_definition_cuts_it(top_p: float) -> None:
    rng = random.Random(SEED + 2)
    row = torch.tensor([rng.gauss(0, 0.2) for _ in range(12_000)])
    p = SamplingParams(temperature=1.0, top_p=top_p)
    ids, _ = surviving_tokens(row, p)
    assert len(naive_survivors(row, p, -SLACK)) <= len(ids) <= len(naive_survivors(row, p, SLACK))
    assert set(ids.tolist()) == set(naive_survivors(row, p, 1.0)[: len(ids)])


def test_of_equal_logits_at_the_edge_of_top_k_the_lowest_ids_stay() -> None:
    row = torch.tensor([1.0, 5.0, 3.0, 3.0, 3.0, -1.0])
    ids, _ = surviving_tokens(row, SamplingParams(temperature=1.0, top_k=3))
    assert ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("round_", range(6))
def test_the_chosen_token_is_the_argmax_of_logit_and_noise_over_the_survivors(round_: int) -> None:
    rng = random.Random(SEED * 10 + round_)
    compared = 0
    for _ in range(30):
        vocab = rng.choice([5, 40, 300])
        row, p, position = some_logits(rng, vocab), some_params(rng, vocab), rng.randrange(1 << 20)
        kept = naive_survivors(row, p, SLACK)
        if kept != naive_survivors(row, p, -SLACK):
            continue
        score = {i: row[i].item() / p.temperature + gumbel(p.seed, position, i) for i in kept}
        best, second, *_ = *sorted(score.values(), reverse=True), -math.inf, -math.inf
        # The scores are fp32 there: at T 1e-3 they are thousands, and so is the rounding of 1e-7.
        if best - second < 1e-5 * max(1.0, abs(best)) and best != second:
            continue
        compared += 1
        token = choose_tokens(row.unsqueeze(0), [p], [position]).item()
        assert score[int(token)] == pytest.approx(best, abs=1e-9), p
    assert compared > 15


def test_greedy_takes_the_highest_logit_and_the_lowest_id_of_equals() -> None:
    rows = torch.tensor([[0.0, 2.0, 2.0, -1.0], [7.0, 7.0, 7.0, 7.0], [-math.inf, -3.0, -math.inf, -3.0]])
    assert choose_tokens(rows, [SamplingParams()] * 3, [5, 6, 7]).tolist() == [1, 0, 1]


def test_drawn_tokens_follow_the_softmax_of_what_the_filters_keep() -> None:
    row = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -30.0])
    num_draws = 1000
    for p in (
        SamplingParams(temperature=1.0, seed=SEED),
        SamplingParams(temperature=0.7, top_k=5, seed=SEED),
        SamplingParams(temperature=1.3, top_p=0.8, seed=SEED),
        SamplingParams(temperature=1.0, min_p=0.2, seed=SEED),
    ):
        drawn = choose_tokens(row.expand(num_draws, -1), [p] * num_draws, range(num_draws))
        counts = torch.bincount(drawn, minlength=len(row)).double()
        kept = naive_survivors(row, p, 0.0)
        expected = torch.zeros(len(row), dtype=torch.float64)
        expected[kept] = torch.softmax(row[kept].double() / p.temperature, dim=0) * num_draws
        assert counts[expected == 0].sum() == 0
        likely = expected > 5
        statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum().item()
        # Chance exceeds this less than once in 10,000 for 8 degrees of freedom.
        assert statistic < 31.8, (p, counts, expected)


def test_neighbouring_positions_and_seeds_draw_independently() -> None:
    """Pairs of draws fill the square evenly: 16 cells, 15 degrees of freedom."""
    row = torch.zeros(4)
    num_draws = 1000
    params = [SamplingParams(temperature=1.0, seed=SEED)] * num_draws
    other_seed = [SamplingParams(temperature=1.0, seed=SEED + 1)] * num_draws
    here = choose_tokens(row.expand(num_draws, -1), params, range(num_draws))
    following = choose_tokens(row.expand(num_draws, -1), params, range(1, num_draws + 1))
    other = choose_tokens(row.expand(num_draws, -1), other_seed, range(num_draws))
    for second in (following, other):
        cells = torch.bincount(here * 4 + second, minlength=16).double()
        statistic = ((cells - num_draws / 16) ** 2 / (num_draws / 16)).sum().item()
        assert statistic < 44.3, cells


def test_a_row_gives_the_same_token_whatever_rows_share_its_batch() -> None:
    rng = random.Random(SEED + 3)
    vocab, num_rows = 200, 24
    rows = torch.stack([some_logits(rng, vocab) for _ in range(num_rows)])
    params = [some_params(rng, vocab) if rng.random() < 0.8 else SamplingParams() for _ in range(num_rows)]
    positions = [rng.randrange(4096) for _ in range(num_rows)]
    together = choose_tokens(rows, params, positions).tolist()
    alone = [choose_tokens(rows[i : i + 1], [params[i]], [positions[i]]).item() for i in range(num_rows)]
    order = rng.sample(range(num_rows), num_rows)
    shuffled = choose_tokens(rows[order], [params[i] for i in order], [positions[i] for i in order]).tolist()
    assert together == alone == [shuffled[order.index(i)] for i in range(num_rows)]


@pytest.mark.parametrize(
    "p",
    [
        SamplingParams(temperature=1e-3),
        SamplingParams(temperature=100.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=1e-9),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=0.8, top_k=1 << 22, top_p=1e-3, min_p=1e-6),
    ],
)
def test_extreme_values_leave_the_one_best_token(p: SamplingParams) -> None:
    p.check()
    generator = torch.Generator().manual_seed(SEED)
    for position in range(50):
        row = torch.randn(500, generator=generator)
        row[row.argmax()] += 10
        assert choose_tokens(row.unsqueeze(0), [p], [position]).item() == row.argmax().item()


def test_a_token_at_minus_infinity_is_never_chosen() -> None:
    row = torch.full((64,), -math.inf)
    row[[9, 30]] = 0.0
    rng = random.Random(SEED + 4)
    for position in range(60):
        p = some_params(rng, 64)
        assert choose_tokens(row.unsqueeze(0), [p], [position]).item() in (9, 30), p
