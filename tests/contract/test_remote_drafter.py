"""RemoteDrafter against a real gRPC service on a unix socket, scripted to do what drafters do wrong."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
import torch

from common import limits
from common.address import UnixAddress
from common.contract import DraftContract, TargetContract
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.wire import encode_tensor
from services.target.core import drafter_negotiation
from services.target.core.draft_source import ContextRows, Drafts, HandOff, PlainReason, WantedBlock
from services.target.core.drafter_status import LinkState
from services.target.core.remote_drafter import RemoteDrafter
from tests.fakes_drafter import ScriptedDrafter

TARGET = TargetContract(
    hidden_size=16, num_layers=6, vocab_rows=100, dtype="float32", weights_fingerprint="w"
)
DRAFT = DraftContract(
    captured_layer_ids=(1, 3), block_size=8, num_draft_tokens=7, mask_token_id=99, context_len_max=4096,
    weights_fingerprint="d",
)  # fmt: skip
DEADLINE_S = 0.3
ANCHOR = 5
DRAFTED = [6, 7, 8, 9, 10, 11, 12]


@dataclass
class Recorder:
    """A DrafterObserver that remembers."""

    states: list[tuple[bool, str]] = field(default_factory=list)
    fields: list[list[str]] = field(default_factory=list)
    resyncs: list[str] = field(default_factory=list)
    transports: list[str | None] = field(default_factory=list)

    def observe_transport(self, transport: str | None) -> None:
        self.transports.append(transport)

    def observe_drafter(self, up: bool, breaker: str) -> None:
        self.states.append((up, breaker))

    def observe_mismatches(self, fields: list[str]) -> None:
        self.fields.append(fields)

    def observe_resync(self, kind: str) -> None:
        self.resyncs.append(kind)


class Target:
    """The core's side: takes steps of one row for each session."""

    def __init__(self, path: Path) -> None:
        self.seen = Recorder()
        self.source = RemoteDrafter.connect(UnixAddress(str(path)), TARGET, "target-1", DEADLINE_S, self.seen)
        self.context_len: dict[int, int] = {}

    def step(self, *session_ids: int, num_rows: int = 1, ended: tuple[int, ...] = ()) -> Drafts:
        """Hand num_rows context rows over for each session, want its block, and collect."""
        appends, wanted = [], []
        captures = bool(self.source.captured_layer_ids)
        for i, session_id in enumerate(session_ids):
            position = self.context_len.get(session_id, 0)
            self.context_len[session_id] = position + num_rows
            if captures:
                appends.append(ContextRows(session_id, position, i * num_rows, (i + 1) * num_rows))
            wanted.append(WantedBlock(session_id, position + num_rows, ANCHOR))
        captured = torch.randn(len(session_ids) * num_rows, 2 * TARGET.hidden_size) if captures else None
        self.source.post(HandOff(appends, wanted, list(ended), captured))
        return self.source.collect()

    def until(self, done: Callable[[], bool], within_s: float = 5.0) -> None:
        """Idle steps until something is so."""
        give_up_at = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < give_up_at, "it never was"
            self.step()
            time.sleep(0.002)

    def until_up(self) -> None:
        self.until(lambda: bool(self.source.captured_layer_ids))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "drafter"


@pytest.fixture
def target(path: Path) -> Iterator[Target]:
    target = Target(path)
    yield target
    began = time.monotonic()
    target.source.close()
    assert time.monotonic() - began < 1.5, "closing never hangs"


@pytest.fixture
def drafter(path: Path) -> Iterator[ScriptedDrafter]:
    drafter = ScriptedDrafter(TARGET, DRAFT)
    with drafter.serving(f"unix:{path}"):
        yield drafter


def _alter_block(change: Callable[[pb.DraftResponse], None]) -> Callable[..., pb.DraftResponse]:
    """Change the replies that carry a block."""

    def alter(request: pb.DraftRequest, reply: pb.DraftResponse) -> pb.DraftResponse:
        if request.drafts:
            change(reply)
        return reply

    return alter


def _keep(request: pb.DraftRequest, reply: pb.DraftResponse) -> pb.DraftResponse:
    return reply


def test_drafts_come_back_for_each_session(drafter: ScriptedDrafter, target: Target) -> None:
    target.until_up()
    for _ in range(3):
        drafts = target.step(1, 2)
        assert drafts == Drafts({1: DRAFTED, 2: DRAFTED}, {})
    assert target.source.num_sessions == 2
    assert target.source.state is LinkState.UP
    assert target.source.block_size == 8
    assert target.seen.states[-1] == (True, "closed")
    assert target.seen.resyncs == []


def test_a_long_extend_is_split_and_only_the_last_message_asks(
    drafter: ScriptedDrafter, target: Target
) -> None:
    target.until_up()
    # 128 bytes a row.
    num_rows = 2 * limits.TENSOR_BYTES_MAX // 128 + 10
    assert target.step(1, num_rows=num_rows).tokens == {1: DRAFTED}
    assert [sum(e.num_rows for e in r.extends) for r in drafter.requests] == [16384, 16384, 10]
    assert [len(r.drafts) for r in drafter.requests] == [0, 0, 1]
    assert [len(r.opens) for r in drafter.requests] == [1, 0, 0]
    assert [r.step_id for r in drafter.requests] == [1, 2, 3]
    assert {r.target_instance_id for r in drafter.requests} == {"target-1"}
    assert drafter.sessions[1] == (0, 0, num_rows)


def test_an_idle_step_sends_nothing_and_an_ended_session_is_closed(
    drafter: ScriptedDrafter, target: Target
) -> None:
    target.until_up()
    target.step(1)
    num_requests = len(drafter.requests)
    target.step()
    target.step(ended=(1, 77))
    target.until(lambda: len(drafter.requests) > num_requests)
    assert [(c.session_id, c.epoch) for r in drafter.requests[num_requests:] for c in r.closes] == [(1, 0)]
    target.until(lambda: not drafter.sessions)
    assert target.source.num_sessions == 0


def test_a_late_reply_costs_the_deadline_and_is_never_used(drafter: ScriptedDrafter, target: Target) -> None:
    target.until_up()
    target.step(1)
    drafter.delay_s = DEADLINE_S + 0.1
    began = time.monotonic()
    assert target.step(1).plain == {1: PlainReason.DEADLINE}
    assert DEADLINE_S <= time.monotonic() - began < DEADLINE_S + 0.2
    drafter.delay_s = 0.0
    # Two replies come now; the draft of the first would fit neither position nor anchor.
    drafter.alter = lambda request, reply: reply
    assert target.step(1) == Drafts({1: DRAFTED}, {})
    assert target.seen.resyncs == []


def test_three_missed_deadlines_open_the_breaker_and_it_closes_by_itself(
    drafter: ScriptedDrafter, target: Target
) -> None:
    target.until_up()
    assert target.step(1).tokens
    drafter.alter = lambda request, reply: None
    reasons = [target.step(1).plain[1] for _ in range(4)]
    assert reasons == [PlainReason.DEADLINE] * 3 + [PlainReason.BREAKER_OPEN]
    assert target.source.captured_layer_ids == ()
    assert target.source.num_sessions == 0
    assert target.seen.states[-1] == (False, "open")
    drafter.alter = _keep
    target.until_up()
    assert target.source.lost_sessions() == {1}
    assert target.source.lost_sessions() == set()
    target.context_len[1] = 0  # the core rewinds
    assert target.step(1).tokens == {1: DRAFTED}
    assert target.seen.states[-1] == (True, "closed")
    assert target.seen.resyncs == ["recaptured"]
    assert drafter.sessions[1][0] == 1, "opened again under the next epoch"


def test_a_half_open_breaker_opens_after_one_miss(drafter: ScriptedDrafter, target: Target) -> None:
    target.until_up()
    drafter.alter = lambda request, reply: None
    assert target.step(1).plain == {1: PlainReason.DEADLINE}
    assert target.step(1).plain == {1: PlainReason.BREAKER_OPEN}


def test_a_killed_drafter_is_noticed_at_once_and_its_successor_used(path: Path, target: Target) -> None:
    drafter = ScriptedDrafter(TARGET, DRAFT)
    with drafter.serving(f"unix:{path}"):
        target.until_up()
        assert target.step(1, 2).tokens
        drafter.alter = lambda request, reply: None
    began = time.monotonic()
    drafts = target.step(1, 2)
    assert time.monotonic() - began < 0.1
    assert set(drafts.plain.values()) <= {PlainReason.UNAVAILABLE, PlainReason.BREAKER_OPEN}
    target.until(lambda: target.source.state is LinkState.DOWN)
    assert target.step(1, 2).plain == {1: PlainReason.BREAKER_OPEN, 2: PlainReason.BREAKER_OPEN}

    successor = ScriptedDrafter(TARGET, DRAFT, instance_id="drafter-2")
    with successor.serving(f"unix:{path}"):
        target.until_up()
        # 1 is not rewound: its context starts now. 2 ended meanwhile.
        assert target.step(1, ended=(2,)).tokens == {1: DRAFTED}
        assert successor.sessions == {1: (1, target.context_len[1] - 1, target.context_len[1])}
        assert target.seen.resyncs == ["cold"]
        assert [c for r in successor.requests for c in r.closes] == []


def test_a_drafter_that_was_never_there_is_found_when_it_comes(path: Path, target: Target) -> None:
    assert target.step(1).plain == {1: PlainReason.UNAVAILABLE}
    time.sleep(0.05)
    assert target.source.state is LinkState.DOWN
    with ScriptedDrafter(TARGET, DRAFT).serving(f"unix:{path}"):
        target.until_up()
        assert target.source.lost_sessions() == {1}
        target.context_len[1] = 0
        assert target.step(1).tokens == {1: DRAFTED}
        assert target.seen.resyncs == [], "nothing was re-opened"


def test_a_stopped_drafter_delays_nothing_and_its_successor_is_found(path: Path, target: Target) -> None:
    """It accepts connections, as the kernel does for a stopped process, and never says a word."""
    target.until(lambda: target.seen.states != [])
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(path))
        stopped.listen()
        began = time.monotonic()
        for _ in range(100):
            assert target.step(1).plain == {1: PlainReason.UNAVAILABLE}
        assert time.monotonic() - began < 0.5
        time.sleep(1.2)
        path.unlink()
        with ScriptedDrafter(TARGET, DRAFT).serving(f"unix:{path}"):
            target.until_up()


def test_contracts_that_differ_are_named_and_looked_at_again(path: Path, target: Target) -> None:
    other = replace(TARGET, hidden_size=32, weights_fingerprint="other")
    with ScriptedDrafter(other, replace(DRAFT, mask_token_id=100)).serving(f"unix:{path}"):
        target.until(lambda: target.source.state is LinkState.MISMATCH)
        assert [str(m) for m in target.source.mismatches] == [
            "hidden_size: ours 16, theirs 32",
            "weights_fingerprint: ours w, theirs other",
            "mask_token_id: ours below 100, theirs 100",
        ]
        assert target.source.captured_layer_ids == ()
        assert target.step(1).plain == {1: PlainReason.UNAVAILABLE}
    assert target.seen.fields == [["hidden_size", "weights_fingerprint", "mask_token_id"]]
    with ScriptedDrafter(TARGET, DRAFT).serving(f"unix:{path}"):
        target.until_up()
        assert target.source.mismatches == []
        assert target.seen.fields[-1] == []


def test_fields_that_the_drafter_refuses_are_named_from_our_side(path: Path, target: Target) -> None:
    refusal = "dtype: ours bfloat16, theirs float32; vocab_rows: ours 64, theirs 100"
    with ScriptedDrafter(TARGET, DRAFT, refusal=refusal).serving(f"unix:{path}"):
        target.until(lambda: target.source.state is LinkState.MISMATCH)
        assert [str(m) for m in target.source.mismatches] == [
            "dtype: ours float32, theirs bfloat16",
            "vocab_rows: ours 100, theirs 64",
        ]
        assert target.seen.fields == [["dtype", "vocab_rows"]]


def test_busy_means_a_step_without_a_draft_and_nothing_else(drafter: ScriptedDrafter, target: Target) -> None:
    def busy(reply: pb.DraftResponse) -> None:
        reply.outcomes[0].outcome = pb.OUTCOME_BUSY
        reply.outcomes[0].ClearField("draft_row")
        reply.ClearField("drafts")

    target.until_up()
    target.step(1)
    drafter.alter = _alter_block(busy)
    assert target.step(1).plain == {1: PlainReason.BUSY}
    drafter.alter = _keep
    assert target.step(1).tokens == {1: DRAFTED}
    assert target.seen.resyncs == []


def test_without_capacity_the_drafter_is_left_alone_until_a_session_ends(
    drafter: ScriptedDrafter, target: Target
) -> None:
    def full(reply: pb.DraftResponse) -> None:
        for outcome in reply.outcomes:
            if outcome.session_id == 2:
                outcome.outcome = pb.OUTCOME_NO_CAPACITY
                outcome.ClearField("draft_row")
        reply.drafts.CopyFrom(encode_tensor(torch.tensor([DRAFTED], dtype=torch.int32)))

    target.until_up()
    drafter.alter = _alter_block(full)
    assert target.step(1, 2) == Drafts({1: DRAFTED}, {2: PlainReason.NO_CAPACITY})
    assert target.step(1, 2) == Drafts({1: DRAFTED}, {2: PlainReason.NO_CAPACITY})
    assert [c.session_id for c in drafter.requests[-1].closes] == [2], "it holds no pages in vain"
    assert not drafter.requests[-1].opens
    assert target.source.lost_sessions() == set(), "there is no room for it"
    drafter.alter = _keep
    assert target.step(2, ended=(1,)).tokens == {2: DRAFTED}


def test_a_drafter_that_wants_a_resync_gets_the_context_from_now_on(
    drafter: ScriptedDrafter, target: Target
) -> None:
    target.until_up()
    target.step(1, num_rows=4)
    drafter.sessions[1] = (0, 0, 2)  # it lost two rows
    assert target.step(1).plain == {1: PlainReason.RESYNC}
    assert target.step(1).tokens == {1: DRAFTED}
    assert drafter.sessions[1] == (1, 5, 6)
    drafter.sessions.clear()  # it forgot all
    assert target.step(1).plain == {1: PlainReason.RESYNC}
    assert target.step(1).tokens == {1: DRAFTED}
    assert target.seen.resyncs == ["cold", "cold"]


def _set_drafts(*rows: list[int]) -> Callable[[pb.DraftResponse], None]:
    def change(reply: pb.DraftResponse) -> None:
        reply.drafts.CopyFrom(encode_tensor(torch.tensor(rows, dtype=torch.int32)))

    return change


def _set_row(row: int) -> Callable[[pb.DraftResponse], None]:
    def change(reply: pb.DraftResponse) -> None:
        reply.outcomes[0].draft_row = row

    return change


FAULTY_BLOCKS = {
    "an id equal to the vocabulary": _set_drafts([*DRAFTED[:6], 100]),
    "a negative id": _set_drafts([-1, *DRAFTED[1:]]),
    "one token too few": _set_drafts(DRAFTED[:6]),
    "one token too many": _set_drafts([*DRAFTED, 13]),
    "two blocks for one": _set_drafts(DRAFTED, DRAFTED),
    "floats": lambda reply: reply.drafts.CopyFrom(encode_tensor(torch.ones(1, 7))),
    "no tensor": lambda reply: reply.ClearField("drafts"),
    "bytes that are missing": lambda reply: setattr(reply.drafts, "content", b"abc"),
    "a row that is not there": _set_row(1),
    "no row": lambda reply: reply.outcomes[0].ClearField("draft_row"),
}


@pytest.mark.parametrize("name", FAULTY_BLOCKS)
def test_a_faulty_block_is_discarded_and_a_second_one_ends_the_session(
    drafter: ScriptedDrafter, target: Target, name: str
) -> None:
    target.until_up()
    target.step(1)
    drafter.alter = _alter_block(FAULTY_BLOCKS[name])
    assert target.step(1) == Drafts({}, {1: PlainReason.INVALID_DRAFT})
    drafter.alter = _keep
    assert target.step(1).tokens == {1: DRAFTED}
    drafter.alter = _alter_block(FAULTY_BLOCKS[name])
    assert target.step(1) == Drafts({}, {1: PlainReason.INVALID_DRAFT})
    drafter.alter = _keep
    num_requests = len(drafter.requests)
    assert target.step(1, 2) == Drafts({2: DRAFTED}, {1: PlainReason.INVALID_DRAFT})
    assert [c.session_id for r in drafter.requests[num_requests:] for c in r.closes] == [1]


def test_one_faulty_row_harms_no_other_session(drafter: ScriptedDrafter, target: Target) -> None:
    target.until_up()
    target.step(1, 2)
    drafter.alter = _alter_block(_set_drafts([101] * 7, DRAFTED))
    assert target.step(1, 2) == Drafts({2: DRAFTED}, {1: PlainReason.INVALID_DRAFT})


def test_a_draft_for_another_base_is_not_used(drafter: ScriptedDrafter, target: Target) -> None:
    def elsewhere(reply: pb.DraftResponse) -> None:
        reply.outcomes[0].context_len += 1

    target.until_up()
    target.step(1)
    drafter.alter = _alter_block(elsewhere)
    assert target.step(1) == Drafts({}, {1: PlainReason.RESYNC})
    drafter.alter = _keep
    assert target.step(1).tokens == {1: DRAFTED}
    assert drafter.sessions[1][0] == 1


USELESS_REPLIES = {
    "another step": lambda reply: setattr(reply, "step_id", reply.step_id + 1),
    "another life": lambda reply: setattr(reply, "drafter_instance_id", "drafter-9"),
    "a session left out": lambda reply: reply.ClearField("outcomes"),
    "an unknown outcome": lambda reply: setattr(reply.outcomes[0], "outcome", 77),
}


@pytest.mark.parametrize("name", USELESS_REPLIES)
def test_a_reply_that_breaks_the_contract_breaks_the_connection(
    drafter: ScriptedDrafter, target: Target, name: str
) -> None:
    target.until_up()
    target.step(1)
    drafter.alter = _alter_block(USELESS_REPLIES[name])
    assert target.step(1) == Drafts({}, {1: PlainReason.INVALID_DRAFT})
    assert target.source.captured_layer_ids == ()
    drafter.alter = _keep
    target.until_up()
    assert target.step(1).tokens == {1: DRAFTED}
    assert drafter.num_handshakes == 2


def test_refused_rows_break_the_connection(drafter: ScriptedDrafter, target: Target) -> None:
    def refuse(reply: pb.DraftResponse) -> None:
        reply.outcomes[0].outcome = pb.OUTCOME_INVALID_TENSOR
        reply.outcomes[0].ClearField("draft_row")
        reply.ClearField("drafts")

    target.until_up()
    drafter.alter = _alter_block(refuse)
    assert target.step(1).plain == {1: PlainReason.UNAVAILABLE}
    assert target.source.captured_layer_ids == ()
    assert target.seen.states[-1] == (False, "open")


def test_non_finite_rows_get_one_more_chance(drafter: ScriptedDrafter, target: Target) -> None:
    def spoiled(reply: pb.DraftResponse) -> None:
        reply.outcomes[0].outcome = pb.OUTCOME_NON_FINITE
        reply.outcomes[0].ClearField("draft_row")
        reply.ClearField("drafts")

    target.until_up()
    drafter.alter = _alter_block(spoiled)
    for _ in range(3):
        assert target.step(1).plain == {1: PlainReason.NON_FINITE}
    assert sum(len(r.opens) for r in drafter.requests) == 2


def test_a_drafter_far_behind_is_not_buried_in_messages(drafter: ScriptedDrafter, target: Target) -> None:
    target.until_up()
    drafter.alter = lambda request, reply: None
    captured = torch.randn(1, 2 * TARGET.hidden_size)
    for position in range(limits.MESSAGES_IN_FLIGHT_MAX):
        target.source.post(HandOff([ContextRows(1, position, 0, 1)], [], [], captured))
    wanted = [WantedBlock(1, limits.MESSAGES_IN_FLIGHT_MAX + 1, ANCHOR)]
    target.source.post(HandOff([ContextRows(1, limits.MESSAGES_IN_FLIGHT_MAX, 0, 1)], wanted, [], captured))
    began = time.monotonic()
    assert target.source.collect().plain == {1: PlainReason.BUSY}
    assert time.monotonic() - began < 0.1
    assert target.source.captured_layer_ids == (), "as bad as a missed deadline of a half-open breaker"


def test_closing_gives_the_sessions_back(path: Path) -> None:
    drafter = ScriptedDrafter(TARGET, DRAFT)
    with drafter.serving(f"unix:{path}"):
        target = Target(path)
        target.until_up()
        target.step(1)
        assert drafter.sessions
        target.source.close()
        assert drafter.sessions == {}
        assert [c.target_instance_id for c in drafter.closes] == ["target-1"] * 2


def test_closing_while_the_drafter_hangs_is_quick(path: Path) -> None:
    class Hanging(ScriptedDrafter):
        hangs = False

        async def CloseSessions(
            self, request: pb.CloseSessionsRequest, context: grpc.aio.ServicerContext
        ) -> pb.CloseSessionsResponse:
            if self.hangs:
                await asyncio.sleep(30)
            return pb.CloseSessionsResponse()

    drafter = Hanging(TARGET, DRAFT)
    with drafter.serving(f"unix:{path}"):
        target = Target(path)
        target.until_up()
        target.step(1)
        drafter.hangs = True
        began = time.monotonic()
        target.source.close()
        assert time.monotonic() - began < 2 * limits.CLOSE_DEADLINE_S


def test_a_failure_inside_the_link_is_survived(
    path: Path, monkeypatch: pytest.MonkeyPatch, drafter: ScriptedDrafter
) -> None:
    failures = iter([ZeroDivisionError("a bug"), asyncio.CancelledError()])
    agree = drafter_negotiation.agree

    def failing(*args: object) -> object:
        for failure in failures:
            raise failure
        return agree(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter_negotiation, "agree", failing)
    monkeypatch.setattr(limits, "PROBE_INTERVAL_S", 0.1)
    target = Target(path)
    try:
        target.until_up()
        assert target.step(1).tokens == {1: DRAFTED}
        assert drafter.num_handshakes == 3
    finally:
        target.source.close()
