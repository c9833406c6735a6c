"""The model contract: every difference named with both values, and drafts that a target cannot serve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common import limits
from common.contract import DraftContract, TargetContract, mismatches, unfit

TARGET = TargetContract(576, 30, 49152, "float32", "0123456789abcdef")
DRAFT = DraftContract((1, 7, 14, 20, 27), 8, 7, 16, 2048, "fedcba")


@pytest.mark.parametrize(
    ("field", "theirs"),
    [("hidden_size", 64), ("num_layers", 29), ("vocab_rows", 49280), ("dtype", "bfloat16"),
     ("weights_fingerprint", "ffff")],
)  # fmt: skip
def test_each_field_that_differs_is_named_with_both_values(field: str, theirs: object) -> None:
    found = mismatches(TARGET, replace(TARGET, **{field: theirs}))  # type: ignore[arg-type]
    assert [(m.field, m.ours, m.theirs) for m in found] == [(field, getattr(TARGET, field), theirs)]
    assert str(found[0]) == f"{field}: ours {getattr(TARGET, field)}, theirs {theirs}"


def test_all_differences_are_named_at_once() -> None:
    other = TargetContract(1, 2, 3, "float16", "x")
    assert len(mismatches(TARGET, other)) == 5
    assert mismatches(TARGET, replace(TARGET)) == []


def test_the_draft_that_ships_fits() -> None:
    assert unfit(TARGET, DRAFT) == []


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("captured_layer_ids", {"captured_layer_ids": ()}),
        ("captured_layer_ids", {"captured_layer_ids": (1, 7, 7)}),
        ("captured_layer_ids", {"captured_layer_ids": (-1, 7)}),
        # The last layer's output means different things in published drafts.
        ("captured_layer_ids", {"captured_layer_ids": (1, 29)}),
        ("captured_layer_ids", {"captured_layer_ids": (1, 30)}),
        ("captured_layer_ids", {"captured_layer_ids": tuple(range(limits.CAPTURED_LAYERS_MAX + 1))}),
        ("block_size", {"block_size": 1, "num_draft_tokens": 0}),
        ("block_size", {"block_size": limits.BLOCK_SIZE_MAX + 1, "num_draft_tokens": limits.BLOCK_SIZE_MAX}),
        ("num_draft_tokens", {"num_draft_tokens": 8}),
        ("mask_token_id", {"mask_token_id": 49152}),
        ("mask_token_id", {"mask_token_id": -1}),
        ("context_len_max", {"context_len_max": 7}),
    ],
)
def test_a_draft_that_cannot_be_served_is_refused_by_the_name_of_its_field(
    field: str, change: dict[str, Any]
) -> None:
    target = replace(TARGET, num_layers=64) if len(change.get("captured_layer_ids", ())) > 30 else TARGET
    assert [m.field for m in unfit(target, replace(DRAFT, **change))] == [field]


def test_the_first_and_the_last_but_one_layer_may_be_captured() -> None:
    assert unfit(TARGET, replace(DRAFT, captured_layer_ids=(0, 28))) == []
