"""Sampling and verification on the device, compiled; the checks are those of tests/unit/kernels."""

from __future__ import annotations

import pytest
import torch

from tests.kernel_checks import extend_rows, lanes, sampling, verify

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(300),  # compiles
]

SEED = 20261206


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab, list_len", [(5000, 64), (49152, 4096), (151936, 4096)])
def test_tokens_are_those_of_the_definition_under_any_mixture_of_filters(
    vocab: int, list_len: int, dtype: torch.dtype, pdl: bool
) -> None:
    sampling.check_chooses_as_defined(
        "cuda", dtype, SEED, num_rows=24, vocab=vocab, chunk=4096, list_len=list_len, pdl=pdl
    )


def test_a_rows_token_is_the_same_alone_and_among_others_listed_or_not() -> None:
    sampling.check_a_row_alone_equals_the_row_in_a_batch(
        "cuda", torch.bfloat16, SEED, vocab=20_000, chunk=2048, list_len=1024
    )


@pytest.mark.parametrize("list_len", [4, 32])
def test_filters_keep_exactly_the_defined_tokens_also_among_equals(list_len: int) -> None:
    sampling.check_filters_keep_exactly_the_defined_tokens("cuda", torch.float32, list_len=list_len)


def test_a_row_with_nan_or_infinity_is_named_and_gets_an_id_of_the_vocabulary() -> None:
    sampling.check_rows_that_are_not_finite_are_named("cuda", torch.bfloat16, chunk=128)


def test_greedy_rows_alone_need_no_parameters() -> None:
    sampling.check_greedy_without_parameters("cuda", torch.bfloat16, SEED, vocab=49152, chunk=4096)


def test_the_noise_is_made_of_the_published_words_bit_for_bit() -> None:
    sampling.check_words_are_the_published_ones("cuda", SEED)


@pytest.mark.parametrize("pdl", [False, True])
def test_a_verify_takes_clamped_rows_and_accepts_up_to_the_first_difference(pdl: bool) -> None:
    verify.check_stages_anchors_and_clamped_drafts("cuda", SEED, pdl=pdl)
    verify.check_accepts_up_to_the_first_difference("cuda", SEED, pdl=pdl)
    verify.check_a_block_that_passes_the_last_position_stays_in_its_memory("cuda", SEED)
    verify.check_synthetic_acceptance_has_the_mean_that_was_asked_for("cuda", SEED)


@pytest.mark.parametrize("pdl", [False, True])
def test_lanes_begin_once_and_prompts_get_their_rows_and_anchors(pdl: bool) -> None:
    lanes.check_updates_begin_lanes_and_enter_pages_once("cuda", SEED, pdl=pdl)
    extend_rows.check_stages_prompts_of_any_lengths("cuda", SEED, pdl=pdl)
    extend_rows.check_a_prompt_that_passes_the_last_position_is_cut("cuda", SEED)
    extend_rows.check_the_token_at_a_prompts_end_becomes_the_anchor("cuda", SEED, pdl=pdl)
