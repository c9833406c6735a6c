"""Real drafter and target processes over a tiny checkpoint whose random draft is often right."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.builders import build_tiny_draft_dir, build_tiny_llama_dir
from tests.fault.crowd import UP, wait_drafter
from tools.child_service import ChildService
from tools.local_stack import LocalStack, drafter_service
from tools.target_client import TargetClient

VOCAB_SIZE = 192
MAX_LEN = 2048
# Tiny matrices are slower on two threads than on one.
SERVICE_FLAGS = ("--threads", "1")


@dataclass(frozen=True)
class TinyPair:
    """A target's checkpoint and a draft that fits it."""

    model_dir: Path
    draft_dir: Path

    def stack(self, *, target_flags: tuple[str, ...] = (), drafter_flags: tuple[str, ...] = ()) -> LocalStack:
        """A stack over this pair, not started."""
        return LocalStack(
            self.model_dir,
            self.draft_dir,
            # Half of the default, so that a stopped drafter opens the breaker sooner.
            target_flags=(*SERVICE_FLAGS, "--draft-deadline-s", "0.25", *target_flags),
            drafter_flags=(*SERVICE_FLAGS, *drafter_flags),
        )

    def another_drafter(self, stack: LocalStack) -> ChildService:
        """A second drafter at the address of the stack's, not started."""
        return drafter_service(
            stack.directory, self.model_dir, self.draft_dir, metrics_port=0, flags=SERVICE_FLAGS
        )


@pytest.fixture
def rng() -> random.Random:
    """A fresh generator; its seed is printed with a failure."""
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    directory = tmp_path_factory.mktemp("tiny")
    model_dir = build_tiny_llama_dir(
        directory / "model", vocab_size=VOCAB_SIZE, max_len=MAX_LEN, favourite_token=7
    )
    return TinyPair(model_dir, build_tiny_draft_dir(directory / "draft", model_dir))


@pytest.fixture(scope="module")
def shared_stack(tiny_pair: TinyPair) -> Iterator[LocalStack]:
    with tiny_pair.stack() as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: LocalStack) -> LocalStack:
    """Both services, up and joined; whatever an earlier test did to the drafter is repaired first."""
    drafter = shared_stack.drafter
    if not drafter.running:
        drafter.start()
    drafter.wait_serving(30)
    with TargetClient(shared_stack.target.address) as client:
        wait_drafter(client, UP)
    return shared_stack


@pytest.fixture
def client(stack: LocalStack) -> Iterator[TargetClient]:
    with TargetClient(stack.target.address) as client:
        yield client
