"""Sampling on the device, in Triton's interpreter; tests/gpu runs the same checks compiled."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_checks import sampling as checks

SEED = 20261204


# A list of 64 is often too short, so that both ways of filtering are taken.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_definition_under_any_mixture_of_filters(dtype: torch.dtype) -> None:
    checks.check_chooses_as_defined("cpu", dtype, SEED, num_rows=12, vocab=500, chunk=256, list_len=64)


def test_a_rows_token_is_the_same_alone_and_among_others_listed_or_not() -> None:
    checks.check_a_row_alone_equals_the_row_in_a_batch(
        "cpu", torch.float32, SEED, vocab=300, chunk=128, list_len=64
    )


def test_a_row_with_nan_or_infinity_is_named_and_gets_an_id_of_the_vocabulary() -> None:
    checks.check_rows_that_are_not_finite_are_named("cpu", torch.float32, chunk=128)


def test_greedy_rows_alone_need_no_parameters() -> None:
    checks.check_greedy_without_parameters("cpu", torch.bfloat16, SEED, vocab=500, chunk=128)


def test_the_noise_is_made_of_the_published_words_bit_for_bit() -> None:
    checks.check_words_are_the_published_ones("cpu", SEED)


def test_filters_keep_exactly_the_defined_tokens_also_among_equals() -> None:
    # A list that all fit but the flat tail, a row in one chunk, and every second case; tests/gpu has all.
    checks.check_filters_keep_exactly_the_defined_tokens(
        "cpu", torch.bfloat16, list_len=32, chunk=512, stride=2
    )
