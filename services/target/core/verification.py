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
    """tokens: what a step may commit, the first num_accepted of which come from the draft. Nothing is
    committed past a stop id."""
    if stop_ids.isdisjoint(tokens):
        return Verified(tokens, num_accepted, None)
    index = next(i for i, token in enumerate(tokens) if token in stop_ids)
    return Verified(tokens[: index + 1], min(num_accepted, index + 1), tokens[index])
