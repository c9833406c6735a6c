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
    from common.pb.tandem.v1 import target_pb2
    from tests.fault.crowd import DOWN, MISMATCH, UP, Ask, some_asks, wait_drafter
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
        tokens,
    )
    from tools.target_client import Answer, TargetClient

# Enough that a fault after the first steps meets all of them, also where a step commits a whole block.
LONG, SHORT = 1600, 64


@dataclass(frozen=True)
class Pair:
    """A drafter and a target that share the GPU's memory; and two that send messages, for the first test."""

    services: TinyServices
    readers: Readers
    drafter: Party
    over_device: Party
    sent_to: Party
    over_messages: Party


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        tempfile.TemporaryDirectory(prefix="tandem-") as directory,
        TinyServices(Path(directory), ON_GPU) as services,
        Readers() as readers,
    ):
        # A drafter each: one forgets a target that has asked for nothing yet when another shakes hands.
        drafter, sent_to = services.drafter("drafter"), services.drafter("sent-to")
        over_device = services.target("device", drafter, "--handoff", "device")
        over_messages = services.target("inline", sent_to, "--handoff", "inline")
        start(drafter, over_device, sent_to, over_messages)
        yield Pair(services, readers, drafter, over_device, sent_to, over_messages)


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


def start(*parties: Party) -> None:
    """All at the same time, until each serves."""
    for party in parties:
        party.child.start()
    for party in parties:
        party.child.wait_serving(START_DEADLINE_S)


def stop(*parties: Party) -> None:
    for party in parties:
        party.child.stop(3.0)


def wait_for(target: Party, state: target_pb2.DrafterState, timeout_s: float = 30.0) -> None:
    with TargetClient(target.child.address) as client:
        wait_drafter(client, state, timeout_s)


def transport_of(target: Party) -> str:
    """The transport of the connection in use."""
    page, name = target.metrics, "tandem_target_handoff_transport"
    return next(t for t in page.labels_of(name, "transport") if page.value(name, transport=t) == 1)


def restart(party: Party) -> float:
    """Seconds until it serves."""
    began = time.monotonic()
    start(party)
    return time.monotonic() - began


def assert_drafting_again(pair: Pair, rng: random.Random, transport: str = "device") -> float:
    """The drafter comes back on that transport and is of use, token for token. Returns the draft tokens that
    were accepted a draft."""
    wait_for(pair.over_device, UP)
    assert transport_of(pair.over_device) == transport
    asks = mixed_asks(rng, SHORT)
    drafted = pair.readers.answers(pair.over_device, asks)
    assert tokens(drafted) == tokens(pair.readers.answers(pair.over_device, asks, drafting=False))
    num_drafts, num_accepted = draft_counts(drafted)
    assert all(answer.finished.num_drafts > 0 for answer in drafted)
    assert num_accepted > num_drafts / 2
    return num_accepted / num_drafts


def assert_survived(pair: Pair, asks: list[Ask], answers: list[Answer], fault_at_s: float) -> float:
    """All drafted until the fault, which met all of them in mid-generation, and all ended with the plain
    tokens. Returns the longest gap from the fault on, in seconds."""
    assert_met_by(answers, fault_at_s)
    assert all(answer.finished.num_drafts > 0 for answer in answers)
    plain = pair.readers.answers(pair.over_device, asks, drafting=False)
    assert tokens(answers) == tokens(plain)
    stall_s = longest_gap_s(answers, fault_at_s)
    # The watchdog sees an eighth of the deadline late that the drafter's turn has come, and as late that it
    # is over. The rest is a step and its way to the reader.
    assert stall_s <= 1.25 * DRAFT_DEADLINE_S + 0.1
    return stall_s


def test_tokens_are_the_plain_ones_over_shared_memory_and_over_messages(
    pair: Pair, rng: random.Random
) -> None:
    asks = mixed_asks(rng, 200)
    numbers: dict[str, str] = {}
    plain = pair.readers.answers(pair.over_device, asks, drafting=False)
    assert draft_counts(plain) == (0, 0)
    for target, transport in ((pair.over_device, "device"), (pair.over_messages, "inline")):
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
    stop(pair.over_messages, pair.sent_to)
    assert pair.over_device.value("watchdog_releases_total") == 0
    print(line("same tokens", numbers))


def test_a_drafter_on_another_device_is_refused_or_reached_by_messages(
    pair: Pair, rng: random.Random
) -> None:
    services = pair.services
    for_strict, for_lenient = (services.drafter(f"cpu-{i}", device="cpu") for i in range(2))
    strict = services.target("strict", for_strict, "--handoff", "device")
    # A CPU that drafts for a GPU is late now and then, which is no matter here.
    lenient = services.target("lenient", for_lenient, "--handoff", "auto", "--draft-deadline-s", "10")
    parties = (strict, lenient, for_strict, for_lenient)
    asks = mixed_asks(rng, 40, 4)
    try:
        start(*parties)
        wait_for(strict, MISMATCH)
        with TargetClient(strict.child.address) as client:
            (difference,) = client.server_facts().contract_mismatches
        assert "transport" in difference and "TRANSPORT_INLINE" in difference
        plain = pair.readers.answers(strict, asks)
        assert draft_counts(plain) == (0, 0)
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
    finally:
        stop(*parties)
    accepted = f"{num_accepted / num_drafts:.2f}"
    print(line("CPU drafter", {"mismatch": difference, "accepted a draft": accepted}))


def test_a_killed_drafter_costs_no_token_and_its_successor_drafts(pair: Pair, rng: random.Random) -> None:
    drafter = pair.drafter.child
    asks = mixed_asks(rng, LONG)
    wait_for(pair.over_device, UP)
    with pair.readers.crowd(pair.over_device, asks) as collect:
        killed_at = time.perf_counter()
        drafter.send(signal.SIGKILL)
        assert drafter.wait_ended(5) == -signal.SIGKILL
        answers = collect()
    stall_s = assert_survived(pair, asks, answers, killed_at)
    wait_for(pair.over_device, DOWN)
    ready_s = restart(pair.drafter)
    accepted = assert_drafting_again(pair, rng)
    numbers = {"stall ms": f"{stall_s * 1e3:.0f}", "drafter's start s": f"{ready_s:.1f}"}
    print(line("SIGKILL", numbers | {"accepted a draft afterwards": f"{accepted:.2f}"}))


def test_a_stopped_drafter_costs_a_deadline_and_drafts_when_it_goes_on(
    pair: Pair, rng: random.Random
) -> None:
    drafter, target = pair.drafter.child, pair.over_device
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
    wait_for(pair.over_device, UP)
    with pair.readers.crowd(pair.over_device, asks) as collect:
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
    target, drafter = pair.over_device.child, pair.drafter
    wait_for(pair.over_device, UP)
    with TargetClient(target.address) as client:
        streams = [client.start(ask.prompt, ask.options) for ask in mixed_asks(rng, LONG)]
        for stream in streams:
            next(iter(stream))
        pid = drafter.child.pid
        target.send(signal.SIGKILL)
        target.wait_ended(5)
    ready_s = restart(pair.over_device)
    accepted = assert_drafting_again(pair, rng)
    assert drafter.child.running and drafter.child.pid == pid
    assert drafter.value("pages_unaccounted") == 0
    numbers = {"target's start s": f"{ready_s:.1f}", "accepted a draft afterwards": f"{accepted:.2f}"}
    print(line("target SIGKILL", numbers))
