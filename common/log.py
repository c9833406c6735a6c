"""Structured logs: one JSON object a line on stderr. Ids, counts and times; never prompts or tokens.

That rule is kept by those who log; the guard here makes breaking it by accident harmless: long text
and sequences of numbers are replaced by their size.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

# Longer text is not an id, a name or a reason. Tracebacks have a limit of their own.
VALUE_CHARS_MAX = 300
TRACEBACK_CHARS_MAX = 8000
# A list of names, for instance of fields that differ, is at most this long.
NAMES_MAX = 32


def configure_log(level: str, service: str) -> None:
    """Send all logs of this process, also those of libraries, to stderr. Called once, at start."""
    threshold = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            _named(service),
            structlog.stdlib.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            # No local variables in tracebacks: they would hold prompts.
            structlog.processors.format_exc_info,
            _guard,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers = [_ToStructlog()]
    root.setLevel(max(threshold, logging.WARNING))


def get_log(component: str) -> Any:
    """A logger: `log.info("request_finished", request_id=…, num_output_tokens=…)`."""
    return structlog.get_logger(component=component)


class _ToStructlog(logging.Handler):
    """Passes records of the standard library on."""

    def emit(self, record: logging.LogRecord) -> None:
        get_log(record.name).log(record.levelno, record.getMessage(), exc_info=record.exc_info)


def _named(service: str) -> structlog.typing.Processor:
    def add_service(logger: object, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["service"] = service
        return event

    return add_service


def _guard(logger: object, method: str, event: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _small(value, _chars_max(key)) for key, value in event.items()}


def _chars_max(key: str) -> int:
    return TRACEBACK_CHARS_MAX if key == "exception" else VALUE_CHARS_MAX


def _small(value: Any, chars_max: int) -> Any:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _small(item, chars_max) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        if len(value) <= NAMES_MAX and all(isinstance(item, str) for item in value):
            return [_small(item, chars_max) for item in value]
        return f"<{len(value)} items>"
    text = str(value)
    return text if len(text) <= chars_max else f"{text[:chars_max]}… <{len(text)} characters>"
