"""Output identity (I1): whatever a drafter proposes, the tokens are those of plain decoding.

In process, fp32, a random tiny Llama. Plain means: alone, no drafts, the prompt in one piece.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.target.core.request import FinishReason, SamplingParams
from services.target.model.llama import Llama
from tests.builders import build_tiny_llama_dir
from tests.core_rig import Ask, Habits, OracleDrafts, Rig, Tape, plain_tokens
from tests.reference.naive_llama import NaiveLlama
from tests.reference.naive_sampling import gumbel, survivors

SEED = 20261210
MAX_LEN = 96
BLOCK = 8
VOCAB = 192
HABITS = Habits(spoil=0.4, hostile=0.15, absent=0.15)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Untied: a tied random model soon repeats itself.
    return build_tiny_llama_dir(tmp_path_factory.mktemp("target"), SEED, max_len=MAX_LEN, tied=False)


@pytest.fixture(scope="module")
def model(directory: Path) -> Llama:
    return Llama.load(directory, torch.float32)


def some_prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def sampled(rng: random.Random) -> SamplingParams:
    return SamplingParams(temperature=0.8, top_p=0.95, seed=rng.randrange(2**64))


def mixed_asks(rng: random.Random, count: int, *, sample: bool, tokens: int = 30) -> list[Ask]:
    """Prompts and outputs of mixed lengths; the two together stay within the context."""
    asks = []
    for _ in range(count):
        max_new_tokens = rng.randint(1, tokens)
        prompt = some_prompt(rng, rng.randint(1, MAX_LEN - max_new_tokens))
        asks.append(Ask(prompt, max_new_tokens, sampled(rng) if sample else SamplingParams()))
    return asks


def run_drafted(
    model: Llama, asks: list[Ask], plain: list[list[int]], seed: int, habits: Habits,
    *, truths: dict[tuple[int, ...], list[int]] | None = None, **rig: object,
) -> Rig:  # fmt: skip
    """Run the asks with an oracle, and compare. truths: what it knows by prompt; default the plain tokens."""
    print(f"seed {seed}")
    if truths is None:
        truths = {tuple(ask.prompt): tokens for ask, tokens in zip(asks, plain, strict=True)}
        assert len(truths) == len(asks), "two asks share a prompt"
    rng = random.Random(seed)
    run = Rig(
        model,
        drafts=lambda rig: OracleDrafts(rig, truths, rng, num_draft_tokens=BLOCK - 1, habits=habits),
        scatter=rng,
        **rig,  # type: ignore[arg-type]
    )
    for tape, tokens in zip(run.run(asks), plain, strict=True):
        assert tape.tokens == tokens, tape.ask
        check_counts(tape)
    return run


def check_counts(tape: Tape) -> None:
    """What the terminal event tells agrees with what was streamed."""
    finished = tape.finished
    assert finished.num_output_tokens == len(tape.tokens)
    assert finished.num_prompt_tokens == len(tape.ask.prompt)
    assert finished.num_accepted_tokens == sum(tape.from_draft)
    assert finished.num_accepted_tokens <= finished.num_draft_tokens
    ended_by_stop = finished.matched_token_id is not None
    # Each decode step gives one token of the target's own, unless a stop came in the accepted part.
    assert len(tape.tokens) - sum(tape.from_draft) in (
        finished.num_decode_steps, finished.num_decode_steps - ended_by_stop
    )  # fmt: skip


def test_plain_decoding_equals_a_naive_dense_loop(directory: Path, model: Llama) -> None:
    rng, reference = random.Random(SEED), NaiveLlama(directory)
    asks = [
        Ask(some_prompt(rng, 5), 12),
        Ask(some_prompt(rng, 17), 12),
        Ask(some_prompt(rng, 9), 12, SamplingParams(temperature=0.8, top_p=0.95, seed=rng.randrange(2**64))),
        Ask(some_prompt(rng, 3), 12, SamplingParams(temperature=1.2, top_k=20, seed=rng.randrange(2**64))),
        Ask(some_prompt(rng, 4), 12, SamplingParams(temperature=2.0, min_p=0.1, seed=rng.randrange(2**64))),
    ]
    for tape in Rig(model, extend_rows_max=4).run(asks):
        tokens = list(tape.ask.prompt)
        for token in tape.tokens:
            logits = reference.forward(tokens)[0][-1]
            assert token in naive_choices(logits, tape.ask.sampling, len(tokens))
            tokens.append(token)


def naive_choices(logits: torch.Tensor, p: SamplingParams, position: int) -> set[int]:
    """The token, or those that rounding might exchange."""
    if p.temperature == 0:
        score = dict(enumerate(logits.tolist()))
    else:
        kept = survivors(
            logits.tolist(), temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p
        )
        score = {i: logits[i].item() / p.temperature + gumbel(p.seed, position, i) for i in kept}
    best = max(score.values())
    return {i for i, value in score.items() if value > best - 1e-3}


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_fifty_prompts_in_batches_of_mixed_lengths_give_the_plain_tokens(model: Llama, sample: bool) -> None:
    rng = random.Random(SEED + sample)
    asks = mixed_asks(rng, 50, sample=sample)
    plain = plain_tokens(model, asks)
    run = run_drafted(model, asks, plain, SEED, HABITS, num_running_max=9)
    accepted = sum(tape.finished.num_accepted_tokens for tape in run.tapes)
    assert accepted > 0.2 * sum(map(len, plain))


def test_an_exact_oracle_is_accepted_whole_at_every_step(model: Llama) -> None:
    rng = random.Random(SEED + 2)
    num_steps = 5
    max_new_tokens = 1 + num_steps * BLOCK
    asks = [
        Ask(some_prompt(rng, rng.randint(1, 50)), max_new_tokens, sampled(rng) if i % 2 else SamplingParams())
        for i in range(6)
    ]
    run = run_drafted(model, asks, plain_tokens(model, asks), SEED, Habits())
    for tape in run.tapes:
        # The first token comes from the prompt; then each step commits a whole block.
        assert tape.from_draft == [False] + ([True] * (BLOCK - 1) + [False]) * num_steps
        assert tape.finished.num_drafts == num_steps
        assert tape.finished.num_accepted_tokens == tape.finished.num_draft_tokens == num_steps * (BLOCK - 1)
    verifies = [v for report in run.observer.reports for v in report.verifies]
    assert verifies == [(BLOCK - 1, BLOCK - 1)] * (num_steps * len(asks))


@pytest.mark.parametrize("shortfall", [1, 2, BLOCK, BLOCK - 1])
def test_prompts_near_the_context_limit_give_the_plain_tokens(model: Llama, shortfall: int) -> None:
    rng = random.Random(SEED + shortfall)
    asks = [
        Ask(some_prompt(rng, MAX_LEN - shortfall), shortfall, sampled(rng) if i % 2 else SamplingParams())
        for i in range(6)
    ]
    plain = plain_tokens(model, asks)
    assert all(len(tokens) == shortfall for tokens in plain)
    run_drafted(model, asks, plain, SEED, Habits())
    run_drafted(model, asks, plain, SEED, HABITS)


@pytest.mark.parametrize("exact", [True, False], ids=["exact drafts", "erring drafts"])
def test_every_number_of_tokens_around_a_block_is_kept_to(model: Llama, exact: bool) -> None:
    rng = random.Random(SEED + 3)
    asks = [Ask(some_prompt(rng, rng.randint(1, 30)), count, sampled(rng)) for count in range(1, BLOCK + 3)]
    run = run_drafted(model, asks, plain_tokens(model, asks), SEED, Habits() if exact else HABITS)
    for tape in run.tapes:
        assert tape.finished.reason is FinishReason.LENGTH
        # The last token is always the target's own: no draft row lies past what may be committed.
        assert tape.from_draft[-1] is False


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_a_stop_at_every_offset_inside_a_block_ends_the_request_with_it(model: Llama, sample: bool) -> None:
    """The drafter knows what would follow the stop, and proposes it."""
    rng = random.Random(SEED + 4)
    sampling = SamplingParams(temperature=1.2, seed=7) if sample else SamplingParams()
    prompt, tokens = prompt_with_distinct_tokens(model, rng, sampling, 2 * BLOCK + 2)
    asks = [Ask(prompt, 40, sampling, frozenset({stop})) for stop in tokens[: 2 * BLOCK + 2]]
    plain = [tokens[: offset + 1] for offset in range(len(asks))]
    assert plain_tokens(model, asks) == plain
    for habits in (Habits(), HABITS):
        run = run_drafted(model, asks, plain, SEED, habits, truths={tuple(prompt): tokens})
        for offset, tape in enumerate(run.tapes):
            assert tape.finished.reason is FinishReason.STOP
            assert tape.finished.matched_token_id == tokens[offset]
            if habits == Habits():
                # Token 0 is the prompt's; the stop was drafted unless it is the bonus of its block.
                assert tape.from_draft[-1] is (offset % BLOCK != 0)


def prompt_with_distinct_tokens(
    model: Llama, rng: random.Random, sampling: SamplingParams, count: int
) -> tuple[list[int], list[int]]:
    """A prompt and its output, whose first `count` tokens differ: a stop there matches nothing earlier."""
    for _ in range(200):
        prompt = some_prompt(rng, 9)
        tokens = plain_tokens(model, [Ask(prompt, count, sampling)])[0]
        if len(set(tokens)) == count:
            return prompt, plain_tokens(model, [Ask(prompt, 40, sampling)])[0]
    raise AssertionError("no such prompt")


def test_the_last_token_that_is_both_stop_and_limit_counts_as_stop(model: Llama) -> None:
    prompt, tokens = prompt_with_distinct_tokens(model, random.Random(SEED + 6), SamplingParams(), 5)
    tape = Rig(model).run([Ask(prompt, 5, stop_token_ids=frozenset({tokens[4]}))])[0]
    assert tape.tokens == tokens[:5]
    assert (tape.finished.reason, tape.finished.matched_token_id) == (FinishReason.STOP, tokens[4])


@pytest.mark.parametrize("extend_rows_max", [1, 3, 17])
def test_prompts_in_small_chunks_give_the_plain_tokens(model: Llama, extend_rows_max: int) -> None:
    rng = random.Random(SEED + 7 + extend_rows_max)
    asks = mixed_asks(rng, 8, sample=True)
    run_drafted(
        model, asks, plain_tokens(model, asks), SEED, HABITS, extend_rows_max=extend_rows_max, page_size=3
    )


@pytest.mark.parametrize("habits", [Habits(), HABITS], ids=["exact drafts", "erring drafts"])
@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 100), (4, 26), (16, 7)])
def test_requests_that_preempt_each_other_give_the_plain_tokens(
    model: Llama, page_size: int, num_pages: int, habits: Habits
) -> None:
    rng = random.Random(SEED + 8)
    asks = [
        Ask(some_prompt(rng, rng.randint(1, 40)), 50, sampled(rng) if i % 2 else SamplingParams())
        for i in range(7)
    ]
    run = run_drafted(
        model, asks, plain_tokens(model, asks), SEED, habits, page_size=page_size, num_pages=num_pages
    )
    assert run.scheduler.num_preemptions > 0


def test_lost_contexts_are_computed_again_and_change_no_token(model: Llama) -> None:
    rng = random.Random(SEED + 9)
    asks = [replace(ask, max_new_tokens=40) for ask in mixed_asks(rng, 12, sample=True, tokens=40)]
    asks = [replace(ask, prompt=ask.prompt[:50]) for ask in asks]
    habits = replace(HABITS, lose=0.1)
    run = run_drafted(model, asks, plain_tokens(model, asks), SEED, habits, extend_rows_max=20)
    assert isinstance(run.draft_source, OracleDrafts)
    assert run.draft_source.num_lost > 5
    num_computed = sum(report.num_prompt_tokens for report in run.observer.reports)
    assert num_computed > sum(len(ask.prompt) for ask in asks), "nothing was computed again"


def test_the_context_that_a_drafter_holds_is_the_dense_captured_states(directory: Path, model: Llama) -> None:
    """Every row at its own position: through chunks, rejections, losses and preemptions."""
    rng, reference = random.Random(SEED + 10), NaiveLlama(directory)
    asks = [Ask(some_prompt(rng, rng.randint(2, 30)), 40, sampled(rng)) for _ in range(6)]
    habits = replace(HABITS, lose=0.02)
    run = run_drafted(
        model, asks, plain_tokens(model, asks), SEED, habits, extend_rows_max=7, num_pages=24, page_size=8
    )
    assert isinstance(run.draft_source, OracleDrafts)
    compared = 0
    for session_id, held in run.draft_source.contexts.items():
        request = run.draft_source.requests[session_id]
        assert len(held) < request.committed_len
        _, states = reference.forward(request.tokens[: len(held)])
        expected = torch.cat([states[0], states[2]], dim=-1)
        torch.testing.assert_close(held.double(), expected, rtol=1e-4, atol=2e-4)
        compared += len(held)
    assert compared > 150


def test_aborts_at_random_steps_end_their_requests_once_and_touch_no_other(model: Llama) -> None:
    rng = random.Random(SEED + 11)
    asks = [replace(ask, max_new_tokens=30) for ask in mixed_asks(rng, 24, sample=True, tokens=30)]
    asks = [replace(ask, prompt=ask.prompt[:40]) for ask in asks]
    plain = plain_tokens(model, asks)
    truths = {tuple(ask.prompt): tokens for ask, tokens in zip(asks, plain, strict=True)}
    rig = Rig(
        model, drafts=lambda rig: OracleDrafts(rig, truths, rng, habits=HABITS), num_pages=40, page_size=4
    )

    def abort_some() -> None:
        if rng.random() < 0.5:
            rig.loop.abort(f"r{rng.randrange(len(asks))}")

    for tape, tokens in zip(rig.run(asks, each_step=abort_some), plain, strict=True):
        if tape.finished.reason is FinishReason.ABORT:
            assert tape.tokens == tokens[: len(tape.tokens)]
        else:
            assert tape.tokens == tokens
    reasons = {tape.finished.reason for tape in rig.tapes}
    assert reasons == {FinishReason.ABORT, FinishReason.LENGTH}
    assert sorted(rig.observer.finished) == sorted(f"r{i}" for i in range(len(asks)))


def test_a_request_without_drafting_gets_none_and_hands_nothing_over(model: Llama) -> None:
    rng = random.Random(SEED + 12)
    asks = [replace(ask, drafting=bool(i % 2)) for i, ask in enumerate(mixed_asks(rng, 10, sample=False))]
    run = run_drafted(model, asks, plain_tokens(model, asks), SEED, Habits())
    for tape in run.tapes:
        assert tape.ask.drafting or tape.finished.num_drafts == 0
