"""DeviceDrafter: what it enqueues, what it says, and what it does about late, dead and hostile drafters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from common import limits
from common.contract import DraftContract, Mismatch, TargetContract
from common.handoff.ring import Ring, RingShape
from common.handoff.transport import Outcome
from common.pb.tandem.v1 import drafter_pb2 as pb
from services.target.core.device_drafter import DeviceDrafter
from services.target.core.draft_source import PlainReason
from services.target.core.drafter_handshake import Agreement
from services.target.core.drafter_status import DrafterStatus, LinkState
from services.target.core.drafter_stream import DrafterStream
from services.target.core.pipelined_source import PostedExtend, PostedRow, PostedStep
from services.target.core.ring_owner import OfferedRing
from tests.fakes_handoff import FakeRingFlags

TARGET = TargetContract(
    hidden_size=16, num_layers=6, vocab_rows=100, dtype="float32", weights_fingerprint="w"
)
DRAFT = DraftContract(
    captured_layer_ids=(1, 3), block_size=4, num_draft_tokens=3, mask_token_id=99, context_len_max=4096,
    weights_fingerprint="d",
)  # fmt: skip
SHAPE = RingShape(8, 4, 3, 32, torch.float32, 16)
DEADLINE_S = 0.2
DRAFTER = "drafter-1"


class World:
    """A target whose device is a list of what was enqueued, and a drafter whose messages the test reads."""

    def __init__(self) -> None:
        self.transports: list[str | None] = []
        self.fields: list[list[str]] = []
        self.resyncs: list[str] = []
        self.num_releases = 0
        self.status = DrafterStatus(self, time.monotonic)
        self.drafter = DeviceDrafter(self, TARGET, "target-1", DEADLINE_S, self, self, time.monotonic)
        self.number = 0

    # DeviceObserver
    def observe_drafter(self, up: bool, breaker: str) -> None: ...

    def observe_mismatches(self, fields: list[str]) -> None:
        self.fields.append(fields)

    def observe_transport(self, transport: str | None) -> None:
        self.transports.append(transport)

    def observe_resync(self, kind: str) -> None:
        self.resyncs.append(kind)

    def observe_watchdog_release(self) -> None:
        self.num_releases += 1

    def observe_fallback(self, reason: str) -> None: ...

    # Link
    def close(self) -> None:
        self.status.closed()

    # Rings
    def ring_for(self, draft: DraftContract) -> Ring:
        return Ring.local(SHAPE, "cpu")

    def connect(self, *, inline: bool = False, num_sessions_max: int = 8) -> DrafterStream:
        """A connection as the link makes one."""
        self.flags = FakeRingFlags()
        ring = None if inline else OfferedRing(Ring.local(SHAPE, "cpu"), self.flags)
        self.stream = DrafterStream(Agreement(DRAFTER, DRAFT, num_sessions_max, ring), lambda: None)
        self.status.connected(self.stream)
        self.drafter.settle()
        return self.stream

    def step(
        self, *rows: PostedRow | None, extends: tuple[PostedExtend, ...] = (), ended: tuple[int, ...] = ()
    ) -> list[int]:
        """A step as the loop makes one; the rows of the drafts that it launched with."""
        self.drafter.settle()
        draft_rows = self.drafter.draft_rows([row.session_id for row in rows if row is not None])
        if self.drafter.draft is not None:
            self.drafter.await_drafts()
            self.drafter.mark_ready()
        self.number += 1
        self.drafter.post(PostedStep(self.number, list(extends), list(rows), list(ended)))
        return draft_rows

    def requests(self) -> list[pb.DraftRequest]:
        return self.stream.take_outgoing()

    def answer(self, outcomes: dict[int, Outcome] | None = None, **changes: object) -> None:
        """The drafter answers all that it was sent; OK unless told otherwise."""
        for request in self.requests():
            reply = pb.DraftResponse(step_id=request.step_id, drafter_instance_id=DRAFTER)
            named = {(m.session_id, m.epoch) for m in (*request.opens, *request.device.extends)}
            named |= {(m.session_id, m.epoch) for m in request.device.rows if m.session_id}
            for session_id, epoch in sorted(named):
                outcome = (outcomes or {}).get(session_id, Outcome.OK)
                reply.outcomes.add(session_id=session_id, epoch=epoch, outcome=pb.Outcome.ValueType(outcome))
            for name, value in changes.items():
                setattr(reply, name, value)
            self.stream.deliver(reply)

    def until(self, done: Callable[[], bool], within_s: float = 5.0) -> None:
        end = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < end
            time.sleep(0.005)
            self.drafter.settle()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.drafter.close()


def row(session_id: int, low: int = 10, high: int = 13) -> PostedRow:
    return PostedRow(session_id, low, high)


def test_without_a_connection_nothing_is_drafted_and_nothing_waits(world: World) -> None:
    assert (world.drafter.draft, world.drafter.ring, world.drafter.inline) == (None, None, None)
    assert world.step(row(1)) == [-1]
    assert world.drafter.why_plain(1) is PlainReason.UNAVAILABLE


def test_a_step_is_posted_behind_its_flag_and_the_next_waits_for_it(world: World) -> None:
    world.connect()
    assert world.drafter.draft == DRAFT
    assert world.step(row(1), None, row(2)) == [-1, -1]
    assert world.flags.enqueued == [("ready", 1)]
    (request,) = world.requests()
    assert request.target_instance_id == "target-1" and request.step_id == 1
    assert request.device.sequence == 1
    assert [(r.session_id, r.begins) for r in request.device.rows] == [(1, True), (0, False), (2, True)]
    assert world.step(row(2), row(1)) == [2, 0]
    assert world.flags.enqueued == [("ready", 1), ("await", 1), ("ready", 2)]


def test_waiting_again_for_the_same_drafts_enqueues_nothing(world: World) -> None:
    world.connect()
    world.step(row(1))
    world.drafter.await_drafts()
    world.drafter.await_drafts()
    assert world.flags.enqueued == [("ready", 1), ("await", 1)]


def test_a_prompt_that_nobody_drafts_for_yet_is_waited_for_too(world: World) -> None:
    """The next launch writes the rows over that the drafter reads."""
    world.connect()
    world.step(extends=(PostedExtend(1, 0, 0, 16),))
    world.step(row(1, 20, 20), extends=(PostedExtend(1, 16, 0, 4),))
    assert world.flags.enqueued == [("ready", 1), ("await", 1), ("ready", 2)]


def test_a_launch_that_writes_over_what_is_being_read_is_a_bug_of_ours(world: World) -> None:
    world.connect()
    world.step(row(1))
    world.drafter.mark_ready()
    with pytest.raises(AssertionError, match="waits for its reader"):
        world.drafter.post(PostedStep(2, [], [row(1)], []))


def test_what_ends_between_two_launches_takes_no_draft_away(world: World) -> None:
    world.connect()
    world.step(row(1), row(2))
    world.drafter.settle()
    world.drafter.post(PostedStep(world.number, [], [], [2]))
    first, second = world.requests()
    assert first.HasField("device") and not second.HasField("device")
    assert [close.session_id for close in second.closes] == [2]
    assert world.drafter.draft_rows([1, 2]) == [0, -1]


def test_a_step_for_nobody_is_neither_sent_nor_waited_for(world: World) -> None:
    world.connect(num_sessions_max=0)
    world.step(row(1))
    world.step(row(1))
    assert world.requests() == [] and world.flags.enqueued == [("ready", 1), ("ready", 2)]
    assert world.drafter.why_plain(1) is PlainReason.NO_CAPACITY


def test_a_session_that_was_lost_has_no_draft_and_begins_again(world: World) -> None:
    world.connect()
    world.step(row(1), row(2))
    world.answer({1: Outcome.NEEDS_RESYNC})
    assert world.step(row(1, 11, 17), row(2, 11, 17)) == [-1, 1]
    assert world.drafter.why_plain(1) is PlainReason.RESYNC
    (request,) = world.requests()
    assert [(r.session_id, r.epoch, r.begins) for r in request.device.rows] == [(1, 1, True), (2, 0, False)]
    # I6: the draft in row 0 is of the epoch that begins now.
    assert world.step(row(1, 12, 20), row(2, 12, 20)) == [0, 1]


def test_a_context_that_was_lost_is_offered_for_capturing_anew_a_few_times_whatever_connections_come(
    world: World,
) -> None:
    world.connect()
    world.step(extends=(PostedExtend(1, 0, 0, 10),))
    assert world.drafter.lost_sessions() == set()
    num_offers = 0
    for _ in range(2 * limits.RECAPTURES_MAX):
        world.status.ended("UNAVAILABLE")
        world.drafter.settle()
        assert world.drafter.lost_sessions() == set()
        world.status.probe_in_s()
        world.connect()
        num_offers += world.drafter.lost_sessions() == {1}
        assert world.drafter.lost_sessions() == set()
        world.step(extends=(PostedExtend(1, 0, 0, 10),))
    assert num_offers == limits.RECAPTURES_MAX
    assert world.resyncs == ["recaptured"] * 2 * limits.RECAPTURES_MAX


def test_a_context_that_begins_late_is_offered_too(world: World) -> None:
    world.connect()
    world.step(row(1))
    assert world.drafter.lost_sessions() == {1}
    world.step(extends=(PostedExtend(1, 0, 0, 10),))
    _, second = world.requests()
    assert [(o.session_id, o.epoch, o.start_position) for o in second.opens] == [(1, 1, 0)]
    assert world.resyncs == ["cold", "recaptured"]


def test_sessions_that_end_without_a_connection_are_forgotten(world: World) -> None:
    world.connect()
    world.step(row(1))
    world.status.ended("UNAVAILABLE")
    world.step(ended=(1,))
    world.status.probe_in_s()
    world.connect()
    assert world.drafter.lost_sessions() == set()


def test_a_late_drafter_is_let_go_of_and_given_up_once(world: World) -> None:
    world.connect()
    flags = world.flags
    world.step(row(1))
    flags.has_come_to = 1
    began = time.monotonic()
    world.drafter.await_drafts()
    world.until(lambda: world.drafter.draft is None)
    # A step never waits longer; how much longer the test's own loop looks is the machine's matter.
    assert 0.8 * DEADLINE_S <= time.monotonic() - began < 3 * DEADLINE_S
    assert flags.released == [1]
    world.until(lambda: world.num_releases == 1)
    assert world.drafter.state is LinkState.DOWN and world.stream.is_shut
    assert world.step(row(1)) == [-1]
    assert world.drafter.why_plain(1) is PlainReason.BREAKER_OPEN
    assert world.transports[-2:] == ["device", None]


def test_the_drafter_has_its_whole_deadline_however_long_the_target_takes(world: World) -> None:
    world.connect()
    world.step(row(1))
    world.drafter.await_drafts()
    time.sleep(3 * DEADLINE_S)
    assert world.flags.released == []


def test_steps_that_are_read_in_time_are_never_let_go(world: World) -> None:
    world.connect()
    began = time.monotonic()
    while time.monotonic() - began < 4 * DEADLINE_S:
        world.step(row(1))
        world.flags.has_come_to = world.number
        world.drafter.observe_completed(world.number - 1)
        world.answer()
        time.sleep(0.01)
    assert world.flags.released == [] and world.num_releases == 0


def test_a_launch_that_was_read_has_nothing_left_to_wait_for(world: World) -> None:
    world.connect()
    world.step(row(1))
    world.step(row(1))
    world.flags.has_come_to = 2
    world.drafter.observe_completed(2)
    time.sleep(2 * DEADLINE_S)
    assert world.flags.released == []


def test_a_reply_alone_does_not_end_the_watch(world: World) -> None:
    """A drafter that answers and never writes its flag would stop the device for ever."""
    world.connect()
    world.step(row(1))
    world.drafter.await_drafts()
    world.answer()
    world.drafter.settle()
    world.flags.has_come_to = 1
    world.until(lambda: world.flags.released == [1])


def test_a_dead_drafter_is_let_go_of_at_once(world: World) -> None:
    world.connect()
    flags = world.flags
    world.step(row(1))
    world.drafter.await_drafts()
    world.status.ended("UNAVAILABLE")
    assert flags.released == [1]
    # What the loop still enqueues before it has noticed does not wait either.
    assert world.drafter.draft_rows([1]) == [-1]
    world.drafter.settle()
    assert world.drafter.draft is None
    assert world.num_releases == 0


def test_after_the_loss_nothing_waits_any_more(world: World) -> None:
    world.connect()
    world.step(row(1))
    world.status.ended("UNAVAILABLE")
    world.drafter.await_drafts()
    assert world.flags.enqueued == [("ready", 1)]


def test_a_drafter_that_stops_while_the_next_step_is_enqueued_is_let_go_of(world: World) -> None:
    """The host is a step ahead: the next wait is enqueued before the device is past the last one."""
    world.connect()
    world.step(row(1))
    world.step(row(1))
    world.drafter.await_drafts()
    assert world.flags.enqueued == [("ready", 1), ("await", 1), ("ready", 2), ("await", 2)]
    world.flags.has_come_to = 1
    world.until(lambda: world.flags.released != [])
    assert world.flags.released[0] == 2


def test_a_release_that_a_late_drafter_writes_over_is_made_again(world: World) -> None:
    world.connect()
    flags = world.flags
    flags.is_stuck = True
    world.step(row(1))
    world.drafter.await_drafts()
    world.status.ended("UNAVAILABLE")
    world.until(lambda: len(flags.released) > 5)
    flags.is_stuck = False
    time.sleep(0.1)
    num_released = len(flags.released)
    time.sleep(0.1)
    assert len(flags.released) == num_released


def test_a_new_connection_has_new_flags_and_knows_no_session(world: World) -> None:
    world.connect()
    world.step(row(1))
    world.status.ended("UNAVAILABLE")
    world.drafter.settle()
    world.status.probe_in_s()
    world.connect()
    assert world.step(row(1, 20, 25)) == [-1]
    assert world.flags.enqueued == [("ready", 1)]
    (request,) = world.requests()
    assert request.step_id == 1 and request.device.rows[0].begins


@pytest.mark.parametrize("changes", [{"step_id": 7}, {"drafter_instance_id": "another"}])
def test_a_reply_that_cannot_be_one_ends_the_connection(world: World, changes: dict[str, object]) -> None:
    world.connect()
    flags = world.flags
    world.step(row(1))
    world.drafter.await_drafts()
    world.answer(**changes)
    world.drafter.settle()
    world.drafter.settle()
    assert world.drafter.draft is None and flags.released == [1]


def test_a_reply_that_leaves_a_session_out_ends_the_connection(world: World) -> None:
    world.connect()
    world.step(row(1))
    (request,) = world.requests()
    world.stream.deliver(pb.DraftResponse(step_id=request.step_id, drafter_instance_id=DRAFTER))
    world.drafter.settle()
    world.drafter.settle()
    assert world.drafter.draft is None


def test_a_drafter_that_reads_no_messages_is_given_up(world: World) -> None:
    world.connect()
    for _ in range(limits.MESSAGES_IN_FLIGHT_MAX + 1):
        world.step(row(1))
    world.drafter.settle()
    assert world.drafter.draft is None


def test_steps_by_messages_are_another_sources(world: World) -> None:
    world.connect(inline=True)
    assert world.drafter.inline is not None
    assert world.drafter.draft is None
    world.drafter.inline.collect()
    assert world.drafter.draft == DRAFT and world.drafter.ring is not None
    assert world.drafter.inline.captured_layer_ids == DRAFT.captured_layer_ids
    world.status.ended("UNAVAILABLE")
    world.drafter.settle()
    assert world.drafter.inline is None and world.drafter.draft is None
    # What the source believed of its old connection is no contract of the new one.
    world.status.probe_in_s()
    world.connect()
    assert world.drafter.inline is None and world.drafter.draft == DRAFT


def test_the_source_by_messages_does_not_take_a_connection_on_the_device(world: World) -> None:
    world.connect()
    source = world.drafter._by_messages
    source.collect()
    assert source.captured_layer_ids == ()


def test_a_session_that_is_given_invalid_drafts_again_and_again_is_not_drafted_for_any_more(
    world: World,
) -> None:
    world.connect()
    world.step(row(1), row(2))
    for _ in range(limits.SESSION_FAULTS_MAX):
        assert world.step(row(1), row(2)) == [0, 1]
        world.requests()
        world.drafter.observe_completed(world.number, [1])
    assert world.step(row(1), row(2)) == [-1, 1]
    assert world.drafter.why_plain(1) is PlainReason.INVALID_DRAFT
    (request,) = world.requests()
    assert [(close.session_id, close.epoch) for close in request.closes] == [(1, 0)]
    assert [r.session_id for r in request.device.rows] == [0, 2]
    # Read late, and again.
    world.drafter.observe_completed(world.number, [1])
    assert world.step(row(1), row(2)) == [-1, 1]


def test_what_an_earlier_drafter_left_in_the_ring_is_not_the_next_ones_fault(world: World) -> None:
    world.connect()
    world.step(row(1))
    world.step(row(1))
    last = world.number
    world.status.ended("UNAVAILABLE")
    world.status.probe_in_s()
    world.connect()
    world.step(row(1))
    for _ in range(limits.SESSION_FAULTS_MAX):
        world.drafter.observe_completed(last, [1])
    assert world.step(row(1)) == [0]


@pytest.mark.parametrize("inline", [False, True])
def test_a_contract_that_the_device_has_no_memory_for_is_a_mismatch_that_is_looked_at_rarely(
    world: World, inline: bool
) -> None:
    mismatch = Mismatch("block_size", "what fits", 4)
    for pause_s in (1.0, 2.0, 4.0):
        world.connect(inline=inline)
        if inline:
            world.drafter.inline.collect()
        assert world.drafter.draft == DRAFT
        world.drafter.refuse(mismatch)
        assert (world.drafter.draft, world.drafter.ring, world.drafter.inline) == (None, None, None)
        assert world.stream.is_shut and world.transports[-1] is None
        assert (world.drafter.state, world.drafter.mismatches) == (LinkState.MISMATCH, [mismatch])
        assert world.fields[-1] == ["block_size"]
        assert pause_s - 0.5 < world.status.probe_in_s() <= pause_s
        assert world.step(row(1)) == [-1]
    # Whoever fits is no mismatch any more.
    world.connect(inline=inline)
    assert world.drafter.mismatches == [] and world.fields[-1] == []


def test_facts_follow_the_connection(world: World) -> None:
    assert (world.drafter.state, world.drafter.num_sessions) == (LinkState.DOWN, 0)
    world.connect()
    world.step(row(1), row(2))
    world.drafter.settle()
    assert (world.drafter.state, world.drafter.num_sessions) == (LinkState.UP, 2)
    assert world.drafter.block_size == 4
    world.status.ended("UNAVAILABLE")
    world.drafter.settle()
    assert world.drafter.num_sessions == 0
