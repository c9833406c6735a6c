"""The GPU bench's engines, loops and drafters put together on a CPU: kernels of staging, sampling, accepting
and drafting's books in Triton's interpreter, the forwards in plain torch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import tools.gpu_bench.lineup as lineup_module
from common.embedding import SharedWeights
from services.drafter.model.dflash_weights import Draft
from services.target.model.llama import LlamaWeights
from tests.fakes_draft import PagedDFlash
from tests.fakes_kernels import PagedLlama
from tools.gpu_bench.core_load import Ask
from tools.gpu_bench.identity import compare_tokens, identity_asks
from tools.gpu_bench.lineup import Lineup
from tools.gpu_bench.pair import Pair
from tools.gpu_bench.plan import GpuPlan, Job, Mode
from tools.gpu_bench.prompts import RandomPrompts
from tools.gpu_bench.sizes import Sizes
from tools.gpu_bench.soak import Soak
from tools.gpu_bench.step_log import accept_length

CPU = torch.device("cpu")
PROMPTS = RandomPrompts(192, 6)


@pytest.fixture(autouse=True)
def torch_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    def llama(weights: LlamaWeights, *, page_size: int, **sizes: Any) -> PagedLlama:
        return PagedLlama(weights, page_size)

    def dflash(draft: Draft, shared: SharedWeights, *, page_size: int, **sizes: Any) -> PagedDFlash:
        return PagedDFlash(draft, shared, page_size)

    monkeypatch.setattr(lineup_module, "KernelLlama", llama)
    monkeypatch.setattr(lineup_module, "KernelDFlash", dflash)


def plan(**changes: Any) -> GpuPlan:
    given: dict[str, Any] = {
        "device": "cuda", "random_shape": "tiny", "model": None, "draft": None, "job": Job.ROWS,
        "modes": (Mode.PLAIN, Mode.INPROCESS), "concurrency": (2,), "prompt_tokens": 6, "max_new_tokens": 6,
        "num_rounds": 1, "synthetic_accept_length": None, "row_independent": True, "temperature": 0.0,
        "top_p": 1.0, "amount": 0,
    }  # fmt: skip
    return GpuPlan(**(given | changes))


def lineup(given: GpuPlan) -> Lineup:
    pair = Pair.of(given, torch.float32, CPU)
    pair.check(given)
    return Lineup(given, pair, Sizes.of(given, pair.block_size), CPU, lambda: False, lambda *_: None)


def asks(count: int, num_tokens: int) -> list[Ask]:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    return [Ask(PROMPTS.varied(rng), num_tokens) for _ in range(count)]


def test_drafting_in_the_process_changes_no_token_and_leaves_nothing_behind() -> None:
    wanted = asks(3, 6)
    with lineup(plan()) as built:
        answers = []
        for contender in built.contenders:
            times, steps = contender.run(wanted, 2)
            answers.append([answer.token_ids for answer in times.answers])
            assert contender.all_leftovers() == []
        assert answers[0] == answers[1]
        assert accept_length(steps) is not None
        # Every decode step of every request had a draft.
        assert not [reason for step in steps for reason in step.report.plain]
        assert set(contender.take_drafting_ms()) == {"ingest", "draft"}


def test_a_synthetic_accept_length_is_what_verifies_get() -> None:
    with lineup(plan(synthetic_accept_length=2.5, max_new_tokens=30)) as built:
        plain, drafted = built.contenders
        _, steps = drafted.run(asks(2, 30), 2)
        assert accept_length(steps) == pytest.approx(2.5, abs=0.5)
        assert accept_length(plain.run(asks(1, 3), 1)[1]) is None


def test_drafts_that_are_mostly_right_change_no_token_alone_or_in_company() -> None:
    given = plan(job=Job.IDENTITY, amount=2)
    with lineup(given) as built:
        wanted = identity_asks(given, PROMPTS, seed=random.randrange(2**32))
        found = compare_tokens(
            given, built.contenders, wanted, built.learn, lambda: None, lambda mode, level: None
        )
    assert all(comparison.found == [] for comparison in found)
    lengths = [comparison.accept_length for comparison in found if comparison.mode == "inprocess"]
    assert len(lengths) == 2 and all(length is not None and length > 1.2 for length in lengths)


@pytest.mark.slow
def test_a_soak_with_drafts_in_the_process_ends_with_everything_free() -> None:
    given = plan(job=Job.SOAK, modes=(Mode.INPROCESS,), amount=20)
    with lineup(given) as built:
        result = Soak(given, built.contenders[0], PROMPTS, seed=random.randrange(2**32)).run(
            lambda: None, lambda steps: None
        )
    assert result.complaints == []
    assert result.num_steps >= 20
