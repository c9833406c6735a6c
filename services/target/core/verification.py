"""Which of a step's tokens are committed. Pure: no torch, no request state.

The target's own token was chosen at every row of [anchor, d1 … dK]. Drafts are accepted while they
equal it; the first token after them is the bonus. Source: dflash.md §5; with a greedy drafter this
accepts as often as point-mass rejection sampling, and gives the very tokens of plain decoding.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple


class Verified(NamedTuple):
    """tokens: what is committed, accepted drafts first. num_accepted of them came from the draft.
    matched_stop: the stop id that ended it (always the last token), or None."""

    tokens: list[int]
    num_accepted: int
    matched_stop: int | None


def verify(chosen: list[int], draft: list[int], stop_ids: Set[int]) -> Verified:
    """chosen: the target's tokens, len(draft) + 1 of them. Nothing is committed past a stop id."""
    assert len(chosen) == len(draft) + 1
    num_accepted = 0
    while num_accepted < len(draft) and draft[num_accepted] == chosen[num_accepted]:
        num_accepted += 1
    return end_at_stop(chosen[: num_accepted + 1], num_accepted, stop_ids)


def end_at_stop(tokens: list[int], num_accepted: int, stop_ids: Set[int]) -> Verified:
    """tokens: the first of a step's that may be committed, one at least; the step accepted num_accepted
    drafts, which may be more. Nothing is committed past a stop id."""
    matched = None
    if not stop_ids.isdisjoint(tokens):
        index = next(i for i, token in enumerate(tokens) if token in stop_ids)
        tokens, matched = tokens[: index + 1], tokens[index]
    return Verified(tokens, min(num_accepted, len(tokens)), matched)
