"""Limits: they agree with one another, and what is outside is refused with field, limit and value."""

from __future__ import annotations

import math

import pytest

from common import limits
from common.errors import InvalidRequest
from services.target.core.request import SamplingParams


def test_a_message_of_the_largest_tensor_fits_what_grpc_carries() -> None:
    # Entries of a message: four kinds, each a few integers of at most 10 bytes.
    fields = 4 * limits.DRAFT_ENTRIES_MAX * 50
    assert limits.TENSOR_BYTES_MAX + fields < limits.MESSAGE_BYTES_MAX


def test_the_core_has_room_for_the_commands_of_all_requests_that_it_may_know() -> None:
    assert limits.CORE_INBOX_MAX >= 2 * (limits.REQUESTS_WAITING_MAX + limits.REQUESTS_RUNNING_MAX)
    assert limits.RPCS_MAX > limits.REQUESTS_WAITING_MAX + limits.REQUESTS_RUNNING_MAX
    assert limits.SESSIONS_MAX >= limits.REQUESTS_RUNNING_MAX


@pytest.mark.parametrize("value", [-1, 11, math.nan, math.inf, -math.inf])
def test_a_value_outside_its_range_is_named_with_its_limit(value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        limits.check_range("field", value, 0, 10)
    assert caught.value.field == "field"
    assert str(caught.value) == f"field: must be 0 to 10, got {value}"
    limits.check_range("field", 0, 0, 10)
    limits.check_range("field", 10, 0, 10)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", 100.1), ("temperature", 1e-4), ("temperature", math.nan),
        ("temperature", math.inf), ("top_k", -1), ("top_k", limits.VOCAB_ROWS_MAX + 1), ("top_p", 0.0),
        ("top_p", 1.1), ("top_p", math.nan), ("top_p", -1.0), ("min_p", -0.1), ("min_p", 1.1),
        ("min_p", math.nan), ("seed", -1), ("seed", 2**64),
    ],
)  # fmt: skip
def test_a_sampling_field_out_of_range_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value}).check()
    assert caught.value.field == f"sampling.{field}"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(), SamplingParams(temperature=1e-3), SamplingParams(temperature=100.0),
        SamplingParams(top_k=limits.VOCAB_ROWS_MAX, top_p=1e-12, min_p=1.0, seed=2**64 - 1),
    ],
)  # fmt: skip
def test_values_at_their_limits_are_good(params: SamplingParams) -> None:
    params.check()
