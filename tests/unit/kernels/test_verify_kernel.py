"""The kernels around a verify, in Triton's interpreter; tests/gpu runs the same checks compiled."""

from __future__ import annotations

from tests.kernel_checks import verify as checks

SEED = 20261203


def test_rows_are_anchor_and_drafts_with_ids_outside_the_vocabulary_clamped_and_counted() -> None:
    checks.check_stages_anchors_and_clamped_drafts("cpu", SEED)


def test_a_block_past_the_last_position_stays_within_table_and_positions() -> None:
    checks.check_a_block_that_passes_the_last_position_stays_in_its_memory("cpu", SEED)


def test_drafts_are_accepted_up_to_the_first_that_is_not_the_targets_choice() -> None:
    checks.check_accepts_up_to_the_first_difference("cpu", SEED)


def test_synthetic_acceptance_has_its_mean_whatever_was_drafted() -> None:
    checks.check_synthetic_acceptance_has_the_mean_that_was_asked_for("cpu", SEED)
