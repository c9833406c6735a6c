"""What crosses the joint: frames of any size in pieces of any size, and every value as it was."""

from __future__ import annotations

import random
import struct

import pytest

from common import limits
from common.errors import InvalidRequest, Overloaded, TandemError, Unavailable
from common.pb.tandem.v1 import core_pb2, target_pb2
from services.target.core.report import CoreStats
from services.target.core.request import FinishReason, Request, RequestFinished
from services.target.core.request_loop import NonFiniteLogits
from services.target.facts import DrafterFacts, DrafterState, ServedModel
from services.target.front.validation import parse_generate
from services.target.joint.frames import BrokenJoint, FrameReader, framed
from services.target.joint.messages import (
    decode_error,
    decode_facts,
    decode_finished,
    decode_model,
    decode_request,
    encode_error,
    encode_facts,
    encode_finished,
    encode_model,
    encode_request,
)


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def taken(reader: FrameReader) -> list[bytes]:
    contents = []
    while (content := reader.take()) is not None:
        contents.append(content)
    return contents


def test_frames_come_out_as_they_went_in_whatever_the_pieces(rng: random.Random) -> None:
    contents = [rng.randbytes(rng.choice((0, 1, 3, 200, 70_000))) for _ in range(60)]
    stream = b"".join(map(framed, contents))
    reader, got = FrameReader(), []
    while stream:
        size = rng.choice((1, 2, 5, 300, 100_000))
        reader.feed(stream[:size])
        stream = stream[size:]
        got += taken(reader)
    assert got == contents


def test_a_frame_over_the_limit_is_refused_by_its_length_alone() -> None:
    reader = FrameReader()
    reader.feed(struct.pack("<I", limits.JOINT_FRAME_BYTES_MAX) + b"x")
    assert reader.take() is None, "allowed, and not complete"
    reader = FrameReader()
    reader.feed(struct.pack("<I", limits.JOINT_FRAME_BYTES_MAX + 1))
    with pytest.raises(BrokenJoint, match="limit is 8388608 bytes, have 8388609"):
        reader.take()


def test_a_request_arrives_as_it_was(rng: random.Random) -> None:
    model = ServedModel("m", "a", vocab_size=2**22, max_len=5000, eos_token_ids=(2, 7), dtype="float32")
    for _ in range(100):
        # As the front gets them: the sampling parameters are 32-bit numbers.
        message = target_pb2.GenerateRequest(
            request_id=f"näme {rng.random()}",
            input_ids=[rng.randrange(2**22) for _ in range(rng.choice((1, 2, 999)))],
            sampling=target_pb2.SamplingParams(
                temperature=rng.choice((0, rng.uniform(0.1, 2))), top_k=rng.randrange(100),
                top_p=rng.uniform(0.1, 1), min_p=rng.random(), seed=rng.randrange(2**64),
            ),
            max_new_tokens=rng.randrange(1, 4000),
            stop_token_ids=[rng.randrange(2**22) for _ in range(rng.randrange(64))],
            ignore_eos=rng.random() < 0.5,
            disable_drafting=rng.random() < 0.5,
        )  # fmt: skip
        sent = parse_generate(message, model, fresh_seed=lambda: 1, emit=print)
        got = decode_request(core_pb2.Submit.FromString(encode_request(77, sent).SerializeToString()))
        for name in (
            "request_id", "prompt", "sampling", "max_new_tokens", "stop_token_ids", "drafting", "tokens"
        ):  # fmt: skip
            assert getattr(got, name) == getattr(sent, name), name


def test_the_longest_prompt_fits_a_frame() -> None:
    request = Request(
        "x" * limits.REQUEST_ID_CHARS_MAX, [limits.VOCAB_ROWS_MAX - 1] * limits.CONTEXT_LEN_MAX,
        target_request().sampling, limits.CONTEXT_LEN_MAX, frozenset(range(200)), True, print,
    )  # fmt: skip
    message = core_pb2.FromFront(submit=encode_request(2**32 - 1, request))
    assert len(framed(message.SerializeToString())) < limits.JOINT_FRAME_BYTES_MAX


def target_request() -> Request:
    model = ServedModel("m", "a", vocab_size=100, max_len=50, eos_token_ids=(2,), dtype="float32")
    message = target_pb2.GenerateRequest(request_id="r", input_ids=[1])
    return parse_generate(message, model, fresh_seed=lambda: 2**64 - 1, emit=print)


@pytest.mark.parametrize("reason", list(FinishReason))
@pytest.mark.parametrize("matched", [None, 0, 9])
def test_an_ending_arrives_as_it_was(reason: FinishReason, matched: int | None) -> None:
    event = RequestFinished(reason, matched, 1, 2, 3, 4, 5, 6, 2**64 - 1, 0.1, 0.2, 1 / 3)
    message = encode_finished(event)
    assert decode_finished(target_pb2.Finished.FromString(message.SerializeToString())) == event


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("request_id", limit="unique among running requests", given="r"),
        InvalidRequest("max_new_tokens", limit=7, given=8),
        Overloaded("core inbox", limit=2048, given=2048),
        Unavailable("service is draining"),
    ],
)
def test_an_error_keeps_its_type_its_text_and_its_field(error: TandemError) -> None:
    got = decode_error(core_pb2.Failure.FromString(encode_error(error).SerializeToString()))
    assert type(got) is type(error)
    assert str(got) == str(error)
    if isinstance(error, InvalidRequest):
        assert isinstance(got, InvalidRequest)
        assert got.field == error.field


def test_any_other_error_keeps_its_text_and_stays_one_of_the_product() -> None:
    got = decode_error(encode_error(NonFiniteLogits("logits: must be finite, got NaN or infinity")))
    assert type(got) is TandemError
    assert str(got) == "logits: must be finite, got NaN or infinity"


@pytest.mark.parametrize("state", list(DrafterState))
def test_facts_arrive_as_they_were(state: DrafterState) -> None:
    stats = CoreStats(1, 2, 3, 4, -5)
    drafter = DrafterFacts(state, 8, 2, ("dtype: ours a, theirs b",))
    message = core_pb2.CoreFacts.FromString(encode_facts(stats, drafter).SerializeToString())
    assert decode_facts(message) == (stats, drafter)
    model = ServedModel("m", "LlamaForCausalLM", 100, 50, (2, 5), "bfloat16")
    assert decode_model(encode_model(model)) == model


def test_a_drafter_cannot_make_a_frame_too_long_with_what_it_says_of_itself() -> None:
    line = "captured_layer_ids: ours 1 to 32 layers, theirs " + "1, " * 2_000_000
    drafter = DrafterFacts(DrafterState.MISMATCH, mismatches=(line,) * 1000)
    message = core_pb2.FromCore(facts=encode_facts(CoreStats(0, 0, 0, 0, 0), drafter))
    assert len(framed(message.SerializeToString())) < 30_000
