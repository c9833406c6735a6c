"""A few requests that run while something breaks, and what they must give in spite of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Barrier, Event

from common.pb.tandem.v1 import target_pb2
from tools.target_client import Answer, GenerateOptions, ReceivedDelta, TargetClient

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
        sampling = {"temperature": 0.8, "top_p": 0.95, "seed": rng.randrange(2**63)} if i % 2 else {}
        asks.append(
            Ask(prompt, GenerateOptions(max_new_tokens=num_tokens, ignore_eos=True, **sampling))  # type: ignore[arg-type]
        )
    return asks


def plain_tokens(client: TargetClient, asks: Sequence[Ask]) -> list[list[int]]:
    """What the requests give without drafts, all at once."""
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(
            pool.map(lambda a: client.generate(a.prompt, replace(a.options, drafting=False)).token_ids, asks)
        )


class RunningCrowd:
    """Requests that are running now."""

    def __init__(self, client: TargetClient, asks: Sequence[Ask], pool: ThreadPoolExecutor) -> None:
        self._begun = Barrier(len(asks) + 1)
        self._futures: list[Future[Answer]] = [pool.submit(self._run, client, ask) for ask in asks]

    def _run(self, client: TargetClient, ask: Ask) -> Answer:
        begun = Event()

        def on_delta(_: ReceivedDelta) -> None:
            if not begun.is_set():
                begun.set()
                self._begun.wait(30)

        return client.generate(ask.prompt, ask.options, on_delta)

    def wait_begun(self) -> None:
        """Return once each request has its first tokens."""
        self._begun.wait(30)

    @property
    def num_running(self) -> int:
        """Requests that have not ended yet."""
        return sum(not future.done() for future in self._futures)

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
