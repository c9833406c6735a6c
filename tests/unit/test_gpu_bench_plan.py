"""The bench's options: what goes together, and the one error for what does not."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from common.errors import ConfigError
from tools.bench import app
from tools.gpu_bench.plan import Job, Mode, levels, make_plan


def plan(**options: Any) -> Any:
    defaults: dict[str, Any] = dict.fromkeys(
        (
            "model", "draft", "modes", "concurrency", "prompt_tokens", "max_new_tokens",
            "synthetic_accept_length", "streaming", "identity", "soak",
        )
    )  # fmt: skip
    defaults |= {
        "device": "cuda", "random_shape": "tiny", "num_rounds": 3, "row_independent": False,
        "temperature": 0.0, "top_p": 1.0,
    }  # fmt: skip
    return make_plan(**(defaults | options))


@pytest.mark.parametrize("text", ["", "1,,2", "0", "257", "one"])
def test_a_wrong_concurrency_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="concurrency: must be integers from 1 to 256"):
        levels(text, "concurrency")


def test_a_level_that_is_named_twice_is_measured_once() -> None:
    assert levels("8,1,8", "concurrency") == (8, 1)


def test_without_further_options_all_modes_are_measured_at_the_levels_of_the_issue() -> None:
    made = plan(synthetic_accept_length=8.01)
    assert made.job is Job.ROWS
    assert made.modes == tuple(Mode)
    assert (made.concurrency, made.prompt_tokens, made.max_new_tokens) == ((1, 8, 32), 128, 384)
    assert made.accept_kind == "synthetic"
    assert plan().accept_kind == "real"


def test_a_model_without_a_draft_is_measured_plain() -> None:
    assert plan(random_shape=None, model="somewhere").modes == (Mode.PLAIN,)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"random_shape": None}, "model"),
        ({"model": "somewhere"}, "model"),
        ({"draft": "somewhere"}, "draft"),
        ({"random_shape": None, "model": "a", "modes": "plain,device"}, "draft"),
        ({"modes": "plain,fast"}, "modes"),
        ({"modes": ""}, "modes"),
        ({"synthetic_accept_length": 0.5}, "synthetic_accept_length"),
        ({"synthetic_accept_length": float("nan")}, "synthetic_accept_length"),
        ({"synthetic_accept_length": 8.0, "modes": "plain"}, "synthetic_accept_length"),
        ({"synthetic_accept_length": 8.0, "streaming": "1"}, "synthetic_accept_length"),
        ({"synthetic_accept_length": 8.0, "identity": 10}, "synthetic_accept_length"),
        ({"identity": 10, "soak": 10}, "soak"),
        ({"streaming": "1", "soak": 10}, "soak"),
        ({"streaming": "1,999"}, "streaming"),
        ({"streaming": "1", "concurrency": "1"}, "concurrency"),
        ({"streaming": "1", "modes": "inprocess"}, "modes"),
        ({"soak": 10, "modes": "plain,device"}, "modes"),
        ({"soak": 10, "concurrency": "1,8"}, "concurrency"),
        ({"identity": 10, "modes": "plain"}, "modes"),
        ({"identity": 10, "modes": "inprocess,device"}, "modes"),
    ],
)
def test_what_cannot_be_meant_is_one_error_that_names_the_option(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (["--random", "tiny"], "random"),
        (["--synthetic-accept-length", "8.01"], "synthetic_accept_length"),
        (["--row-independent"], "row_independent"),
        (["--soak", "10"], "soak"),
        (["--device", "cuda", "--random", "tiny", "--peer", "transformers"], "peer"),
        (["--device", "cuda", "--random", "tiny", "--threads", "2"], "threads"),
        (["--device", "cuda"], "model"),
        (["--device", "cuda:one", "--random", "tiny"], "device"),
        (["--device", "cuda:99", "--random", "tiny"], "device"),
        (["--device", "cuda", "--random", "tiny", "--json", "no/such/folder/x.json"], "json"),
    ],
)
def test_an_option_of_the_other_device_is_refused(arguments: list[str], field: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, ConfigError)
    assert done.exception.field == field
