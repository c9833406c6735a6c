"""The model and the link to the drafter as callers are told of them. No grpc, no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True)
class ServedModel:
    """The model as callers see it.

    vocab_size: ids below it may be used. max_len: prompt plus output, in tokens.
    """

    name: str
    architecture: str
    vocab_size: int
    max_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str


class DrafterState(enum.Enum):
    DISABLED = "disabled"
    UP = "up"
    DOWN = "down"
    MISMATCH = "mismatch"


@dataclass(frozen=True)
class DrafterFacts:
    """The link to the drafter. mismatches: a line for each field that does not fit."""

    state: DrafterState = DrafterState.DISABLED
    block_size: int = 0
    num_sessions: int = 0
    mismatches: tuple[str, ...] = ()
