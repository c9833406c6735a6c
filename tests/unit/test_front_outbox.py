"""What waits for a front: order, merging, bounds, one ending each."""

from __future__ import annotations

import random
from array import array

import pytest

from common import limits
from common.errors import Overloaded, Unavailable
from common.pb.tandem.v1 import core_pb2
from services.target.core.front_outbox import FrontOutbox, FrontStream
from services.target.core.request import FinishReason, Request, RequestFailed, SamplingParams, TokensCommitted
from services.target.joint.messages import U32, decode_error


def stream(handle: int) -> FrontStream:
    request = Request(f"r{handle}", [1], SamplingParams(), 9, frozenset(), True, emit=lambda event: None)
    return FrontStream(handle, request)


def tokens(*ids: int) -> TokensCommitted:
    return TokensCommitted(list(ids), [i % 2 == 0 for i in ids])


def read(frame: core_pb2.FromCore, into: dict[int, list[int]]) -> list[int]:
    """Add the frame's tokens to their streams; the handles in its order."""
    deltas = frame.deltas
    handles, counts = array(U32, deltas.handles).tolist(), array(U32, deltas.counts).tolist()
    ids = array(U32, deltas.token_ids).tolist()
    assert list(deltas.from_draft) == [int(i % 2 == 0) for i in ids]
    assert sum(counts) == len(ids)
    for handle, count in zip(handles, counts, strict=True):
        into.setdefault(handle, []).extend(ids[:count])
        ids = ids[count:]
    return handles


def test_a_steps_events_are_one_frame_and_a_stream_that_waits_is_in_it_once() -> None:
    outbox, a, b = FrontOutbox(), stream(1), stream(2)
    assert not outbox.has_waiting
    outbox.emit(a, tokens(4, 5))
    outbox.emit(b, tokens(6))
    assert outbox.collect() == ([], [])
    outbox.emit(a, tokens(7))
    outbox.emit(b, b.request.finish(FinishReason.STOP, 3))
    assert outbox.collect() == ([b], [])
    frame = outbox.take()
    got: dict[int, list[int]] = {}
    assert read(frame, got) == [1, 2]
    assert got == {1: [4, 5, 7], 2: [6]}
    assert [(e.handle, e.finished.matched_token_id) for e in frame.endings] == [(2, 3)]
    assert not outbox.has_waiting
    assert outbox.take().ByteSize() == 0


def test_nothing_follows_an_ending() -> None:
    outbox, a = FrontOutbox(), stream(1)
    outbox.emit(a, RequestFailed(Unavailable("service failed")))
    outbox.emit(a, tokens(1))
    outbox.emit(a, a.request.finish(FinishReason.ABORT))
    assert outbox.collect() == ([a], [])
    frame = outbox.take()
    assert [e.WhichOneof("outcome") for e in frame.endings] == ["failed"]
    assert not frame.HasField("deltas")
    outbox.emit(a, tokens(1))
    outbox.collect()
    assert not outbox.has_waiting


def test_too_many_unread_tokens_end_their_own_stream_and_no_other() -> None:
    outbox, slow, quick = FrontOutbox(backlog_tokens_max=10), stream(1), stream(2)
    for _ in range(2):
        outbox.emit(slow, tokens(1, 2, 3, 4, 5))
        outbox.emit(quick, tokens(9))
        assert outbox.collect() == ([], []), "10 may wait"
    outbox.emit(slow, tokens(6))
    outbox.emit(quick, tokens(9))
    assert outbox.collect() == ([slow], [slow])
    # The core aborts it, and says so.
    outbox.emit(slow, tokens(7))
    outbox.emit(slow, slow.request.finish(FinishReason.ABORT))
    assert outbox.collect() == ([], [])
    frame = outbox.take()
    got: dict[int, list[int]] = {}
    read(frame, got)
    assert got == {2: [9, 9, 9]}
    (ending,) = frame.endings
    error = decode_error(ending.failed)
    assert isinstance(error, Overloaded)
    assert (ending.handle, str(error)) == (1, "tokens not yet read: limit is 10, have 11")


def test_what_is_taken_makes_room_again() -> None:
    outbox, a = FrontOutbox(backlog_tokens_max=10), stream(1)
    for _ in range(5):
        outbox.emit(a, tokens(*range(10)))
        assert outbox.collect() == ([], [])
        outbox.take()


def test_very_much_comes_in_several_frames_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOINT_FRAME_TOKENS_MAX", 100)
    outbox, streams = FrontOutbox(), [stream(i) for i in range(1, 31)]
    sent: dict[int, list[int]] = {s.handle: [] for s in streams}
    for step in range(40):
        for s in streams:
            outbox.emit(s, tokens(step))
            sent[s.handle].append(step)
        outbox.collect()
    for s in streams:
        outbox.emit(s, s.request.finish(FinishReason.LENGTH))
    outbox.collect()
    outbox.say_leave()
    got: dict[int, list[int]] = {}
    num_frames = 0
    ended: set[int] = set()
    while outbox.has_waiting:
        frame = outbox.take()
        handles = read(frame, got)
        assert not ended & set(handles)
        ended |= {ending.handle for ending in frame.endings}
        assert sum(len(got[h]) for h in handles) < 100 + 40
        assert frame.leave == (len(ended) == 30), "last of all"
        num_frames += 1
    assert got == sent
    assert len(ended) == 30
    assert num_frames == 10, "3 streams of 40 tokens in each"


def test_a_frame_at_its_limits_fits_the_joint() -> None:
    outbox = FrontOutbox()
    streams = [stream(2**32 - 1 - i) for i in range(limits.RPCS_MAX)]
    for s in streams:
        outbox.emit(s, TokensCommitted([2**32 - 1] * limits.STREAM_BACKLOG_TOKENS_MAX,
                                       [True] * limits.STREAM_BACKLOG_TOKENS_MAX))  # fmt: skip
        outbox.emit(s, RequestFailed(Overloaded("x" * 300, limit=2**60, given=2**60)))
    outbox.collect()
    sizes = []
    while outbox.has_waiting:
        sizes.append(outbox.take().ByteSize())
    assert max(sizes) < limits.JOINT_FRAME_BYTES_MAX / 4


def test_orders_and_answers_wait_with_the_events_and_the_latest_word_on_health_counts() -> None:
    outbox, refused = FrontOutbox(), stream(5)
    outbox.say_serving(True)
    outbox.say_serving(False)
    outbox.answer(8, found=True)
    outbox.refuse(refused, Unavailable("service is draining"))
    assert outbox.has_waiting
    frame = outbox.take()
    assert frame.HasField("serving") and not frame.serving
    assert [(a.question, a.found) for a in frame.abort_answers] == [(8, True)]
    (ending,) = frame.endings
    assert (ending.handle, ending.refused.unavailable) == (5, "service is draining")
    assert not outbox.has_waiting


def test_a_closed_outbox_keeps_nothing() -> None:
    outbox, a = FrontOutbox(), stream(1)
    outbox.emit(a, tokens(1))
    outbox.collect()
    outbox.close()
    outbox.emit(a, tokens(1))
    assert outbox.collect() == ([], [])
    assert not outbox.has_waiting


def test_any_order_of_emitting_and_taking_gives_each_stream_its_tokens_once() -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    outbox, streams = FrontOutbox(), [stream(i) for i in range(1, 9)]
    sent: dict[int, list[int]] = {}
    got: dict[int, list[int]] = {}
    for number in range(3000):
        s = rng.choice(streams)
        outbox.emit(s, tokens(number))
        sent.setdefault(s.handle, []).append(number)
        if rng.random() < 0.3:
            outbox.collect()
        if rng.random() < 0.1:
            read(outbox.take(), got)
    outbox.collect()
    read(outbox.take(), got)
    assert got == sent
