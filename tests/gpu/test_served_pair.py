"""Target and drafter as they are served: real processes on one GPU, 32 requests at once, real faults.

Whatever becomes of the drafter, tokens are those of plain decoding. All of it in bfloat16 with kernels whose
bits depend on no batch: float32 is not served on a GPU, and the default numerics round by batch.
"""

from __future__ import annotations

import importlib.util
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch


def _missing(*packages: str) -> list[str]:
    return [name for name in packages if importlib.util.find_spec(name) is None]


_FOR_CLIENTS = _missing("grpc_health", "prometheus_client")
_FOR_ALL = _FOR_CLIENTS + _missing("cuda", "pydantic_settings", "structlog")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.skipif(bool(_FOR_ALL), reason=f"needs {', '.join(_FOR_ALL)}"),
    pytest.mark.timeout(300),  # compiles
]
if not _FOR_CLIENTS:
    from tests.fault.crowd import DOWN, MISMATCH, UP, Ask, some_asks
    from tests.gpu.served_rig import (
        DRAFT_DEADLINE_S,
        NUM_REQUESTS,
        ON_GPU,
        START_DEADLINE_S,
        VOCAB_SIZE,
        Party,
        Readers,
        TinyServices,
        assert_met_by,
        draft_counts,
        line,
        longest_gap_s,
        restart,
        start,
        stop,
        tokens,
        transport_of,
        wait_for,
    )
    from tools.target_client import Answer, TargetClient

# Enough that a fault after the first steps meets all of them, also where a step commits a whole block.
LONG, SHORT = 1200, 64


@dataclass(frozen=True)
class Pair:
    """A drafter and a target that share the GPU's memory, and who reads."""

    readers: Readers
    drafter: Party
    target: Party


@dataclass(frozen=True)
class Others:
    """Targets that cannot or shall not share it: by messages; from a drafter on the CPU, which is refused or
    used by messages. Each has a drafter of its own: one forgets a target that has asked for nothing yet when
    another shakes hands."""

    parties: tuple[Party, ...]
    inline: Party
    strict: Party
    lenient: Party


@pytest.fixture(scope="module")
def readers() -> Iterator[Readers]:
    with Readers() as readers:
        yield readers


@pytest.fixture(scope="module")
def services() -> Iterator[TinyServices]:
    with (
        tempfile.TemporaryDirectory(prefix="tandem-") as directory,
        TinyServices(Path(directory), ON_GPU) as services,
    ):
        yield services


@pytest.fixture(scope="module")
def others(services: TinyServices) -> Others:
    """Started; whoever needs one waits until it serves."""
    on_gpu = services.drafter("drafter-1")
    on_cpu, too = (services.drafter(f"drafter-{i}", device="cpu") for i in (2, 3))
    inline = services.target("inline", on_gpu, "--handoff", "inline")
    strict = services.target("strict", on_cpu, "--handoff", "device")
    # A CPU that drafts for a GPU is late now and then, which is no matter here.
    lenient = services.target("lenient", too, "--handoff", "auto", draft_deadline_s=10)
    parties = (inline, strict, lenient, on_gpu, on_cpu, too)
    for party in parties:
        party.child.start()
    return Others(parties, inline, strict, lenient)


@pytest.fixture(scope="module")
def pair(services: TinyServices, readers: Readers, others: Others) -> Pair:
    drafter = services.drafter("drafter")
    target = services.target("device", drafter, "--handoff", "device")
    start(drafter, target)
    return Pair(readers, drafter, target)


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def mixed_asks(rng: random.Random, num_tokens: int, count: int = 0) -> list[Ask]:
    """Greedy and sampled, some with prompts longer than a step's rows."""
    return some_asks(
        rng, count or NUM_REQUESTS, vocab_size=VOCAB_SIZE, num_tokens=num_tokens, prompt_len_max=100
    )


def assert_drafting_again(pair: Pair, rng: random.Random) -> float:
    """The drafter comes back on the GPU and is of use, token for token. Returns the draft tokens that
    were accepted a draft."""
    wait_for(pair.target, UP)
    assert transport_of(pair.target) == "device"
    asks = mixed_asks(rng, SHORT)
    drafted = pair.readers.answers(pair.target, asks)
    assert tokens(drafted) == tokens(pair.readers.answers(pair.target, asks, drafting=False))
    num_drafts, num_accepted = draft_counts(drafted)
    assert all(answer.finished.num_drafts > 0 for answer in drafted)
    assert num_accepted > num_drafts / 2
    return num_accepted / num_drafts


def assert_survived(pair: Pair, asks: list[Ask], answers: list[Answer], fault_at_s: float) -> float:
    """All drafted until the fault, which met all of them in mid-generation, and all ended with the plain
    tokens. Returns the longest gap from the fault on, in seconds."""
    assert_met_by(answers, fault_at_s)
    assert all(answer.finished.num_drafts > 0 for answer in answers)
    plain = pair.readers.answers(pair.target, asks, drafting=False)
    assert tokens(answers) == tokens(plain)
    stall_s = longest_gap_s(answers, fault_at_s)
    # The rest is a step and its way to the reader.
    assert stall_s <= DRAFT_DEADLINE_S + 0.1
    return stall_s


def test_tokens_are_the_plain_ones_over_shared_memory_and_over_messages(
    pair: Pair, others: Others, rng: random.Random
) -> None:
    others.inline.child.wait_serving(START_DEADLINE_S)
    asks = mixed_asks(rng, 200)
    numbers: dict[str, str] = {}
    plain = pair.readers.answers(pair.target, asks, drafting=False)
    assert draft_counts(plain) == (0, 0)
    for target, transport in ((pair.target, "device"), (others.inline, "inline")):
        wait_for(target, UP, START_DEADLINE_S)
        assert transport_of(target) == transport
        began = time.monotonic()
        drafted = pair.readers.answers(target, asks)
        took_s = time.monotonic() - began
        assert tokens(drafted) == tokens(plain), transport
        assert all(answer.finished.num_drafts > 0 for answer in drafted), transport
        num_drafts, num_accepted = draft_counts(drafted)
        assert num_accepted > num_drafts / 2, transport
        numbers |= {
            f"{transport}: accepted a draft": f"{num_accepted / num_drafts:.2f}",
            f"{transport}: seconds": f"{took_s:.2f}",
            f"{transport}: longest gap ms": f"{longest_gap_s(drafted) * 1e3:.0f}",
        }
    assert pair.target.value("watchdog_releases_total") == 0
    print(line("same tokens", numbers))


def test_a_drafter_on_another_device_is_refused_or_reached_by_messages(
    pair: Pair, others: Others, rng: random.Random
) -> None:
    strict, lenient = others.strict, others.lenient
    asks = mixed_asks(rng, 40, 4)
    for party in others.parties:
        party.child.wait_serving(START_DEADLINE_S)
    plain = pair.readers.answers(pair.target, asks, drafting=False)

    wait_for(strict, MISMATCH)
    with TargetClient(strict.child.address) as client:
        (difference,) = client.server_facts().contract_mismatches
    assert "transport" in difference and "TRANSPORT_INLINE" in difference
    without = pair.readers.answers(strict, asks)
    assert draft_counts(without) == (0, 0)
    assert tokens(without) == tokens(plain)
    assert strict.value("contract_mismatch", field="transport") == 1
    assert strict.value("handoff_fallbacks_total", reason="no_device") == 0

    wait_for(lenient, UP)
    drafted = pair.readers.answers(lenient, asks)
    assert tokens(drafted) == tokens(plain)
    num_drafts, num_accepted = draft_counts(drafted)
    assert num_accepted > num_drafts / 2 > 0
    assert transport_of(lenient) == "inline"
    assert lenient.value("handoff_fallbacks_total", reason="no_device") >= 1
    assert "handoff_falls_back_to_inline" in lenient.child.log_path.read_text()
    accepted = f"{num_accepted / num_drafts:.2f}"
    print(line("CPU drafter", {"mismatch": difference, "accepted a draft": accepted}))
    # The faults are to be timed on a quiet machine.
    stop(*others.parties)


def test_a_killed_drafter_costs_no_token_and_its_successor_drafts(pair: Pair, rng: random.Random) -> None:
    drafter = pair.drafter.child
    asks = mixed_asks(rng, LONG)
    wait_for(pair.target, UP)
    with pair.readers.crowd(pair.target, asks) as collect:
        killed_at = time.perf_counter()
        drafter.send(signal.SIGKILL)
        assert drafter.wait_ended(5) == -signal.SIGKILL
        answers = collect()
    stall_s = assert_survived(pair, asks, answers, killed_at)
    wait_for(pair.target, DOWN)
    ready_s = restart(pair.drafter)
    accepted = assert_drafting_again(pair, rng)
    numbers = {"stall ms": f"{stall_s * 1e3:.0f}", "drafter's start s": f"{ready_s:.1f}"}
    print(line("SIGKILL", numbers | {"accepted a draft afterwards": f"{accepted:.2f}"}))


def test_a_stopped_drafter_costs_a_deadline_and_drafts_when_it_goes_on(
    pair: Pair, rng: random.Random
) -> None:
    drafter, target = pair.drafter.child, pair.target
    asks = mixed_asks(rng, LONG)
    wait_for(target, UP)
    released = target.value("watchdog_releases_total")
    try:
        with pair.readers.crowd(target, asks) as collect:
            stopped_at = time.perf_counter()
            drafter.send(signal.SIGSTOP)
            answers = collect()
        stall_s = assert_survived(pair, asks, answers, stopped_at)
        wait_for(target, DOWN)
        assert target.value("watchdog_releases_total") == released + 1
    finally:
        drafter.send(signal.SIGCONT)
    went_on_at = time.monotonic()
    accepted = assert_drafting_again(pair, rng)
    numbers = {"stall ms": f"{stall_s * 1e3:.0f}", "deadline ms": f"{DRAFT_DEADLINE_S * 1e3:.0f}"}
    numbers |= {"drafting again within s": f"{time.monotonic() - went_on_at:.1f}"}
    print(line("SIGSTOP", numbers | {"accepted a draft afterwards": f"{accepted:.2f}"}))


def test_a_drafter_that_is_asked_to_end_finishes_its_sessions_and_is_replaced(
    pair: Pair, rng: random.Random
) -> None:
    drafter = pair.drafter.child
    asks = mixed_asks(rng, LONG)
    wait_for(pair.target, UP)
    with pair.readers.crowd(pair.target, asks) as collect:
        asked_at = time.perf_counter()
        drafter.send(signal.SIGTERM)
        answers = collect()
    assert drafter.wait_ended(20) == 0, drafter.log_path.read_text()
    stall_s = assert_survived(pair, asks, answers, asked_at)
    ready_s = restart(pair.drafter)
    accepted = assert_drafting_again(pair, rng)
    num_drafts, _ = draft_counts(answers)
    numbers = {"stall ms": f"{stall_s * 1e3:.0f}", "drafts of all": f"{num_drafts}"}
    numbers |= {"drafter's start s": f"{ready_s:.1f}", "accepted a draft afterwards": f"{accepted:.2f}"}
    print(line("SIGTERM", numbers))


def test_a_killed_target_leaves_the_drafter_fit_for_the_next_one(pair: Pair, rng: random.Random) -> None:
    target, drafter = pair.target.child, pair.drafter
    wait_for(pair.target, UP)
    with TargetClient(target.address) as client:
        streams = [client.start(ask.prompt, ask.options) for ask in mixed_asks(rng, LONG)]
        for stream in streams:
            next(iter(stream))
        pid = drafter.child.pid
        target.send(signal.SIGKILL)
        target.wait_ended(5)
    ready_s = restart(pair.target)
    accepted = assert_drafting_again(pair, rng)
    assert drafter.child.running and drafter.child.pid == pid
    assert drafter.value("pages_unaccounted") == 0
    numbers = {"target's start s": f"{ready_s:.1f}", "accepted a draft afterwards": f"{accepted:.2f}"}
    print(line("target SIGKILL", numbers))
