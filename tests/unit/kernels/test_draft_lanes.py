"""The drafter's books in Triton's interpreter; tests/gpu runs the same checks compiled."""

from __future__ import annotations

from tests.kernel_checks import draft_lanes as checks

SEED = 20261207


def test_a_ring_row_is_taken_exactly_where_it_continues_its_lanes_context() -> None:
    checks.check_ring_rows_are_staged("cpu", SEED)


def test_an_append_is_taken_exactly_where_it_continues_its_lanes_context() -> None:
    checks.check_appends_are_staged("cpu", SEED)


def test_only_rows_that_became_context_spoil_an_outcome_and_only_good_rows_get_drafts() -> None:
    checks.check_rows_that_are_not_finite_are_named("cpu", SEED)


def test_pages_are_entered_up_to_the_number_announced() -> None:
    checks.check_pages_are_entered("cpu", SEED)
