"""How streamed answers are coloured."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from rich.console import Console

from tests.builders_chat import write_tokenizer
from tools.chat import ChatTokenizer
from tools.demo_view import AnswerPrinter, print_legend
from tools.target_client import ReceivedDelta

GREEN = "\x1b[1;32m"


@pytest.fixture
def tokenizer(tmp_path: Path) -> ChatTokenizer:
    return ChatTokenizer(write_tokenizer(tmp_path))


def _printed(tokenizer: ChatTokenizer, deltas: list[ReceivedDelta], *, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(
        file=out,
        force_terminal=terminal,
        color_system="standard" if terminal else None,
        width=30,
        legacy_windows=False,
    )
    printer = AnswerPrinter(console, tokenizer)
    for delta in deltas:
        printer.push(delta)
    printer.finish()
    return out.getvalue()


def _in_pieces(ids: list[int], marks: list[bool], width: int) -> list[ReceivedDelta]:
    return [
        ReceivedDelta(ids[i : i + width], marks[i : i + width], at_s=0.0) for i in range(0, len(ids), width)
    ]


def test_accepted_draft_tokens_are_green_and_others_are_not(tokenizer: ChatTokenizer) -> None:
    own, drafted = tokenizer.encode("the cat"), tokenizer.encode(" sat")
    printed = _printed(
        tokenizer,
        [ReceivedDelta(own, [False] * len(own), 0.0), ReceivedDelta(drafted, [True] * len(drafted), 0.0)],
        terminal=True,
    )
    answer = printed.splitlines()[-1]
    before, after = answer.split(GREEN, 1)
    assert "".join(before.split("\x1b[0m")).replace("\x1b[39m", "") == "the cat"
    assert "sat" in after


def test_without_a_terminal_the_plain_text_comes_out_whole(tokenizer: ChatTokenizer) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    text = "漢字 [bold]the mat[/] 😀 héé\nthe cat sat on the mat and on, far beyond the console's width " * 3
    ids = tokenizer.encode(text)
    marks = [rng.random() < 0.5 for _ in ids]
    printed = _printed(tokenizer, _in_pieces(ids, marks, rng.randint(1, 8)), terminal=False)
    assert "\x1b" not in printed
    assert printed == text + "\n"


def test_what_a_terminal_would_obey_is_not_passed_on(tokenizer: ChatTokenizer) -> None:
    ids = tokenizer.encode("a\x1b[2Jb\x07c\x9bd\n")
    printed = _printed(tokenizer, [ReceivedDelta(ids, [False] * len(ids), 0.0)], terminal=False)
    assert printed == "a\ufffd[2Jb\ufffdc\ufffdd\n\n"


def test_the_legend_says_what_green_means_or_why_there_is_none() -> None:
    out = io.StringIO()
    print_legend(Console(file=out, force_terminal=True, color_system="standard", width=100))
    print_legend(Console(file=out, width=100))
    coloured, plain = out.getvalue().splitlines()
    assert GREEN + "accepted draft tokens" in coloured
    assert "no colours here" in plain and "\x1b" not in plain
