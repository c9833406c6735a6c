"""Both services at their most talkative: nothing of a prompt or an answer is in what they write."""

from __future__ import annotations

import json
import random
import re
import urllib.request
from pathlib import Path

import pytest

from tests.builders import build_tiny_draft_dir, build_tiny_llama_dir
from tools.local_stack import LocalStack
from tools.target_client import CallFailed, GenerateOptions, TargetClient

# Ids of five digits, so that none is by chance a count, a port or a part of a time.
VOCAB_SIZE = 60_000
FIRST_CANARY = 50_000


def canaries_in(text: str) -> list[str]:
    """Numbers in `text` that could be ids of the prompt; times have a point, ids of lives are hex."""
    numbers = re.findall(r"(?<![\w.])\d{5}(?![\w.])", text)
    return [number for number in numbers if FIRST_CANARY <= int(number) < VOCAB_SIZE]


def without_addresses(line: str) -> str:
    """A log line without its port numbers, which may look like ids."""
    event = json.loads(line)
    event.pop("metrics_port", None)
    return json.dumps(event)


def test_no_token_of_a_prompt_reaches_a_log_or_the_metrics(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    model_dir = build_tiny_llama_dir(tmp_path / "model", vocab_size=VOCAB_SIZE)
    draft_dir = build_tiny_draft_dir(tmp_path / "draft", model_dir)
    prompt = [rng.randrange(FIRST_CANARY, VOCAB_SIZE) for _ in range(40)]
    talkative = ("--log-level", "debug", "--threads", "1")
    with LocalStack(model_dir, draft_dir, target_flags=talkative, drafter_flags=talkative) as stack:
        with TargetClient(stack.target.address) as client:
            client.generate(prompt, GenerateOptions(max_new_tokens=24, temperature=0.8, seed=1))
            with pytest.raises(CallFailed, match="to 59999, got 60000"):
                client.generate([*prompt, VOCAB_SIZE], GenerateOptions())
            with pytest.raises(CallFailed, match="max_new_tokens"):
                client.generate(prompt, GenerateOptions(max_new_tokens=2**31))
            left = client.start(prompt, GenerateOptions(ignore_eos=True), request_id="caller-that-leaves")
            next(iter(left))
            left.cancel()
            pages = [
                urllib.request.urlopen(url, timeout=5).read().decode()
                for url in (stack.target_metrics_url, stack.drafter_metrics_url)
            ]
        stack.target.stop(5)
        stack.drafter.stop(5)
        logs = [(stack.directory / f"{name}.log").read_text() for name in ("target", "drafter")]
    for log in logs:
        lines = log.splitlines()
        assert len(lines) >= 4, "the service said something"
        assert all(line.startswith("{") for line in lines), "one JSON object a line"
        for line in lines:
            assert not canaries_in(without_addresses(line)), line
    events = [json.loads(line)["event"] for line in logs[0].splitlines()]
    assert {"configuration", "request_finished", "request_rejected"} <= set(events)
    for page in pages:
        labels_only = re.sub(r" [-+.\de]+$", "", page, flags=re.MULTILINE)
        assert not canaries_in(re.sub(r'le="[^"]*"', "", labels_only))


def test_the_search_finds_what_it_looks_for() -> None:
    assert canaries_in('{"tokens": [50001, 59999]}') == ["50001", "59999"]
    assert canaries_in("got 60000, took 0.50001 s, id ab50001cd, port 49999") == []
