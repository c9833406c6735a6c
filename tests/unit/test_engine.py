"""The engine: which rows choose, what numbers that are not finite do, and to whom."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.target.core.draft_source import PlainReason
from services.target.core.request import RequestFailed, SamplingParams
from services.target.core.request_loop import NonFiniteLogits
from services.target.model.llama import Llama
from tests.builders import build_tiny_llama_dir
from tests.core_rig import Ask, Habits, OracleDrafts, Rig, plain_tokens

SEED = 20261211
POISON = 150
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5)
ALL_SAMPLING = pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SAMPLED,
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.1, seed=5),
    ],
    ids=["greedy", "top-p", "unfiltered", "top-k and min-p"],
)


@pytest.fixture(scope="module")
def load_poisoned(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Llama]:
    """A model in which one token's embedding holds `value`, so that all it touches is not finite."""

    def load(value: float) -> Llama:
        directory = build_tiny_llama_dir(tmp_path_factory.mktemp("poisoned"), SEED, tied=False, max_len=128)
        tensors = load_file(directory / "model.safetensors")
        tensors["model.embed_tokens.weight"][POISON, 3] = value
        save_file(tensors, directory / "model.safetensors")
        return Llama.load(directory, torch.float32)

    return load


def clean_prompt(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(POISON) for _ in range(count)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@ALL_SAMPLING
def test_logits_that_are_not_finite_end_their_own_request_only(
    load_poisoned: Callable[[float], Llama], value: float, sampling: SamplingParams
) -> None:
    rng, model = random.Random(SEED), load_poisoned(value)
    good = [Ask(clean_prompt(rng, 10), 12, sampling) for _ in range(3)]
    bad = [Ask([*clean_prompt(rng, 6), POISON, *clean_prompt(rng, 3)], 12, sampling) for _ in range(2)]
    expected = plain_tokens(model, good)
    rig = Rig(model, num_pages=30, page_size=4)
    tapes = rig.run([good[0], bad[0], good[1], bad[1], good[2]])
    assert [tapes[i].tokens for i in (0, 2, 4)] == expected
    for tape in (tapes[1], tapes[3]):
        assert tape.tokens == []
        assert isinstance(tape.terminal, RequestFailed)
        assert isinstance(tape.terminal.error, NonFiniteLogits)
    assert rig.observer.failed == [("r1", "non_finite"), ("r3", "non_finite")]
    assert torch.isfinite(rig.engine._kv).all(), "pages went back with numbers that are not finite"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@ALL_SAMPLING
def test_a_draft_that_leads_to_numbers_that_are_not_finite_changes_no_token(
    load_poisoned: Callable[[float], Llama], value: float, sampling: SamplingParams
) -> None:
    """A hostile drafter proposes a token that the target would never choose, and that blinds it."""
    rng, model = random.Random(SEED + 1), load_poisoned(value)
    asks = [Ask(clean_prompt(rng, rng.randint(2, 20)), 20, sampling) for _ in range(9)]
    # Those whose own tokens are clean; at T 1 without filters the target may choose any.
    asks = [ask for ask in asks if POISON not in plain_tokens(model, [ask])[0]][:4]
    expected = plain_tokens(model, asks)
    assert len(asks) == 4
    truths = {tuple(ask.prompt): tokens for ask, tokens in zip(asks, expected, strict=True)}
    rig = Rig(
        model,
        drafts=lambda rig: OracleDrafts(
            rig, truths, rng, habits=Habits(spoil=0.7, hostile=0.2), hostile_ids=[POISON]
        ),
    )
    tapes = rig.run(asks)
    assert [tape.tokens for tape in tapes] == expected
    plain = [reason for report in rig.observer.reports for reason in report.plain]
    assert plain.count(PlainReason.NON_FINITE) > 3
    for held in rig.draft_source.contexts.values():  # type: ignore[attr-defined]
        assert torch.isfinite(held).all(), "the drafter was handed what the draft had spoiled"


def test_the_lm_head_runs_only_on_rows_that_choose(load_poisoned: Callable[[float], Llama]) -> None:
    model = load_poisoned(0.0)
    counts: list[int] = []
    compute = model.logits
    model.logits = lambda hidden: counts.append(len(hidden)) or compute(hidden)  # type: ignore
    rig = Rig(model, extend_rows_max=10)
    rig.run([Ask(clean_prompt(random.Random(SEED), 25), 3)])
    # 10 and 10 rows of the prompt choose nothing; then the last row of the prompt, and two decode steps.
    assert counts == [1, 1, 1]
    assert [report.num_rows for report in rig.observer.reports][:5] == [10, 10, 5, 1, 1]


def test_one_request_gives_the_same_tokens_in_the_worst_company_as_alone(
    load_poisoned: Callable[[float], Llama],
) -> None:
    rng, model = random.Random(SEED + 2), load_poisoned(0.0)
    ask = Ask(clean_prompt(rng, 30), 25, SAMPLED)
    alone = plain_tokens(model, [ask])[0]
    rig = Rig(model, num_running_max=16, extend_rows_max=13, scatter=rng, page_size=5)
    company = [Ask(clean_prompt(rng, rng.randint(1, 60)), rng.randint(1, 30)) for _ in range(15)]
    tapes = rig.run([*company[:7], ask, *company[7:]])
    assert tapes[7].tokens == alone
