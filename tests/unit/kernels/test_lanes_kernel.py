"""The kernels over arrays by lane, in Triton's interpreter; tests/gpu runs the same checks compiled."""

from __future__ import annotations

from tests.kernel_checks import extend_rows, lanes

SEED = 20261204


def test_lanes_begin_and_pages_are_entered_once() -> None:
    lanes.check_updates_begin_lanes_and_enter_pages_once("cpu", SEED)


def test_prompt_rows_get_their_lanes_slots_and_padding_the_sentinels() -> None:
    extend_rows.check_stages_prompts_of_any_lengths("cpu", SEED)


def test_prompt_rows_past_the_last_position_stay_within_table_and_positions() -> None:
    extend_rows.check_a_prompt_that_passes_the_last_position_is_cut("cpu", SEED)


def test_the_token_at_a_prompts_end_becomes_the_anchor_of_its_lane_alone() -> None:
    extend_rows.check_the_token_at_a_prompts_end_becomes_the_anchor("cpu", SEED)
