"""Ctrl-C and SIGTERM as a wish that is looked at between steps, so that what was measured can be written.

A second signal ends the process as it would without this.
"""

from __future__ import annotations

import signal
from types import FrameType


class Interrupted(Exception):
    """Somebody wants the run to end."""


class Interruption:
    """Catches SIGINT and SIGTERM in the block. Use it on the main thread."""

    def __init__(self) -> None:
        self.wanted = False

    def __enter__(self) -> Interruption:
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def is_wanted(self) -> bool:
        """Whether a signal came."""
        return self.wanted

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.wanted:
            raise Interrupted

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        self._restore()

    def _restore(self) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
