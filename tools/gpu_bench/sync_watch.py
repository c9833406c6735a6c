"""Finds operations that make the host wait for the device unseen: torch's own check, counted, not fatal."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

_SIGN = "synchronizing"


class SyncWatch:
    """`found` names the place of each; the one wait of a step, for its results, is none of them."""

    def __init__(self) -> None:
        self.found: list[str] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what this thread does in the block. Warnings of other kinds are shown afterwards."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for warning in caught:
            if _SIGN in str(warning.message):
                self.found.append(f"{warning.filename}:{warning.lineno}")
            else:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno, source=warning.source
                )
