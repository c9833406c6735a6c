"""A few requests that run while something breaks, and what they must give in spite of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Barrier

from common.pb.tandem.v1 import target_pb2
from tools.target_client import Answer, GenerateOptions, TargetClient

UP = target_pb2.DRAFTER_STATE_UP
DOWN = target_pb2.DRAFTER_STATE_DOWN
MISMATCH = target_pb2.DRAFTER_STATE_MISMATCH


@dataclass(frozen=True)
class Ask:
    """A request: prompt and options."""

    prompt: list[int]
    options: GenerateOptions


def some_asks(
    rng: random.Random, count: int, *, vocab_size: int, num_tokens: int, prompt_len_max: int = 40
) -> list[Ask]:
    """Requests of mixed prompt lengths, greedy and sampled in turn, that all run to num_tokens."""
    asks = []
    for i in range(count):
        prompt = [rng.randrange(4, vocab_size) for _ in range(rng.randint(1, prompt_len_max))]
        options = GenerateOptions(max_new_tokens=num_tokens, ignore_eos=True)
        if i % 2:
            options = replace(options, temperature=0.8, top_p=0.95, seed=rng.randrange(2**64))
        asks.append(Ask(prompt, options))
    return asks


def plain_tokens(client: TargetClient, asks: Sequence[Ask]) -> list[list[int]]:
    """What the requests give without drafts, all at once."""

    def generate(ask: Ask) -> list[int]:
        return client.generate(ask.prompt, replace(ask.options, drafting=False)).token_ids

    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(generate, asks))


def assert_plain(client: TargetClient, asks: Sequence[Ask], answers: Sequence[Answer]) -> None:
    """The answers, cut short or not, are what plain decoding gives up to the same length."""
    lengths = [len(answer.token_ids) for answer in answers]
    cut = [Ask(a.prompt, replace(a.options, max_new_tokens=n)) for a, n in zip(asks, lengths, strict=True)]
    assert [answer.token_ids for answer in answers] == plain_tokens(client, cut)


class RunningCrowd:
    """Requests that are running now."""

    def __init__(self, client: TargetClient, asks: Sequence[Ask], pool: ThreadPoolExecutor) -> None:
        self._client = client
        self._begun = Barrier(len(asks) + 1)
        self._streams = [client.start(ask.prompt, ask.options) for ask in asks]
        self._num_drafted = [0] * len(asks)
        self._futures: list[Future[Answer]] = [pool.submit(self._run, i) for i in range(len(asks))]

    def _run(self, number: int) -> Answer:
        stream = self._streams[number]
        for count, delta in enumerate(stream):
            if count == 0:
                self._begun.wait(30)
            self._num_drafted[number] += sum(delta.from_draft)
        return stream.answer

    def wait_begun(self) -> None:
        """Return once each request has its first tokens."""
        self._begun.wait(30)

    @property
    def num_running(self) -> int:
        """Requests that have not ended yet."""
        return sum(not future.done() for future in self._futures)

    def wait_drafted_again(self, timeout_s: float = 20.0) -> None:
        """Return once each request received accepted draft tokens after this call: more than the few
        that may have been under way."""
        enough = [count + 10 for count in self._num_drafted]
        eventually(
            lambda: all(now > least for now, least in zip(self._num_drafted, enough, strict=True)),
            "every request gets accepted drafts again",
            timeout_s,
        )

    def abort(self) -> None:
        """End the requests; their answers hold what they had."""
        for stream in self._streams:
            self._client.abort(stream.request_id)

    def answers(self) -> list[Answer]:
        """Wait for all of them to end."""
        return [future.result(60) for future in self._futures]


@contextmanager
def crowd(client: TargetClient, asks: Sequence[Ask]) -> Iterator[RunningCrowd]:
    """Start the requests and go on once each of them has its first tokens."""
    with ThreadPoolExecutor(len(asks)) as pool:
        running = RunningCrowd(client, asks, pool)
        running.wait_begun()
        yield running


def eventually(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    """Poll until the condition holds; fail with what was waited for otherwise."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


def wait_drafter(client: TargetClient, state: target_pb2.DrafterState, timeout_s: float = 10.0) -> None:
    """Wait for the target's view of its drafter."""
    name = target_pb2.DrafterState.Name(state)
    eventually(lambda: client.server_facts().drafter_state == state, name, timeout_s)


def assert_drafting(client: TargetClient, ask: Ask) -> None:
    """A new request gets drafts, and some of them are accepted."""
    finished = client.generate(ask.prompt, replace(ask.options, max_new_tokens=60)).finished
    assert finished.num_drafts > 10, finished
    assert finished.num_accepted_tokens > 0, finished


def longest_pause_s(answers: Sequence[Answer]) -> float:
    """The longest time between two messages of one request."""
    pauses = (
        later.at_s - earlier.at_s
        for answer in answers
        for earlier, later in zip(answer.deltas, answer.deltas[1:], strict=False)
    )
    return max(pauses, default=0.0)
