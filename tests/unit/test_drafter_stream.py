"""The bounded meeting place of the core's and the link's thread; the handshake's checks."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from common import limits
from common.contract import PROTOCOL_VERSION, DraftContract, TargetContract
from common.handoff.transport import PeerFault, PeerLost
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.wire import encode_draft_contract, encode_target_contract
from services.target.core.drafter_handshake import Agreement, ContractsDiffer, agree, hello, refusal
from services.target.core.drafter_stream import DrafterStream

TARGET = TargetContract(3, 4, 50, "float32", "w")
DRAFT = DraftContract((0, 2), 4, 3, 49, 128, "d")


@pytest.fixture
def stream() -> DrafterStream:
    return DrafterStream(Agreement("d", DRAFT, 8), lambda: None)


def test_messages_in_flight_are_bounded_until_they_are_answered(stream: DrafterStream) -> None:
    for _ in range(limits.MESSAGES_IN_FLIGHT_MAX):
        assert stream.send([pb.DraftRequest()])
    assert not stream.send([pb.DraftRequest()])
    assert len(stream.take_outgoing()) == limits.MESSAGES_IN_FLIGHT_MAX
    assert not stream.send([pb.DraftRequest()]), "sent is not answered"
    stream.deliver(pb.DraftResponse())
    assert not stream.send([pb.DraftRequest()] * 2), "all or none"
    assert stream.send([pb.DraftRequest()])
    assert len(stream.take_outgoing()) == 1


def test_a_step_larger_than_the_bound_goes_out_when_nothing_else_is_on_the_way(stream: DrafterStream) -> None:
    large = [pb.DraftRequest()] * (limits.MESSAGES_IN_FLIGHT_MAX + 3)
    assert stream.send(large)
    assert not stream.send([pb.DraftRequest()])
    for _ in large:
        stream.deliver(pb.DraftResponse())
    assert stream.send([pb.DraftRequest()])
    assert not stream.send(large)


def test_a_reply_to_nothing_is_a_fault(stream: DrafterStream) -> None:
    with pytest.raises(PeerFault):
        stream.deliver(pb.DraftResponse())
    stream.send([pb.DraftRequest()])
    stream.deliver(pb.DraftResponse())
    with pytest.raises(PeerFault):
        stream.deliver(pb.DraftResponse())


def test_receiving_waits_until_the_deadline_and_no_longer(stream: DrafterStream) -> None:
    began = time.monotonic()
    assert stream.receive(began + 0.05) is None
    assert 0.05 <= time.monotonic() - began < 0.5
    assert stream.receive(began) is None


def test_a_reply_ends_the_wait(stream: DrafterStream) -> None:
    stream.send([pb.DraftRequest()])
    threading.Timer(0.05, lambda: stream.deliver(pb.DraftResponse(step_id=4))).start()
    reply = stream.receive(time.monotonic() + 10)
    assert reply is not None and reply.step_id == 4


def test_a_shut_stream_ends_the_wait_and_refuses_more(stream: DrafterStream) -> None:
    threading.Timer(0.05, stream.shut).start()
    with pytest.raises(PeerLost):
        stream.receive(time.monotonic() + 10)
    with pytest.raises(PeerLost):
        stream.send([pb.DraftRequest()])


def test_replies_that_came_before_the_end_are_given_out(stream: DrafterStream) -> None:
    stream.send([pb.DraftRequest()])
    stream.deliver(pb.DraftResponse(step_id=4))
    stream.shut()
    reply = stream.receive(0.0)
    assert reply is not None and reply.step_id == 4
    with pytest.raises(PeerLost):
        stream.receive(0.0)


def _response(**changes: object) -> pb.HandshakeResponse:
    response = pb.HandshakeResponse(
        protocol_version=PROTOCOL_VERSION, drafter_instance_id="d", target=encode_target_contract(TARGET),
        draft=encode_draft_contract(DRAFT), transport=pb.TRANSPORT_INLINE, num_sessions_max=8,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(response, name, value)
    return response


def test_an_answer_that_fits_is_agreed_to() -> None:
    assert agree(TARGET, _response()) == Agreement("d", DRAFT, 8)
    assert hello(TARGET, "t").target == _response().target


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol_version", PROTOCOL_VERSION + 1),
        ("transport", pb.TRANSPORT_DEVICE),
        ("transport", pb.TRANSPORT_UNSPECIFIED),
        ("drafter_instance_id", ""),
        ("drafter_instance_id", "x" * 65),
    ],
)
def test_a_fact_that_differs_is_named(field: str, value: object) -> None:
    with pytest.raises(ContractsDiffer) as caught:
        agree(TARGET, _response(**{field: value}))
    assert [m.field for m in caught.value.differences] == [field]


def test_a_captured_row_that_no_message_could_carry_is_refused() -> None:
    wide = replace(TARGET, hidden_size=limits.HIDDEN_SIZE_MAX, num_layers=64)
    draft = replace(DRAFT, captured_layer_ids=tuple(range(16)))
    response = _response()
    response.target.CopyFrom(encode_target_contract(wide))
    response.draft.CopyFrom(encode_draft_contract(draft))
    with pytest.raises(ContractsDiffer, match="captured_layer_ids"):
        agree(wide, response)


def test_a_refusal_that_names_no_field_is_still_a_mismatch() -> None:
    assert [m.field for m in refusal("go away")] == ["contract"]
    assert len(refusal("a: ours 1, theirs 2; " * 1000)) <= 32
