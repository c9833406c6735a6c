"""The kernels around a verify, in Triton's interpreter; tests/gpu runs the same checks compiled."""

from __future__ import annotations

from tests.kernel_checks import verify as checks

SEED = 20261203


def test_rows_are_anchor_and_drafts_with_ids_outside_the_vocabulary_clamped_and_counted() -> None:
    checks.check_assembles_rows_and_clamps_ids("cpu", SEED)


def test_drafts_are_accepted_up_to_the_first_that_is_not_the_targets_choice() -> None:
    checks.check_accepts_up_to_the_first_difference("cpu", SEED)
