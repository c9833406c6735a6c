"""SmolLM2 and the draft that ships, as real processes: the same tokens with drafts and without.

The promise I1 where near-ties are those of a real model, and floors on acceptance, since lossless
verification hides whatever is wrong with drafts. fp32; a row's bits do not depend on the batch in the
packed matrix products, and attention differs in the last bits only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tools.chat import ChatTokenizer
from tools.local_stack import LocalStack
from tools.target_client import Answer, GenerateOptions, TargetClient

ROOT = Path(__file__).parents[2]
MODEL_DIR = ROOT / ".models" / "SmolLM2-135M-Instruct"
DRAFT_DIR = ROOT / "models" / "SmolLM2-135M-Instruct-DFlash-b8"
BLOCK_SIZE = 8
MAX_LEN = 192
CONCURRENCY = 8

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

ASKS = (
    "Explain how {} works.", "Write a short story about {}.", "Write a Python function about {}.",
    "List five facts about {}.", "Why do people care about {}?", "What is {} and where did it come from?",
    "Write an email to a colleague about {}. Keep it friendly, and close with a question.",
)  # fmt: skip
SUBJECTS = (
    "rain", "a lighthouse", "prime numbers", "bread", "the moon", "a lost umbrella", "sorting lists",
    "bicycles", "the year 1848", "tea", "a shy robot", "fractions", "glaciers", "chess openings",
)  # fmt: skip


@dataclass(frozen=True)
class Ask:
    prompt: list[int]
    options: GenerateOptions


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(MODEL_DIR)


@pytest.fixture(scope="module")
def client() -> Iterator[TargetClient]:
    # A deadline that a busy machine meets: a missed one would only make the test prove less.
    flags = ("--max-len", str(MAX_LEN), "--draft-deadline-s", "20")
    with (
        LocalStack(MODEL_DIR, DRAFT_DIR, target_flags=flags) as stack,
        TargetClient(stack.target.address) as it,
    ):
        yield it


def chat_prompts(rng: random.Random, tokenizer: ChatTokenizer, count: int) -> list[list[int]]:
    """Prompts of 40 to 70 tokens."""
    texts = [rng.choice(ASKS).format(rng.choice(SUBJECTS)) for _ in range(count)]
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in texts]


def answers(client: TargetClient, asks: Sequence[Ask], *, drafting: bool) -> list[Answer]:
    """Eight requests at a time, so that a batch holds prompts and blocks of different requests."""

    def generate(ask: Ask) -> Answer:
        return client.generate(ask.prompt, replace(ask.options, drafting=drafting))

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return list(pool.map(generate, asks))


def accept_length(drafted: Sequence[Answer]) -> float:
    accepted = sum(answer.finished.num_accepted_tokens for answer in drafted)
    return 1 + accepted / sum(answer.finished.num_drafts for answer in drafted)


def assert_same(client: TargetClient, asks: Sequence[Ask]) -> list[Answer]:
    """Compare, and return the drafted answers."""
    plain, drafted = answers(client, asks, drafting=False), answers(client, asks, drafting=True)
    assert [answer.token_ids for answer in drafted] == [answer.token_ids for answer in plain]
    assert not any(any(answer.from_draft) for answer in plain)
    return drafted


def test_greedy_answers_are_those_of_plain_decoding(
    client: TargetClient, tokenizer: ChatTokenizer, rng: random.Random
) -> None:
    prompts = chat_prompts(rng, tokenizer, 24)
    asks = [Ask(prompt, GenerateOptions(max_new_tokens=rng.randint(6, 16))) for prompt in prompts]
    drafted = assert_same(client, asks)
    assert accept_length(drafted) > 1.6


def test_sampled_answers_are_those_of_plain_decoding(
    client: TargetClient, tokenizer: ChatTokenizer, rng: random.Random
) -> None:
    asks = [
        Ask(
            prompt,
            GenerateOptions(rng.randint(6, 16), temperature=0.8, top_p=0.95, seed=rng.randrange(2**64)),
        )
        for prompt in chat_prompts(rng, tokenizer, 24)
    ]
    drafted = assert_same(client, asks)
    assert accept_length(drafted) > 1.3


def test_a_draft_is_as_good_in_a_batch_as_alone(
    client: TargetClient, tokenizer: ChatTokenizer, rng: random.Random
) -> None:
    options = GenerateOptions(max_new_tokens=32)
    asks = [Ask(prompt, options) for prompt in chat_prompts(rng, tokenizer, CONCURRENCY)]
    alone = [client.generate(ask.prompt, ask.options) for ask in asks]
    together = answers(client, asks, drafting=True)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    # The same blocks, but for near-ties inside the draft.
    assert accept_length(together) == pytest.approx(accept_length(alone), rel=0.05)


@pytest.mark.parametrize("short_of_max_len", [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE])
def test_prompts_that_end_near_the_context_limit_fill_it_and_no_more(
    client: TargetClient, tokenizer: ChatTokenizer, rng: random.Random, short_of_max_len: int
) -> None:
    text = tokenizer.encode(" ".join(rng.choice(SUBJECTS) for _ in range(2 * MAX_LEN)))
    asks = [Ask(text[: MAX_LEN - short_of_max_len], GenerateOptions(ignore_eos=True)) for _ in range(2)]
    asks.append(
        Ask(asks[0].prompt, GenerateOptions(ignore_eos=True, temperature=0.8, seed=rng.randrange(2**64)))
    )
    drafted = assert_same(client, asks)
    assert {len(answer.token_ids) for answer in drafted} == {short_of_max_len}


def test_a_stop_at_each_offset_of_a_block_ends_both_alike(
    client: TargetClient, tokenizer: ChatTokenizer, rng: random.Random
) -> None:
    prompt = chat_prompts(rng, tokenizer, 1)[0]
    free = client.generate(prompt, GenerateOptions(max_new_tokens=3 * BLOCK_SIZE)).token_ids
    stops = free[BLOCK_SIZE : 2 * BLOCK_SIZE + 1]
    asks = [Ask(prompt, GenerateOptions(max_new_tokens=40, stop_token_ids=(stop,))) for stop in stops]
    drafted = assert_same(client, asks)
    for stop, answer in zip(stops, drafted, strict=True):
        assert answer.finished.matched_token_id == stop
        assert answer.token_ids == free[: free.index(stop) + 1]
