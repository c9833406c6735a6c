"""Random histories of the pipelined step loop: every token is the target's own, every request ends once,
no page or lane is lost, whatever drafters do and whoever comes, leaves or is preempted."""

from __future__ import annotations

import random

import pytest

from services.target.core.request import FinishReason, RequestFailed, RequestFinished, SamplingParams
from tests.core_rig import Ask, Tape
from tests.fakes_device import VOCAB_ROWS, Oracle
from tests.pipelined_rig import ChangingDrafter, Habits, MessageDrafter, PipelinedRig, RingDrafter

SEED = 20261220
DRAFTERS = {"none": None, "ring": RingDrafter, "messages": MessageDrafter, "changing": ChangingDrafter}


def build_ask(rng: random.Random, stored_max: int) -> Ask:
    num_prompt = rng.randint(1, min(30, stored_max - 1))
    count = rng.randint(1, min(30, stored_max - num_prompt))
    stops = frozenset(rng.sample(range(VOCAB_ROWS), rng.choice([0, 0, 1, 4])))
    sampling = SamplingParams(temperature=rng.choice([0.0, 0.9]), seed=rng.randrange(1000))
    prompt = [rng.randrange(VOCAB_ROWS) for _ in range(num_prompt)]
    return Ask(prompt, count, sampling, stops, drafting=rng.random() < 0.8)


def check_tape(tape: Tape, oracle: Oracle) -> None:
    """I1 and I2: what came is what plain decoding gives, to its end unless it was cut short."""
    ask = tape.ask
    expected, fails = oracle.answer(ask.prompt, ask.sampling, ask.max_new_tokens, ask.stop_token_ids)
    assert tape.tokens == expected[: len(tape.tokens)]
    if isinstance(tape.terminal, RequestFailed):
        assert fails and tape.tokens == expected
        return
    assert isinstance(tape.terminal, RequestFinished)
    assert tape.terminal.num_output_tokens == len(tape.tokens)
    if tape.terminal.reason is FinishReason.ABORT:
        return
    assert not fails and tape.tokens == expected
    stopped = expected[-1] in ask.stop_token_ids
    assert tape.terminal.reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert tape.terminal.matched_token_id == (expected[-1] if stopped else None)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("round_", range(60))
def test_a_history_gives_the_targets_tokens_and_loses_nothing(kind: str, round_: int) -> None:
    seed = SEED * 1000 + round_
    print(f"seed {seed}")
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 16])
    # From "one request only just fits" to "all fit".
    num_pages = -(-60 // page_size) + rng.choice([0, 0, 2, 8, 60])
    habits = Habits(
        spoil=rng.choice([0.0, 0.5]), hostile=rng.choice([0.0, 0.2]), absent=rng.choice([0.0, 0.3]),
        lose=rng.choice([0.0, 0.05]), vanish=rng.choice([0.0, 0.1]),
        block_sizes=rng.choice([(2,), (4,), (8,), (2, 4, 8)]),
    )  # fmt: skip
    make = DRAFTERS[kind]
    rig = PipelinedRig(
        rng, make and (lambda rig: make(rig, rng, habits)),
        nan_share=rng.choice([0.0, 0.0, 0.003, 0.02]), num_pages=num_pages, page_size=page_size,
        num_running_max=rng.choice([1, 2, 4, 8]), extend_rows_max=rng.choice([1, 3, 8, 64]),
        extends_max=rng.choice([1, 2, 8]), max_len=60,
    )  # fmt: skip
    rig.engine.block_size_fits = rng.choice([8, 8, 4])
    arriving = [build_ask(rng, 60) for _ in range(20)]

    def come_and_go() -> None:
        while arriving and rng.random() < 0.3:
            rig.submit(arriving.pop())
        if rng.random() < 0.05:
            rig.loop.abort(f"r{rng.randrange(20)}")

    while arriving:
        come_and_go()
        rig.step()
    rig.run(each_step=come_and_go)
    for tape in rig.tapes:
        check_tape(tape, rig.oracle)
    assert sorted(rig.observer.finished + [name for name, _ in rig.observer.failed]) == sorted(
        tape.request.request_id for tape in rig.tapes
    )
