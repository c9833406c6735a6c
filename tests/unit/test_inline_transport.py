"""Steps become messages of bounded size, and replies become checked reports."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch

from common import limits
from common.contract import DraftContract, TargetContract
from common.errors import InvalidTensor
from common.handoff.inline import InlineTransport, pack
from common.handoff.transport import (
    Block,
    Close,
    Extend,
    Open,
    Outcome,
    PeerFault,
    PeerLost,
    SessionReport,
    Step,
)
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.wire import decode_tensor, encode_tensor

TARGET = TargetContract(3, 4, 50, "float32", "w")
DRAFT = DraftContract((0, 2), 4, 3, 49, 128, "d")
WIDTH = 6


class RecordingPipe:
    """Keeps what is sent; gives out the replies that a test puts in."""

    def __init__(self) -> None:
        self.sent: list[pb.DraftRequest] = []
        self.replies: deque[pb.DraftResponse] = deque()
        self.has_room = True
        self.is_lost = False

    def send(self, requests: list[pb.DraftRequest]) -> bool:
        if self.has_room:
            self.sent += requests
        return self.has_room

    def receive(self, deadline: float) -> pb.DraftResponse | None:
        if not self.replies and self.is_lost:
            raise PeerLost
        return self.replies.popleft() if self.replies else None


@pytest.fixture
def pipe() -> RecordingPipe:
    return RecordingPipe()


@pytest.fixture
def transport(pipe: RecordingPipe) -> InlineTransport:
    return InlineTransport(pipe, TARGET, DRAFT, target_instance_id="t", drafter_instance_id="d")


def _step(*session_ids: int) -> Step:
    """Ask for a block of each at position 0."""
    return Step(blocks=[Block(session_id, 2, 0, 7) for session_id in session_ids])


def _reply(step_id: int, *session_ids: int, rows: list[list[int]] | None = None) -> pb.DraftResponse:
    rows = [[1, 2, 3]] * len(session_ids) if rows is None else rows
    reply = pb.DraftResponse(step_id=step_id, drafter_instance_id="d")
    for i, session_id in enumerate(session_ids):
        reply.outcomes.add(session_id=session_id, epoch=2, outcome=pb.OUTCOME_OK, context_len=0, draft_row=i)
    reply.drafts.CopyFrom(encode_tensor(torch.tensor(rows, dtype=torch.int32)))
    return reply


def test_outcomes_are_those_of_the_contract() -> None:
    ours = {outcome.name: int(outcome) for outcome in Outcome}
    theirs = {name.removeprefix("OUTCOME_"): number for name, number in pb.Outcome.items()}
    theirs.pop("UNSPECIFIED")
    assert ours == theirs


@pytest.mark.parametrize("seed", range(20))
def test_messages_carry_all_rows_in_order_within_their_bound(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    captured = torch.randn(60, WIDTH, generator=torch.Generator().manual_seed(seed))
    extends, row = [], 0
    for session_id in range(1, rng.randint(2, 8)):
        row += rng.randint(0, 2)  # rows that were rejected lie between
        count = rng.randint(1, 7)
        extends.append(Extend(session_id, session_id, 100 * session_id, row, row + count))
        row += count
    rows_max = rng.randint(1, 9)
    step = Step([Close(90, 1)], [Open(1, 1, 100)], extends, [Block(1, 1, 0, 5)])
    messages = pack(step, captured, rows_max)

    got: dict[int, dict[int, torch.Tensor]] = {extend.session_id: {} for extend in extends}
    for message in messages:
        num_rows = sum(e.num_rows for e in message.extends)
        assert 1 <= num_rows <= rows_max
        rows = iter(decode_tensor(message.captured, "captured", torch.float32, (num_rows, WIDTH)))
        assert len({e.session_id for e in message.extends}) == len(message.extends)
        for e in message.extends:
            assert e.epoch == e.session_id
            got[e.session_id].update({e.position + i: next(rows) for i in range(e.num_rows)})
    for extend in extends:
        want = captured[extend.row_start : extend.row_stop]
        places = [extend.position + i for i in range(len(want))]
        assert sorted(got[extend.session_id]) == places
        assert torch.equal(torch.stack([got[extend.session_id][p] for p in places]), want)
    assert [len(m.closes) + len(m.opens) for m in messages] == [2] + [0] * (len(messages) - 1)
    assert [len(m.drafts) for m in messages] == [0] * (len(messages) - 1) + [1]


def test_a_row_fills_a_message_up_to_the_byte(pipe: RecordingPipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TENSOR_BYTES_MAX", 3 * WIDTH * 4 + 1)
    transport = InlineTransport(pipe, TARGET, DRAFT, target_instance_id="t", drafter_instance_id="d")
    transport.post(Step(extends=[Extend(1, 0, 0, 0, 7)]), torch.randn(7, WIDTH))
    assert [e.num_rows for m in pipe.sent for e in m.extends] == [3, 3, 1]
    assert [(m.step_id, m.target_instance_id) for m in pipe.sent] == [(1, "t"), (2, "t"), (3, "t")]


def test_the_tensor_may_change_after_the_call(pipe: RecordingPipe, transport: InlineTransport) -> None:
    captured = torch.ones(2, WIDTH)
    transport.post(Step(extends=[Extend(1, 0, 0, 0, 2)]), captured)
    captured.zero_()
    sent = decode_tensor(pipe.sent[0].captured, "captured", torch.float32, (2, WIDTH))
    assert torch.equal(sent, torch.ones(2, WIDTH))


def test_nothing_counts_as_posted_when_the_pipe_is_full(
    pipe: RecordingPipe, transport: InlineTransport
) -> None:
    pipe.has_room = False
    assert not transport.post(_step(1), None)
    pipe.has_room = True
    assert transport.post(_step(1), None)
    assert [m.step_id for m in pipe.sent] == [1]
    pipe.replies.append(_reply(1, 1))
    assert transport.collect(0.0).latest == [SessionReport(1, 2, Outcome.OK, 0, [1, 2, 3])]


def test_late_replies_are_told_apart_from_the_latest(
    pipe: RecordingPipe, transport: InlineTransport
) -> None:
    transport.post(_step(1), None)
    assert transport.collect(0.0).latest is None
    transport.post(_step(1, 2), None)
    pipe.replies += [_reply(1, 1), _reply(2, 1, 2, rows=[[4, 5, 6], [7, 8, 9]])]
    collected = transport.collect(0.0)
    assert [r.draft for r in collected.earlier] == [[1, 2, 3]]
    assert collected.latest is not None
    assert [r.draft for r in collected.latest] == [[4, 5, 6], [7, 8, 9]]
    assert transport.collect(0.0).latest is None, "it is collected once"


def test_replies_that_came_before_the_loss_are_still_good(
    pipe: RecordingPipe, transport: InlineTransport
) -> None:
    transport.post(_step(1), None)
    pipe.replies.append(_reply(1, 1))
    pipe.is_lost = True
    assert transport.collect(0.0).latest is not None
    transport.post(_step(1), None)
    with pytest.raises(PeerLost):
        transport.collect(0.0)


@pytest.mark.parametrize("rows", [[[1, 2, 50], [1, 2, 3]], [[-1, 2, 3], [1, 2, 3]]])
def test_ids_outside_the_vocabulary_spoil_their_row_alone(
    pipe: RecordingPipe, transport: InlineTransport, rows: list[list[int]]
) -> None:
    transport.post(_step(1, 2), None)
    pipe.replies.append(_reply(1, 1, 2, rows=rows))
    latest = transport.collect(0.0).latest
    assert latest == [
        SessionReport(1, 2, Outcome.OK, 0, None, draft_is_faulty=True),
        SessionReport(2, 2, Outcome.OK, 0, [1, 2, 3]),
    ]


def test_a_tensor_that_declares_more_than_it_holds_is_never_allocated(
    pipe: RecordingPipe, transport: InlineTransport
) -> None:
    transport.post(_step(1), None)
    reply = _reply(1, 1)
    reply.drafts.shape[:] = [2**40, 2**40]
    pipe.replies.append(reply)
    latest = transport.collect(0.0).latest
    assert latest is not None and latest[0].draft_is_faulty
    with pytest.raises(InvalidTensor):
        decode_tensor(reply.drafts, "drafts", torch.int32, (None, None))


def test_sessions_that_were_not_named_are_ignored(pipe: RecordingPipe, transport: InlineTransport) -> None:
    transport.post(_step(1), None)
    reply = _reply(1, 1)
    reply.outcomes.add(session_id=66, epoch=0, outcome=pb.OUTCOME_OK)
    reply.outcomes.add(session_id=1, epoch=1, outcome=pb.OUTCOME_NEEDS_RESYNC)
    reply.outcomes.add(session_id=1, epoch=2, outcome=pb.OUTCOME_NEEDS_RESYNC)
    pipe.replies.append(reply)
    latest = transport.collect(0.0).latest
    assert latest == [SessionReport(1, 2, Outcome.OK, 0, [1, 2, 3])], "and each is believed once"


def test_a_draft_beside_a_failure_is_ignored(pipe: RecordingPipe, transport: InlineTransport) -> None:
    transport.post(_step(1), None)
    reply = _reply(1, 1)
    reply.outcomes[0].outcome = pb.OUTCOME_BUSY
    pipe.replies.append(reply)
    assert transport.collect(0.0).latest == [SessionReport(1, 2, Outcome.BUSY, 0)]


@pytest.mark.parametrize("field", ["step_id", "drafter_instance_id", "outcomes"])
def test_a_reply_that_cannot_be_ours_is_a_fault_of_the_peer(
    pipe: RecordingPipe, transport: InlineTransport, field: str
) -> None:
    transport.post(_step(1), None)
    reply = _reply(1, 1)
    reply.ClearField(field)  # type: ignore[arg-type]
    pipe.replies.append(reply)
    with pytest.raises(PeerFault, match=field):
        transport.collect(0.0)


def test_rows_of_another_width_are_our_own_bug(transport: InlineTransport) -> None:
    with pytest.raises(AssertionError):
        transport.post(Step(extends=[Extend(1, 0, 0, 0, 1)]), torch.randn(1, WIDTH + 1))
