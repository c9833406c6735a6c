"""What the demo measures and writes, against a scripted target."""

from __future__ import annotations

import io
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from rich.console import Console

from common.errors import ConfigError
from common.pb.tandem.v1 import target_pb2
from tests.fakes import ScriptedTarget
from tools.demo import as_json
from tools.demo_view import result_table
from tools.launch import existing_dirs
from tools.side_by_side import Comparison, accept_length, compare, overall_tok_s, speedup
from tools.target_client import Answer, CallFailed, GenerateOptions, ReceivedDelta, TargetClient

Serve = Callable[[ScriptedTarget], TargetClient]


@pytest.fixture
def serve() -> Iterator[Serve]:
    # tmp_path may be longer than a socket's path can be.
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        yield lambda target: stack.enter_context(target.serving(f"unix:{directory}/target.sock"))


def _continue(prompt: list[int], drafting: bool) -> list[int]:
    return [(prompt[-1] + i) % 97 for i in range(1, 400)]


def test_an_answer_holds_every_token_and_mark_in_order(serve: Serve) -> None:
    client = serve(ScriptedTarget(_continue))
    answer = client.generate([5, 6], GenerateOptions(max_new_tokens=7))
    assert answer.token_ids == [7, 8, 9, 10, 11, 12, 13]
    assert answer.from_draft == [True, True, False, True, True, False, False]
    assert answer.num_decoded == 4
    assert 0 < answer.decode_s < 5


def test_a_refusal_is_one_error_with_code_field_limit_and_value(serve: Serve) -> None:
    client = serve(ScriptedTarget(_continue))
    with pytest.raises(CallFailed, match=r"input_ids: must be at least 1 id, got 0") as refusal:
        client.generate([], GenerateOptions())
    assert refusal.value.code == grpc.StatusCode.INVALID_ARGUMENT


def test_an_exception_while_streaming_cancels_the_request(serve: Serve) -> None:
    target = ScriptedTarget(_continue, pause_s=0.01)
    client = serve(target)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.generate([1], GenerateOptions(max_new_tokens=300), interrupt)
    assert target.left_early.wait(5)


def test_prompts_are_measured_plain_and_drafted_in_turn_with_the_same_sampling(serve: Serve) -> None:
    target = ScriptedTarget(_continue)
    options = GenerateOptions(max_new_tokens=30, temperature=0.5, seed=9)
    comparison = compare(serve(target), [3], options, num_rounds=2)
    assert [r.disable_drafting for r in target.requests] == [True, False, False, True]
    assert {(r.sampling.temperature, r.sampling.seed) for r in target.requests} == {(0.5, 9)}
    assert comparison.same_tokens
    assert comparison.num_tokens == 30
    assert accept_length([answer.finished for answer in comparison.drafted]) == pytest.approx(3.0)
    # Ten messages instead of thirty, with the same pause before each.
    assert speedup([comparison]) > 1.5


def test_the_overall_speed_weighs_prompts_by_their_tokens() -> None:
    def answer(num_tokens: int, seconds: float) -> Answer:
        deltas = [([0], 0.0), ([0] * (num_tokens - 1), seconds)]
        return Answer([ReceivedDelta(t, [False] * len(t), at) for t, at in deltas], target_pb2.Finished())

    long = Comparison([answer(101, 10.0)], [answer(101, 5.0)])  # 10 tok/s, 20 tok/s
    short = Comparison([answer(11, 10.0)], [answer(11, 20.0)])  # 1 tok/s, 0.5 tok/s
    plain, drafted = overall_tok_s([long, short])
    assert plain == pytest.approx(112 / (10.1 + 11))
    assert drafted == pytest.approx(112 / (5.05 + 22))
    assert speedup([long, short]) == pytest.approx(drafted / plain)


def test_one_differing_token_is_seen(serve: Serve) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    wrong = random.Random(seed).randrange(20)

    def answer(prompt: list[int], drafting: bool) -> list[int]:
        tokens = _continue(prompt, drafting)
        if drafting:
            tokens[wrong] += 1
        return tokens

    comparison = compare(serve(ScriptedTarget(answer)), [3], GenerateOptions(max_new_tokens=20), num_rounds=1)
    assert not comparison.same_tokens


def test_the_json_has_exactly_the_promised_keys(serve: Serve) -> None:
    client = serve(ScriptedTarget(_continue))
    comparison = compare(client, [3], GenerateOptions(max_new_tokens=9), num_rounds=1)
    result = as_json(["why?"], [comparison])
    assert set(result) == {"prompts", "accept_length", "speedup", "same_tokens"}
    assert set(result["prompts"][0]) == {
        "prompt", "tokens", "accept_length", "plain_tok_s", "tandem_tok_s", "same_tokens",
    }  # fmt: skip
    assert result["same_tokens"] is True
    assert result["prompts"][0]["tokens"] == 9


def test_the_table_shows_totals_and_no_colour_codes_outside_a_terminal(serve: Serve) -> None:
    client = serve(ScriptedTarget(_continue))
    comparisons = [compare(client, [n], GenerateOptions(max_new_tokens=9), num_rounds=1) for n in (1, 2)]
    out = io.StringIO()
    Console(file=out, width=120).print(result_table(["one [bold]", "two"], comparisons))
    assert "18" in out.getvalue() and "3.00" in out.getvalue() and "one [bold]" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_an_answer_of_one_message_counts_as_unknown_speed_not_as_an_error(serve: Serve) -> None:
    client = serve(ScriptedTarget(_continue))
    comparison = compare(client, [3], GenerateOptions(max_new_tokens=1), num_rounds=1)
    assert comparison.plain_tok_s == 0
    assert speedup([comparison]) == 0
    assert speedup([Comparison()][:0]) == 0


def test_a_missing_draft_is_named_with_its_field_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"draft: .*tandem train.*models/SmolLM2"):
        existing_dirs("model", "models/SmolLM2-135M-Instruct-DFlash-b8")
    with pytest.raises(ConfigError, match=r"draft: .*/nowhere/at/all"):
        existing_dirs("model", "/nowhere/at/all")
