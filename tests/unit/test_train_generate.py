"""The lock-step writer against a plain loop over the served model, and its scripts and roles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.layers.attention import RaggedBatch, Span
from services.target.model.llama import Llama
from tests.builders import build_tiny_llama_dir
from tools.train.dense_target import DenseTarget
from tools.train.generate import ANSWER, FORCED, USER, LockStepWriter, Plan, sample_tokens
from tools.train.loops import RUN_MIN, kept_lengths

SEED = 20261203
ROWS, MAX_LEN, VOCAB, END = 4, 100, 64, 2


@pytest.fixture
def target_dir(tmp_path: Path) -> Path:
    print(f"seed {SEED}")
    return build_tiny_llama_dir(tmp_path / "target", SEED, vocab_size=VOCAB)


def _plan(**changes: object) -> Plan:
    rng = torch.Generator().manual_seed(SEED)
    openings = torch.randint(4, VOCAB, (ROWS, 5), generator=rng)
    openings[1, 3:] = -1
    plan = Plan(
        openings=openings,
        first_role=torch.tensor([USER, ANSWER, USER, ANSWER]),
        after_user=torch.tensor([10, 11]),
        after_answer=torch.tensor([[12, 13, 14], [15, 16, -1]]),
        end_id=END,
        banned_ids=torch.tensor([0, 1]),
        user_temperature=torch.ones(ROWS),
        answer_temperature=torch.ones(ROWS),
        user_len_max=6,
        top_p=0.95,
        max_len=MAX_LEN,
        seed=SEED,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def _write(target_dir: Path, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    target = DenseTarget(target_dir, torch.device("cpu"), torch.float32)
    written = LockStepWriter(target, ROWS, MAX_LEN).write(plan)
    return written.tokens, written.roles


def test_greedy_text_is_the_argmax_of_the_served_model(target_dir: Path) -> None:
    nobody_ends = torch.tensor([0, 1, END])
    plan = _plan(
        first_role=torch.full((ROWS,), ANSWER), answer_temperature=torch.zeros(ROWS), banned_ids=nobody_ends
    )
    tokens, roles = _write(target_dir, plan)

    served = Llama.load(target_dir, torch.float32)
    c = served.config
    positions = torch.arange(MAX_LEN)
    batch = RaggedBatch(positions, positions, [Span(0, MAX_LEN, slice(0, MAX_LEN), MAX_LEN)])
    for row in range(ROWS):
        kv = torch.zeros(c.num_layers, 2, MAX_LEN, c.num_kv_heads, c.head_dim)
        hidden, _ = served.forward(tokens[row], kv, batch)
        logits = served.logits(hidden)
        logits[:, nobody_ends] = float("-inf")
        sampled = roles[row, 1:] == ANSWER
        assert sampled.sum() >= MAX_LEN - 5
        assert torch.equal(tokens[row, 1:][sampled], logits.argmax(dim=-1)[:-1][sampled])


def test_scripts_are_followed_and_turns_alternate(target_dir: Path) -> None:
    # END is likely enough here that several turns fit into a row.
    plan = _plan(user_temperature=torch.full((ROWS,), 50.0), answer_temperature=torch.full((ROWS,), 50.0))
    plan = replace(plan, top_p=1.0)
    tokens, roles = _write(target_dir, plan)
    follow_ups = {(12, 13, 14), (15, 16)}
    num_turns = 0
    for row in range(ROWS):
        opening = [i for i in plan.openings[row].tolist() if i >= 0]
        ids, kinds = tokens[row].tolist(), roles[row].tolist()
        assert ids[: len(opening)] == opening and set(kinds[: len(opening)]) == {FORCED}
        assert kinds[len(opening)] == plan.first_role[row]
        assert not {0, 1} & {token for token, kind in zip(ids, kinds, strict=True) if kind != FORCED}
        phase = int(plan.first_role[row])
        position = len(opening)
        while True:
            start = position
            while position < MAX_LEN and ids[position] != END:
                assert kinds[position] == phase
                position += 1
            if position >= MAX_LEN - 4:
                break
            num_turns += 1
            if phase == USER:
                assert position - start <= plan.user_len_max
                # Cut by us, or ended by itself.
                assert kinds[position] in (FORCED, USER)
                assert ids[position + 1 : position + 3] == [10, 11]
                position += 3
            else:
                assert kinds[position] == ANSWER
                script = tuple(ids[position + 1 : position + 4])
                assert script in follow_ups or script[:2] in follow_ups
                position += 4 if script in follow_ups else 3
            phase = USER + ANSWER - phase
    assert num_turns > ROWS


def test_the_same_seed_writes_the_same_text_also_with_a_used_writer(target_dir: Path) -> None:
    target = DenseTarget(target_dir, torch.device("cpu"), torch.float32)
    writer = LockStepWriter(target, ROWS, MAX_LEN)
    first = writer.write(_plan())
    other = writer.write(_plan(seed=SEED + 1))
    again = writer.write(_plan())
    assert torch.equal(first.tokens, again.tokens)
    assert not torch.equal(first.tokens, other.tokens)


def test_sampling_follows_temperature_and_top_p() -> None:
    rng = torch.Generator().manual_seed(SEED)
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log().expand(20000, -1).contiguous()

    def frequencies(temperature: float, top_p: float) -> torch.Tensor:
        drawn = sample_tokens(logits, torch.full((20000,), temperature), top_p, rng)
        return torch.bincount(drawn, minlength=4) / 20000

    torch.testing.assert_close(frequencies(1.0, 1.0), probabilities, atol=0.015, rtol=0)
    sharpened = probabilities.square() / probabilities.square().sum()
    torch.testing.assert_close(frequencies(0.5, 1.0), sharpened, atol=0.015, rtol=0)
    # The mass before the third token is 0.8: it is kept at 0.81, and not at 0.79.
    assert frequencies(1.0, 0.79)[2] == 0 and frequencies(1.0, 0.81)[2] > 0
    assert frequencies(0.0, 1.0)[0] == 1


def test_loops_are_cut_after_one_repetition_and_other_text_is_kept() -> None:
    rng = torch.Generator().manual_seed(SEED)
    text = torch.randint(0, 1000, (3, 300), generator=rng)
    text[1, 100:] = text[1, 95:100].repeat(40)
    phrase = text[2, 50:100].clone()
    text[2, 100:150], text[2, 150:200] = phrase, phrase
    kept = kept_lengths(text).tolist()
    assert kept[0] == 300
    # The loop's first repetition begins at 100; what is kept ends where it is seen to run on.
    assert 100 <= kept[1] <= 100 + RUN_MIN
    assert 100 <= kept[2] <= 150
