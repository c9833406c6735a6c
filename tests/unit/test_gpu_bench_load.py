"""The closed loop inside the core, and the figures that follow from its steps."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from common.errors import ConfigError, TandemError
from services.target.core.report import StepReport
from services.target.core.request import RequestFailed
from services.target.core.step import StepLoop
from tests.builders_chat import write_tokenizer
from tests.core_rig import COUNTING_VOCAB, CountingModel, Rig
from tools.chat import ChatTokenizer
from tools.gpu_bench.core_load import Ask, BenchFailed, CoreLoad
from tools.gpu_bench.differences import Difference, differences
from tools.gpu_bench.prompts import ChatPrompts, RandomPrompts
from tools.gpu_bench.step_log import (
    LoggedStep,
    StepLog,
    accept_length,
    decode_tok_s,
    median_phases_ms,
    median_step_ms,
    steady_steps,
    window_tok_s,
)
from tools.sample_prompts import SAMPLE_PROMPTS


def _rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def _rig_and_log() -> tuple[Rig, StepLog]:
    rig, log = Rig(CountingModel()), StepLog()
    rig.loop = StepLoop(rig.scheduler, rig.engine, rig.draft_source, log)
    return rig, log


def test_a_request_that_ends_is_replaced_until_all_are_through() -> None:
    rng = _rng()
    rig, log = _rig_and_log()
    prompts = RandomPrompts(COUNTING_VOCAB, 9)
    asks = [
        Ask(prompts.varied(rng), rng.randint(1, 12)) for _ in range(20)
    ]
    done = CoreLoad(rig.loop, rig.scheduler, lambda: False).run(asks, 3)
    for ask, answer in zip(asks, done.answers, strict=True):
        first = ask.prompt[-1] + 1
        assert answer.token_ids == [(first + i) % COUNTING_VOCAB for i in range(ask.max_new_tokens)]
        assert not answer.aborted
    assert max(step.report.num_requests for step in log.steps) == 3
    assert sum(step.report.num_generated_tokens for step in log.steps) == sum(a.max_new_tokens for a in asks)
    assert done.began_s < done.ended_s
    total = sum(a.max_new_tokens for a in asks)
    assert done.end_to_end_tok_s == pytest.approx(total / (done.ended_s - done.began_s))


def test_what_runs_is_aborted_and_nothing_begins_once_it_must_stop() -> None:
    rig, log = _rig_and_log()
    load = CoreLoad(rig.loop, rig.scheduler, lambda: len(log.steps) >= 5)
    done = load.run([Ask([1, 2], 50) for _ in range(6)], 2)
    assert [answer.aborted for answer in done.answers] == [True, True]
    rig.check_pages()
    assert rig.pool.num_free == rig.pool.num_pages


def test_a_failed_request_ends_the_bench() -> None:
    rig, _ = _rig_and_log()

    def fail(running: dict) -> None:
        for request in running.values():
            request.emit(RequestFailed(TandemError("no")))

    with pytest.raises(BenchFailed, match="a request failed: no"):
        CoreLoad(rig.loop, rig.scheduler, lambda: False).run([Ask([1], 5)], 1, fail)


def _steps(*rows: tuple[float, int, bool, int]) -> list[LoggedStep]:
    """(time, requests, extends, tokens) of each."""
    return [
        LoggedStep(at_s, StepReport(num_requests=n, extends=extends, num_generated_tokens=tokens))
        for at_s, n, extends, tokens in rows
    ]


def test_only_steps_in_which_all_decode_and_nobody_extends_count() -> None:
    steps = _steps(
        (0.0, 2, True, 1), (1.0, 2, False, 4), (2.0, 2, False, 6), (9.0, 2, True, 3), (11.0, 2, False, 5),
        (12.0, 1, False, 7),
    )  # fmt: skip
    steady = steady_steps(steps, 2)
    assert [s.seconds for s in steady] == [1.0, 1.0, 2.0]
    assert decode_tok_s(steady) == pytest.approx(15 / 4)
    assert median_step_ms(steady) == 1000


def test_a_rate_counts_from_the_last_first_token_to_the_first_last_one() -> None:
    steps = _steps(
        (0.0, 1, True, 1), (1.0, 2, True, 3), (2.0, 2, False, 4), (4.0, 2, False, 5), (5.0, 1, False, 9)
    )
    # A commits its first token in the first step and its last in the fourth, B a step later each. Commits
    # are stamped a little before their step is logged.
    assert window_tok_s(steps, [-0.1, 0.9], [3.9, 4.9]) == pytest.approx(9 / 3)
    assert window_tok_s(steps, [-0.1, 4.9], [3.9, 4.9]) == 0


def test_the_first_step_of_a_round_has_no_length() -> None:
    assert steady_steps(_steps((5.0, 1, False, 1)), 1) == []


def test_the_accept_length_is_over_verifies_and_unknown_without_one() -> None:
    steps = _steps((0.0, 2, False, 1), (1.0, 2, False, 1))
    assert accept_length(steps) is None
    steps[0].report.verifies += [(15, 3), (15, 0)]
    steps[1].report.verifies += [(7, 6)]
    assert accept_length(steps) == 4.0


def test_phases_are_medians_of_steady_steps_and_of_those_that_extend() -> None:
    steps = [
        LoggedStep(0.0, StepReport(num_requests=1, extends=True), extend_s=0.5, verify_s=9.0),
        LoggedStep(1.0, StepReport(num_requests=1, draft_wait_s=0.2, host_s=0.01, commit_s=0.02), 0.0, 0.3),
        LoggedStep(2.0, StepReport(num_requests=1, draft_wait_s=0.4, host_s=0.03, commit_s=0.02), 0.0, 0.5),
    ]
    phases = median_phases_ms(steps, steady_steps(steps, 1))
    assert phases == pytest.approx({"extend": 500, "verify": 400, "wait": 300, "host": 40})


def test_a_log_that_was_taken_is_empty() -> None:
    ticks = itertools.count()
    log = StepLog(clock=lambda: next(ticks))
    rig, _ = _rig_and_log()
    log.observe_step(StepReport(num_requests=1), rig.loop.stats())
    log.observe_step(StepReport(num_requests=0), rig.loop.stats())
    assert [step.at_s for step in log.take()] == [0]
    assert log.take() == []


def test_differences_name_the_prompt_and_the_first_position_that_differs() -> None:
    rng = _rng()
    reference = [[rng.randrange(1000) for _ in range(rng.randint(2, 30))] for _ in range(10)]
    other = [list(tokens) for tokens in reference]
    assert differences(reference, other) == []
    at = rng.randrange(len(other[3]))
    other[3][at] += 1
    other[7].pop()
    assert differences(reference, other) == [Difference(3, at), Difference(7, len(reference[7]) - 1)]


def test_random_prompts_are_of_the_length_that_was_asked_or_of_any_up_to_it() -> None:
    rng, prompts = _rng(), RandomPrompts(50, 7)
    measured = [prompts.measured(rng, number) for number in range(20)]
    assert {len(prompt) for prompt in measured} == {7}
    lengths = {len(prompts.varied(rng)) for _ in range(200)}
    assert lengths == set(range(1, 8))
    assert max(map(max, measured)) < 50


def test_a_trained_models_prompts_are_turns_in_its_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = ChatTokenizer(tmp_path)
    longest = max(len(tokenizer.encode_chat([{"role": "user", "content": text}])) for text in SAMPLE_PROMPTS)
    prompts = ChatPrompts(tokenizer, longest)
    rng = _rng()
    assert tokenizer.decode(prompts.measured(rng, 4)).count(SAMPLE_PROMPTS[1]) == 1
    drawn = [prompts.varied(rng) for _ in range(30)]
    assert max(map(len, drawn)) <= longest and len({tuple(prompt) for prompt in drawn}) > 10
    with pytest.raises(ConfigError, match=f"prompt_tokens: must be at least {longest}"):
        ChatPrompts(tokenizer, longest - 1)
