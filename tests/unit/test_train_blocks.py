"""Blocks, their mask, their loss and the acceptance walk, each against its plainest form."""

from __future__ import annotations

import math

import pytest
import torch

from tools.train.acceptance import measure_acceptance
from tools.train.blocks import anchor_candidates, attention_bias, build_blocks, draw_anchors
from tools.train.corpus import Corpus
from tools.train.generate import ANSWER, FORCED, USER
from tools.train.head_loss import BlockLoss, Weighting, decay_gamma, dynamic_weights

SEED = 20261204
BLOCK, MASK = 4, 3


@pytest.fixture
def rng() -> torch.Generator:
    print(f"seed {SEED}")
    return torch.Generator().manual_seed(SEED)


def _corpus() -> Corpus:
    """One row: 3 of template, 2 of user, 5 of answer, 1 of template, 4 of answer; the last 2 are padding."""
    roles = torch.tensor(
        [[FORCED] * 3 + [USER] * 2 + [ANSWER] * 5 + [FORCED] + [ANSWER] * 4], dtype=torch.int8
    )
    tokens = torch.arange(100, 115, dtype=torch.int32).unsqueeze(0)
    return Corpus(tokens, roles, torch.tensor([13]), torch.tensor([0.8]))


def test_anchors_stand_before_answer_tokens_and_nowhere_else() -> None:
    assert anchor_candidates(_corpus())[0].nonzero().flatten().tolist() == [4, 5, 6, 7, 8, 10, 11]


def test_drawn_anchors_are_distinct_ascending_and_marked_where_they_teach_nothing(
    rng: torch.Generator,
) -> None:
    corpus = _corpus()
    seen = set()
    for _ in range(50):
        anchors, real = draw_anchors(corpus, 3, rng)
        row = anchors[0].tolist()
        assert row == sorted(set(row)) and bool(real.all())
        seen |= set(row)
    assert seen == {4, 5, 6, 7, 8, 10, 11}
    anchors, real = draw_anchors(corpus, 10, rng)
    assert int(real.sum()) == 7


def test_a_block_learns_the_tokens_after_its_anchor_up_to_the_end_of_the_answer() -> None:
    anchors = torch.tensor([[4, 7, 11]])
    blocks = build_blocks(_corpus(), anchors, torch.ones(1, 3, dtype=torch.bool), BLOCK, MASK)
    assert blocks.ids[0].tolist() == [
        [104, MASK, MASK, MASK],
        [107, MASK, MASK, MASK],
        [111, MASK, MASK, MASK],
    ]
    assert blocks.positions[0, 1].tolist() == [7, 8, 9, 10]
    assert blocks.labels[0, 0].tolist() == [105, 106, 107]
    # 8 and 9 are answer, 10 is template; behind 12 is padding.
    assert blocks.learned[0].tolist() == [[True] * 3, [True, True, False], [True, False, False]]


def test_a_block_sees_the_context_before_its_anchor_and_itself() -> None:
    bias = attention_bias(torch.tensor([[2, 5]]), 6, BLOCK, torch.float32)
    seen = (bias[0, 0] == 0).tolist()
    for row in range(2 * BLOCK):
        block, anchor = row // BLOCK, (2, 5)[row // BLOCK]
        own = range(6 + block * BLOCK, 6 + (block + 1) * BLOCK)
        assert [i for i, s in enumerate(seen[row]) if s] == [*range(anchor), *own]


@pytest.mark.parametrize("weighting", list(Weighting))
def test_the_gradient_of_the_loss_is_autograds(rng: torch.Generator, weighting: Weighting) -> None:
    blocks, rows, width, vocab = 300, BLOCK - 1, 16, 50
    lm_head = torch.randn(vocab, width, generator=rng)
    hidden = torch.randn(blocks, rows, width, generator=rng, requires_grad=True)
    labels = torch.randint(0, vocab, (blocks, rows), generator=rng)
    learned = (torch.rand(blocks, rows, generator=rng) < 0.8).cumprod(dim=-1).bool()
    found = BlockLoss(lm_head, BLOCK, weighting)(hidden.detach(), labels, learned)

    logits = hidden @ lm_head.T
    entropy = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    entropy = entropy.view(blocks, rows)
    decay = torch.tensor([math.exp(-k / decay_gamma(BLOCK)) for k in range(rows)])
    weights = decay.expand(blocks, -1)
    if weighting is Weighting.DYNAMIC:
        weights = dynamic_weights(torch.exp(-entropy.detach()) * learned)
    expected = (entropy * weights * learned).sum() / (decay * learned).sum()
    (gradient,) = torch.autograd.grad(expected, hidden)
    torch.testing.assert_close(found.loss, expected.detach())
    torch.testing.assert_close(found.grad_hidden, gradient, atol=1e-7, rtol=1e-4)
    assert torch.equal(found.hits, logits.argmax(dim=-1) == labels)


def test_decay_is_the_published_one_at_the_published_block_sizes() -> None:
    assert [round(decay_gamma(size)) for size in (8, 10, 16)] == [4, 5, 7]


def test_dynamic_weights_are_suffix_sums_of_prefix_products() -> None:
    s = [0.5 + 0.5 * chance for chance in (0.9, 0.2, 0.6)]
    products = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
    expected = torch.tensor([sum(products[k:]) for k in range(3)])
    torch.testing.assert_close(dynamic_weights(torch.tensor([[0.9, 0.2, 0.6]]))[0], expected)


def test_the_walk_jumps_over_accepted_tokens_and_begins_anew_with_each_answer() -> None:
    # Positions 1…6 and 9…10 can start a verify; K = 3.
    anchors = torch.zeros(1, 12, dtype=torch.bool)
    anchors[0, 1:7] = True
    anchors[0, 9:11] = True
    hits = torch.zeros(1, 12, 3, dtype=torch.bool)
    hits[0, 1, :2] = True  # 1 accepts 2, goes to 4
    hits[0, 2] = True  # never visited
    hits[0, 4, 1] = True  # row 1 is wrong: 0 accepted, goes to 5
    hits[0, 5, :1] = True  # 1 accepted, goes to 7, which is no anchor; on to 9
    found = measure_acceptance(hits, anchors)
    # Verifies at 1, 4, 5, 9, 10.
    assert found.num_steps == 5
    assert found.accept_length == pytest.approx(8 / 5)
    assert found.by_row == [0.4, 0.2, 0.0]
