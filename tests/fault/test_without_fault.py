"""The ground of the fault tests: two real services give, token for token, what the target alone gives."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.fault.conftest import VOCAB_SIZE, TinyPair
from tests.fault.crowd import UP, Ask, wait_drafter
from tools.local_stack import LocalStack
from tools.target_client import Answer, GenerateOptions, TargetClient

MAX_LEN = 128
BLOCK_SIZE = 4
GREEDY, SAMPLED = GenerateOptions(), GenerateOptions(temperature=0.8, top_p=0.95)


@pytest.fixture(scope="module")
def short_stack(tiny_pair: TinyPair) -> Iterator[LocalStack]:
    """A pair whose context ends soon, and whose target holds about eight requests in one batch."""
    flags = ("--max-len", str(MAX_LEN), "--kv-tokens", "1024", "--extend-rows-max", "48")
    with tiny_pair.stack(target_flags=flags) as stack:
        yield stack


@pytest.fixture
def client(short_stack: LocalStack) -> Iterator[TargetClient]:
    with TargetClient(short_stack.target.address) as client:
        wait_drafter(client, UP)
        yield client


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(4, VOCAB_SIZE) for _ in range(length)]


def _together(
    client: TargetClient, asks: Sequence[Ask], *, drafting: bool, at_once: int = 10
) -> list[Answer]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(
            pool.map(lambda a: client.generate(a.prompt, replace(a.options, drafting=drafting)), asks)
        )


def _endings(answers: Sequence[Answer]) -> list[tuple[Any, ...]]:
    return [
        (a.token_ids, a.finished.reason, a.finished.matched_token_id, a.finished.num_output_tokens)
        for a in answers
    ]


def _assert_same(client: TargetClient, asks: Sequence[Ask]) -> list[Answer]:
    """Drafted answers in mixed batches equal plain ones; returns the drafted ones."""
    drafted = _together(client, asks, drafting=True)
    assert _endings(drafted) == _endings(_together(client, asks, drafting=False))
    for answer in drafted:
        assert answer.finished.num_output_tokens == len(answer.token_ids)
        assert sum(answer.from_draft) == answer.finished.num_accepted_tokens
    return drafted


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_fifty_prompts_in_mixed_batches_give_the_plain_tokens(
    client: TargetClient, rng: random.Random, sampling: GenerateOptions
) -> None:
    asks = []
    for _ in range(50):
        prompt = _prompt(rng, rng.randint(1, 80))
        longest = min(40, MAX_LEN - len(prompt))
        options = replace(sampling, max_new_tokens=rng.randint(1, longest), seed=rng.randrange(2**64))
        asks.append(Ask(prompt, options))
    drafted = _assert_same(client, asks)
    assert sum(a.finished.num_accepted_tokens for a in drafted) > 50


@pytest.mark.parametrize("before_end", range(1, BLOCK_SIZE + 2))
def test_prompts_that_end_just_before_the_context_does_give_the_plain_tokens(
    client: TargetClient, rng: random.Random, before_end: int
) -> None:
    asks = [
        Ask(_prompt(rng, MAX_LEN - before_end), replace(sampling, seed=i, ignore_eos=True))
        for i in range(3)
        for sampling in (GREEDY, SAMPLED)
    ]
    for answer in _assert_same(client, asks):
        assert len(answer.token_ids) == before_end, "absent max_new_tokens means up to the context limit"


def test_a_stop_at_every_offset_of_a_block_ends_drafted_and_plain_alike(
    client: TargetClient, rng: random.Random
) -> None:
    prompt = _prompt(rng, 20)
    free = replace(SAMPLED, max_new_tokens=40, seed=5, ignore_eos=True)
    tokens = client.generate(prompt, replace(free, drafting=False)).token_ids
    asks = [
        Ask(prompt, replace(free, stop_token_ids=(tokens[offset],)))
        for offset in range(8, 8 + 3 * BLOCK_SIZE)
    ]
    asks += [Ask(prompt, replace(free, max_new_tokens=8 + i)) for i in range(3 * BLOCK_SIZE)]
    drafted = _assert_same(client, asks)
    stopped = [a for a in drafted if a.finished.HasField("matched_token_id")]
    assert len(stopped) == 3 * BLOCK_SIZE
    for answer in stopped:
        assert answer.token_ids[-1] == answer.finished.matched_token_id
        assert answer.token_ids == tokens[: len(answer.token_ids)]


def test_a_request_gives_the_same_tokens_alone_and_in_a_crowd(
    client: TargetClient, rng: random.Random
) -> None:
    asks = [
        Ask(_prompt(rng, rng.randint(1, 60)), replace(SAMPLED, max_new_tokens=30, seed=i)) for i in range(10)
    ]
    alone = [client.generate(a.prompt, a.options) for a in asks]
    assert _endings(_together(client, asks, drafting=True)) == _endings(alone)
