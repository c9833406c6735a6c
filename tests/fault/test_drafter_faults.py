"""Whatever becomes of the drafter: every request ends with the plain tokens, and drafting comes back."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.builders import build_tiny_llama_dir
from tests.fault.conftest import MAX_LEN, VOCAB_SIZE, TinyPair
from tests.fault.crowd import (
    DOWN,
    MISMATCH,
    UP,
    assert_drafting,
    assert_plain,
    crowd,
    eventually,
    longest_pause_s,
    some_asks,
    wait_drafter,
)
from tools.local_stack import LocalStack
from tools.target_client import TargetClient

# Long enough that a fault after the first tokens meets all of them in mid-generation.
NUM_TOKENS = 250


def test_without_a_fault_drafts_are_accepted_and_tokens_equal_plain_ones(
    client: TargetClient, rng: random.Random
) -> None:
    asks = some_asks(rng, 8, vocab_size=VOCAB_SIZE, num_tokens=60)
    with crowd(client, asks) as running:
        answers = running.answers()
    assert_plain(client, asks, answers)
    assert all(a.finished.num_drafts > 5 for a in answers)
    assert sum(a.finished.num_accepted_tokens for a in answers) > 30


def test_a_killed_drafter_costs_no_token_and_drafting_resumes_after_its_return(
    stack: LocalStack, client: TargetClient, rng: random.Random
) -> None:
    asks = some_asks(rng, 4, vocab_size=VOCAB_SIZE, num_tokens=NUM_TOKENS)
    drafter = stack.drafter
    with crowd(client, asks) as running:
        drafter.send(signal.SIGKILL)
        assert drafter.wait_ended(5) == -signal.SIGKILL
        assert running.num_running == len(asks), "the fault came too late to be one"
        answers = running.answers()
    assert_plain(client, asks, answers)
    wait_drafter(client, DOWN)
    drafter.start()
    drafter.wait_serving(30)
    wait_drafter(client, UP)
    assert_drafting(client, asks[0])


def test_a_stopped_drafter_costs_no_token_and_at_most_short_pauses(
    stack: LocalStack, client: TargetClient, rng: random.Random
) -> None:
    asks = some_asks(rng, 4, vocab_size=VOCAB_SIZE, num_tokens=NUM_TOKENS)
    drafter = stack.drafter
    try:
        with crowd(client, asks) as running:
            drafter.send(signal.SIGSTOP)
            answers = running.answers()
        assert_plain(client, asks, answers)
        # A deadline a step, three of them until the breaker opens, and two busy cores.
        assert longest_pause_s(answers) < 3
        wait_drafter(client, DOWN)
    finally:
        drafter.send(signal.SIGCONT)
    wait_drafter(client, UP)
    assert_drafting(client, asks[0])


def test_a_running_request_drafts_again_when_a_stopped_drafter_goes_on(
    stack: LocalStack, client: TargetClient, rng: random.Random
) -> None:
    asks = some_asks(rng, 2, vocab_size=VOCAB_SIZE, num_tokens=MAX_LEN - 100)
    drafter = stack.drafter
    try:
        with crowd(client, asks) as running:
            drafter.send(signal.SIGSTOP)
            wait_drafter(client, DOWN)
            drafter.send(signal.SIGCONT)
            running.wait_drafted_again()
            running.abort()
            answers = running.answers()
    finally:
        drafter.send(signal.SIGCONT)
    assert_plain(client, asks, answers)


def test_a_drafter_that_is_asked_to_end_does_so_while_requests_run(
    stack: LocalStack, client: TargetClient, rng: random.Random
) -> None:
    asks = some_asks(rng, 4, vocab_size=VOCAB_SIZE, num_tokens=NUM_TOKENS)
    drafter = stack.drafter
    with crowd(client, asks) as running:
        drafter.send(signal.SIGTERM)
        answers = running.answers()
    assert_plain(client, asks, answers)
    assert drafter.wait_ended(10) == 0, drafter.log_path.read_text()
    drafter.start()
    drafter.wait_serving(30)
    wait_drafter(client, UP)
    assert_drafting(client, asks[0])


def test_a_new_drafter_takes_over_at_the_same_address_while_requests_run(
    tiny_pair: TinyPair, stack: LocalStack, client: TargetClient, rng: random.Random
) -> None:
    asks = some_asks(rng, 2, vocab_size=VOCAB_SIZE, num_tokens=MAX_LEN - 100)
    old, new = stack.drafter, tiny_pair.another_drafter(stack)
    # The socket goes first: an established connection does not need its name.
    Path(old.address.removeprefix("unix:")).unlink()
    new.start()
    try:
        new.wait_serving(30)
        with crowd(client, asks) as running:
            old.send(signal.SIGKILL)
            old.wait_ended(5)
            running.wait_drafted_again()
            running.abort()
            answers = running.answers()
        assert_plain(client, asks, answers)
    finally:
        new.stop(grace_s=5)


def test_a_removed_socket_disturbs_neither_requests_nor_drafting(
    stack: LocalStack, client: TargetClient, rng: random.Random
) -> None:
    asks = some_asks(rng, 4, vocab_size=VOCAB_SIZE, num_tokens=NUM_TOKENS)
    drafter = stack.drafter
    with crowd(client, asks) as running:
        Path(drafter.address.removeprefix("unix:")).unlink()
        answers = running.answers()
    assert_plain(client, asks, answers)
    assert_drafting(client, asks[0])
    # Only a restart makes the name again.
    drafter.stop(grace_s=5)
    drafter.start()
    drafter.wait_serving(30)
    wait_drafter(client, UP)


def test_a_drafter_that_flaps_costs_no_token(
    stack: LocalStack, client: TargetClient, rng: random.Random
) -> None:
    asks = some_asks(rng, 4, vocab_size=VOCAB_SIZE, num_tokens=NUM_TOKENS)
    drafter = stack.drafter
    with crowd(client, asks) as running, _flapping(stack, rng):
        answers = running.answers()
    assert_plain(client, asks, answers)
    wait_drafter(client, UP)
    assert_drafting(client, asks[0])
    assert drafter.running


@contextmanager
def _flapping(stack: LocalStack, rng: random.Random) -> Iterator[None]:
    """Stop and continue the drafter at random moments until the block ends."""
    drafter, over = stack.drafter, threading.Event()

    def flap() -> None:
        while not over.wait(rng.uniform(0.0, 0.1)):
            drafter.send(signal.SIGSTOP)
            over.wait(rng.uniform(0.0, 0.2))
            drafter.send(signal.SIGCONT)

    thread = threading.Thread(target=flap)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        drafter.send(signal.SIGCONT)


def test_a_drafter_that_starts_late_is_found(tiny_pair: TinyPair, rng: random.Random) -> None:
    stack = tiny_pair.stack()
    asks = some_asks(rng, 2, vocab_size=VOCAB_SIZE, num_tokens=60)
    try:
        stack.target.start()
        stack.target.wait_serving(30)
        with TargetClient(stack.target.address) as client:
            assert client.server_facts().drafter_state == DOWN
            answers = [client.generate(a.prompt, a.options) for a in asks]
            assert_plain(client, asks, answers)
            assert all(a.finished.num_drafts == 0 for a in answers)
            stack.drafter.start()
            stack.drafter.wait_serving(30)
            wait_drafter(client, UP)
            assert_drafting(client, asks[0])
    finally:
        stack.stop()


def test_a_drafter_of_another_checkpoint_is_named_by_field_and_never_used(
    tiny_pair: TinyPair, tmp_path: Path, rng: random.Random
) -> None:
    other_dir = build_tiny_llama_dir(
        tmp_path / "other", seed=9, vocab_size=VOCAB_SIZE, max_len=MAX_LEN, favourite_token=7
    )
    asks = some_asks(rng, 2, vocab_size=VOCAB_SIZE, num_tokens=60)
    stack = tiny_pair.stack()
    stack.drafter = TinyPair(other_dir, tiny_pair.draft_dir).another_drafter(stack)
    with stack:
        with TargetClient(stack.target.address) as client:
            wait_drafter(client, MISMATCH)
            (line,) = client.server_facts().contract_mismatches
            assert "weights_fingerprint" in line
            answers = [client.generate(a.prompt, a.options) for a in asks]
            assert_plain(client, asks, answers)
            assert all(a.finished.num_drafts == 0 for a in answers)


@pytest.mark.parametrize("where", ["config.json", "model.safetensors"])
def test_a_damaged_draft_ends_the_drafter_with_one_clear_error(
    tiny_pair: TinyPair, tmp_path: Path, where: str
) -> None:
    damaged = tmp_path / "draft"
    damaged.mkdir()
    for path in tiny_pair.draft_dir.iterdir():
        content = path.read_bytes()
        (damaged / path.name).write_bytes(content[: len(content) // 2] if path.name == where else content)
    stack = TinyPair(tiny_pair.model_dir, damaged).stack()
    drafter = stack.drafter
    try:
        drafter.start()
        assert drafter.wait_ended(30) == 2
        errors = [line for line in drafter.log_path.read_text().splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, drafter.log_path.read_text()
        eventually(lambda: not drafter.running, "the drafter ends")
    finally:
        stack.stop()
