"""Acceptance, against its definition token by token."""

from __future__ import annotations

import random

import pytest

from services.target.core.verification import verify

SEED = 20261212


def test_drafts_are_accepted_while_they_equal_the_targets_own_tokens() -> None:
    verified = verify([5, 6, 7, 8], [5, 6, 9], frozenset())
    assert (verified.tokens, verified.num_accepted, verified.matched_stop) == ([5, 6, 7], 2, None)


def test_a_draft_accepted_whole_is_followed_by_the_bonus() -> None:
    assert verify([5, 6, 7], [5, 6], frozenset()).tokens == [5, 6, 7]


def test_a_token_that_is_right_after_a_wrong_one_is_not_accepted() -> None:
    """The target's later tokens were chosen after the wrong one and mean nothing."""
    assert verify([5, 6, 7], [4, 6], frozenset()).tokens == [5]


def test_no_draft_commits_the_one_token() -> None:
    assert verify([5], [], frozenset()).tokens == [5]


@pytest.mark.parametrize("offset", range(5))
def test_nothing_is_committed_past_a_stop_at_any_offset(offset: int) -> None:
    chosen = [10, 11, 12, 13, 14]
    verified = verify(chosen, chosen[:4], {chosen[offset], 99})
    assert verified.tokens == chosen[: offset + 1]
    assert verified.matched_stop == chosen[offset]
    # At the last offset the stop is the bonus, which no draft proposed.
    assert verified.num_accepted == min(offset + 1, 4)


def test_a_stop_id_that_the_draft_proposes_and_the_target_does_not_choose_stops_nothing() -> None:
    assert verify([5, 6], [99], {99}).matched_stop is None


def test_as_many_choices_as_rows_are_needed() -> None:
    with pytest.raises(AssertionError):
        verify([5, 6], [5, 6], frozenset())


def test_random_blocks_equal_the_token_by_token_definition() -> None:
    rng = random.Random(SEED)
    for _ in range(2000):
        draft = [rng.randrange(3) for _ in range(rng.randint(0, 6))]
        chosen = [rng.randrange(3) for _ in range(len(draft) + 1)]
        stops = frozenset(rng.sample(range(3), rng.randint(0, 2)))
        committed, accepted, matched = [], 0, None
        for i, token in enumerate(chosen):
            committed.append(token)
            is_drafted = i < len(draft) and draft[i] == token
            accepted += is_drafted
            if token in stops:
                matched = token
            if matched is not None or not is_drafted:
                break
        verified = verify(chosen, draft, stops)
        assert verified.tokens == committed
        assert (verified.num_accepted, verified.matched_stop) == (accepted, matched)
