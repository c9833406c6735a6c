"""Logs: JSON lines on stderr that cannot carry a prompt by accident."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from common.log import NAMES_MAX, VALUE_CHARS_MAX, configure_log, get_log


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


def logged(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_an_event_is_one_json_line_with_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    configure_log("info", "target")
    get_log("front").info("request_finished", request_id="a\nb", num_output_tokens=7, ok=True, none=None)
    (line,) = logged(capsys)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "service": "target", "component": "front", "level": "info", "event": "request_finished",
        "request_id": "a\nb", "num_output_tokens": 7, "ok": True, "none": None,
    }  # fmt: skip


def test_levels_below_the_configured_one_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    configure_log("warning", "target")
    get_log("x").info("quiet")
    get_log("x").warning("loud")
    assert [line["event"] for line in logged(capsys)] == ["loud"]


def test_sequences_of_numbers_and_long_text_are_replaced_by_their_size(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_log("info", "target")
    get_log("x").info("e", tokens=[11, 12, 13], ids=(1,), many=["a"] * (NAMES_MAX + 1),
                      nested={"tokens": [4, 5]}, text="p" * 1000, names=["dtype"])  # fmt: skip
    (line,) = logged(capsys)
    assert line["tokens"] == "<3 items>"
    assert line["ids"] == "<1 items>"
    assert line["many"] == f"<{NAMES_MAX + 1} items>"
    assert line["nested"] == {"tokens": "<2 items>"}
    assert line["text"] == "p" * VALUE_CHARS_MAX + "… <1000 characters>"
    assert line["names"] == ["dtype"]


def test_a_traceback_has_no_local_variables(capsys: pytest.CaptureFixture[str]) -> None:
    configure_log("info", "target")
    prompt = "canary" + "-prompt"
    try:
        raise ValueError(len(prompt))
    except ValueError:
        get_log("x").exception("call_failed")
    (line,) = logged(capsys)
    assert "ValueError: 13" in line["exception"]
    assert "canary-prompt" not in line["exception"]


def test_logs_of_libraries_take_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure_log("info", "drafter")
    logging.getLogger("grpc").error("stream %s broke", "x")
    (line,) = logged(capsys)
    assert (line["component"], line["event"], line["level"]) == ("grpc", "stream x broke", "error")
    assert line["service"] == "drafter"
