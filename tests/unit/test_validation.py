"""Every field of a request: what is refused, by which name, and that nothing is repaired."""

from __future__ import annotations

import math
import random

import pytest

from common import limits
from common.errors import InvalidRequest
from common.pb.tandem.v1 import target_pb2
from services.target.core.request import Request
from services.target.facts import ServedModel
from services.target.front.validation import parse_generate

MODEL = ServedModel(
    "m", "LlamaForCausalLM", vocab_size=100, max_len=32, eos_token_ids=(2, 5), dtype="float32"
)
SEED = 77


def parse(**fields: object) -> Request:
    message = target_pb2.GenerateRequest(**{"request_id": "r", "input_ids": [1, 2, 3]} | fields)
    return parse_generate(message, MODEL, fresh_seed=lambda: SEED, emit=lambda event: None)


def sampling(**fields: object) -> target_pb2.SamplingParams:
    return target_pb2.SamplingParams(**fields)


def test_absent_fields_take_their_documented_defaults() -> None:
    request = parse()
    assert (request.sampling.temperature, request.sampling.top_k) == (0.0, 0)
    assert (request.sampling.top_p, request.sampling.min_p) == (1.0, 0.0)
    assert request.sampling.seed == SEED
    assert request.max_new_tokens == 32 - 3, "the room up to the context limit"
    assert request.stop_token_ids == {2, 5}
    assert request.drafting


def test_given_fields_arrive_unchanged() -> None:
    request = parse(
        sampling=sampling(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=0),
        max_new_tokens=4, stop_token_ids=[9, 9, 99], ignore_eos=True, disable_drafting=True,
    )  # fmt: skip
    s = request.sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p, s.seed) == (0.5, 7, 0.25, 0.125, 0)
    assert request.max_new_tokens == 4
    assert request.stop_token_ids == {9, 99}
    assert not request.drafting
    assert request.prompt == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "field", "limit", "given"),
    [
        ({"request_id": ""}, "request_id", "1 to 128 characters", "0 characters"),
        ({"request_id": "x" * 129}, "request_id", "1 to 128 characters", "129 characters"),
        ({"request_id": "a\nb"}, "request_id", "printable", "others"),
        ({"input_ids": []}, "input_ids", "1 to 31 tokens", "0 tokens"),
        ({"input_ids": [1] * 32}, "input_ids", "1 to 31 tokens", "32 tokens"),
        ({"input_ids": [1] * 100_000}, "input_ids", "1 to 31 tokens", "100000 tokens"),
        ({"input_ids": [1, 100, 3]}, "input_ids[1]", "0 to 99", "100"),
        ({"input_ids": [1, 2, 2**32 - 1]}, "input_ids[2]", "0 to 99", str(2**32 - 1)),
        ({"max_new_tokens": 0}, "max_new_tokens", "1 to 29", "0"),
        ({"max_new_tokens": 30}, "max_new_tokens", "1 to 29", "30"),
        ({"max_new_tokens": 2**32 - 1}, "max_new_tokens", "1 to 29", str(2**32 - 1)),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "at most 64 ids", "65 ids"),
        ({"stop_token_ids": [100]}, "stop_token_ids[0]", "0 to 99", "100"),
        ({"sampling": sampling(temperature=-0.5)}, "sampling.temperature", "0.0 to 100.0", "-0.5"),
        ({"sampling": sampling(temperature=101)}, "sampling.temperature", "0.0 to 100.0", "101"),
        ({"sampling": sampling(temperature=math.nan)}, "sampling.temperature", "0.0 to 100.0", "nan"),
        ({"sampling": sampling(temperature=math.inf)}, "sampling.temperature", "0.0 to 100.0", "inf"),
        ({"sampling": sampling(temperature=2**-20)}, "sampling.temperature", "0 (greedy)", str(2**-20)),
        ({"sampling": sampling(top_k=2**32 - 1)}, "sampling.top_k", "4194304", str(2**32 - 1)),
        ({"sampling": sampling(top_p=0)}, "sampling.top_p", "above 0 and at most 1", "0.0"),
        ({"sampling": sampling(top_p=1.5)}, "sampling.top_p", "above 0 and at most 1", "1.5"),
        ({"sampling": sampling(top_p=math.nan)}, "sampling.top_p", "above 0 and at most 1", "nan"),
        ({"sampling": sampling(min_p=-1)}, "sampling.min_p", "0.0 to 1.0", "-1"),
        ({"sampling": sampling(min_p=math.nan)}, "sampling.min_p", "0.0 to 1.0", "nan"),
    ],
)
def test_a_field_out_of_range_is_refused_by_name_limit_and_value(
    fields: dict[str, object], field: str, limit: str, given: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**fields)
    assert caught.value.field == field
    text = str(caught.value)
    assert text.startswith(f"{field}: must be ")
    assert limit in text
    assert given in text
    assert len(text) < 200, "an error does not repeat what a caller may have made long"


def test_the_edges_of_every_range_are_allowed() -> None:
    assert parse(input_ids=[99] * 31).max_new_tokens == 1
    assert parse(max_new_tokens=29).max_new_tokens == 29
    assert parse(stop_token_ids=[0] * 64).stop_token_ids == {0, 2, 5}
    assert len(parse(request_id="é" * limits.REQUEST_ID_CHARS_MAX).request_id) == 128
    edge = sampling(temperature=100, top_k=100, top_p=1, min_p=1, seed=2**64 - 1)
    assert parse(sampling=edge).sampling.seed == limits.SEED_MAX


def test_without_ignore_eos_own_stop_ids_are_added_to_the_models() -> None:
    assert parse(stop_token_ids=[7]).stop_token_ids == {2, 5, 7}
    assert parse(ignore_eos=True).stop_token_ids == frozenset()


def test_what_is_accepted_always_fits_the_model() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    num_accepted = 0
    for _ in range(500):
        fields = {
            "input_ids": [rng.randrange(101) for _ in range(rng.randrange(34))],
            "stop_token_ids": [rng.randrange(102) for _ in range(rng.randrange(4))],
        }
        if rng.random() < 0.7:
            fields["max_new_tokens"] = rng.randrange(34)
        try:
            request = parse(**fields)
        except InvalidRequest:
            continue
        num_accepted += 1
        assert len(request.prompt) + request.max_new_tokens <= MODEL.max_len
        assert request.max_new_tokens >= 1
        assert max(*request.prompt, *request.stop_token_ids, 0) < MODEL.vocab_size
    assert num_accepted > 50
