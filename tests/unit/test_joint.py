"""The two ends of the joint together: nothing lost, nothing twice, nobody waits, and either may vanish."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import AsyncIterator

import pytest

from common import limits
from common.errors import InvalidRequest, Overloaded, Unavailable
from common.pb.tandem.v1 import core_pb2
from services.target.core.front_outbox import FrontOutbox
from services.target.core.report import CoreStats
from services.target.core.request import (
    Event,
    FinishReason,
    Request,
    RequestFailed,
    RequestFinished,
    RequestRefused,
    SamplingParams,
    TokensCommitted,
)
from services.target.facts import DrafterFacts
from services.target.front.report import FrontReports
from services.target.joint.frames import BrokenJoint, framed
from tests.fakes import ScriptedCore
from tests.joint_rig import Joint, joined, until


class Caller:
    """A request at the front's end, and what it heard."""

    def __init__(self, joint: Joint, name: str) -> None:
        self.joint = joint
        self.tokens: list[int] = []
        self.terminals: list[Event] = []
        self.stats_seen: list[int] = []
        self.request = Request(name, [1, 2], SamplingParams(), 9, frozenset({2}), True, self.hear)

    def hear(self, event: Event) -> None:
        assert not self.terminals, "something after the end"
        self.stats_seen.append(self.joint.front_end.stats().num_running)
        if isinstance(event, TokensCommitted):
            self.tokens += event.token_ids
            assert event.from_draft == [i % 2 == 1 for i in event.token_ids]
        else:
            self.terminals.append(event)


class Rig:
    def __init__(self, core: ScriptedCore, joint: Joint) -> None:
        self.core, self.joint = core, joint

    async def admitted(self, *names: str) -> list[Caller]:
        callers = [Caller(self.joint, name) for name in names]
        for caller in callers:
            self.joint.front_end.submit(caller.request)
        await until(lambda: all(name in self.core.requests for name in names))
        return callers

    def emit(self, name: str, *ids: int) -> None:
        """As in the middle of a step: nothing is announced."""
        self.core.requests[name].emit(TokensCommitted(list(ids), [i % 2 == 1 for i in ids]))

    def step(self, name: str, *ids: int) -> None:
        """A step that gives one request these tokens."""
        self.emit(name, *ids)
        self.core.announce()

    @property
    def transport(self) -> asyncio.Transport:
        transport = self.joint.front_end._transport
        assert transport is not None
        return transport


@contextlib.asynccontextmanager
async def open_rig(outbox: FrontOutbox | None = None) -> AsyncIterator[Rig]:
    core = ScriptedCore()
    async with joined(core, lambda: (core.stats(), DrafterFacts()), outbox) as joint:
        yield Rig(core, joint)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with open_rig() as rig:
        yield rig


async def test_a_request_arrives_and_its_events_come_back(rig: Rig) -> None:
    (caller,) = await rig.admitted("a")
    arrived = rig.core.requests["a"]
    assert arrived is not caller.request
    assert (arrived.prompt, arrived.stop_token_ids, arrived.max_new_tokens) == ([1, 2], {2}, 9)
    rig.step("a", 0, 1, 2, 3)
    rig.core.finish("a", FinishReason.STOP, 2)
    await until(lambda: caller.terminals)
    assert caller.tokens == [0, 1, 2, 3]
    (finished,) = caller.terminals
    assert isinstance(finished, RequestFinished)
    assert (finished.reason, finished.matched_token_id) == (FinishReason.STOP, 2)


async def test_tokens_from_a_busy_core_reach_a_front_that_pauses_now_and_then(rig: Rig) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    names = [f"r{i}" for i in range(12)]
    callers = dict(zip(names, await rig.admitted(*names), strict=True))
    sent: dict[str, list[int]] = {name: [] for name in names}

    def run_core() -> None:
        live = list(names)
        for step in range(1500):
            for name in live:
                ids = [step * 4 + i for i in range(rng.randint(1, 4))]
                sent[name] += ids
                rig.emit(name, *ids)
            if step > 700 and len(live) > 1 and rng.random() < 0.02:
                # In one step with its last tokens.
                gone = live.pop(rng.randrange(len(live)))
                rig.core.requests[gone].emit(rig.core.requests[gone].finish(FinishReason.LENGTH))
            rig.core.announce()
        for name in live:
            rig.core.finish(name, FinishReason.LENGTH)

    core_thread = threading.Thread(target=run_core)
    core_thread.start()
    while core_thread.is_alive():
        rig.transport.pause_reading()
        await asyncio.sleep(rng.random() * 0.02)
        rig.transport.resume_reading()
        await asyncio.sleep(rng.random() * 0.01)
    await until(lambda: all(caller.terminals for caller in callers.values()))
    assert {name: caller.tokens for name, caller in callers.items()} == sent
    assert rig.joint.heard.num_slow == 0


async def test_whoever_hears_of_an_event_sees_stats_that_are_as_new(rig: Rig) -> None:
    names = [f"r{i}" for i in range(5)]
    callers = await rig.admitted(*names)
    rig.step("r0", 1)
    await until(lambda: callers[0].tokens)
    assert callers[0].stats_seen == [5]
    for name in names:
        rig.core.finish(name, FinishReason.LENGTH)
    await until(lambda: all(caller.terminals for caller in callers))
    assert [caller.stats_seen[-1] <= 4 - i for i, caller in enumerate(callers)] == [True] * 5


async def test_a_front_that_does_not_read_loses_requests_and_costs_the_core_no_time() -> None:
    async with open_rig(FrontOutbox(backlog_tokens_max=20_000)) as slow, open_rig() as quick:
        loud, calm = await slow.admitted("loud", "calm")
        (other,) = await quick.admitted("other")
        slow.transport.pause_reading()
        slowest_s = 0.0

        def run_core() -> None:
            nonlocal slowest_s
            for step in range(400):
                slow.emit("loud", *range(1000))
                slow.emit("calm", step)
                quick.emit("other", step)
                began = time.thread_time()
                slow.core.announce()
                slowest_s = max(slowest_s, time.thread_time() - began)
                quick.core.announce()
                time.sleep(0.0005)

        await asyncio.to_thread(run_core)
        assert slowest_s < 0.1
        await until(lambda: "loud" in slow.core.aborted)
        await until(lambda: len(other.tokens) == 400)
        assert (slow.core.aborted, quick.core.aborted) == (["loud"], [])
        assert (slow.joint.heard.num_slow, quick.joint.heard.num_slow) == (1, 0)
        slow.transport.resume_reading()
        await until(lambda: loud.terminals and len(calm.tokens) == 400)
        assert calm.tokens == list(range(400))
        (failed,) = loud.terminals
        assert isinstance(failed, RequestFailed)
        assert isinstance(failed.error, Overloaded)
        assert loud.tokens == list(range(1000)) * (len(loud.tokens) // 1000), "what it got has no gap"
        slow.core.finish("calm", FinishReason.LENGTH)
        await until(lambda: calm.terminals)


@pytest.mark.parametrize(
    "refusal", [Overloaded("core inbox", limit=1, given=1), Unavailable("service is draining")]
)
async def test_a_refusal_is_the_one_event_of_its_request(rig: Rig, refusal: Overloaded | Unavailable) -> None:
    rig.core.refusal = refusal
    caller = Caller(rig.joint, "a")
    rig.joint.front_end.submit(caller.request)
    await until(lambda: caller.terminals)
    (refused,) = caller.terminals
    assert isinstance(refused, RequestRefused)
    assert (type(refused.error), str(refused.error)) == (type(refusal), str(refusal))
    rig.joint.front_end.abort(caller.request)
    rig.core.refusal = None
    (again,) = await rig.admitted("a")
    assert not rig.core.aborted
    rig.core.finish("a", FinishReason.LENGTH)
    await until(lambda: again.terminals)


async def test_a_caller_that_leaves_while_its_namesake_runs_does_not_end_that(rig: Rig) -> None:
    (first,) = await rig.admitted("a")
    second = Caller(rig.joint, "a")
    rig.joint.front_end.submit(second.request)
    # Before it is known that it was refused.
    rig.joint.front_end.abort(second.request)
    await until(lambda: second.terminals)
    (refused,) = second.terminals
    assert isinstance(refused, RequestRefused)
    assert isinstance(refused.error, InvalidRequest)
    assert await rig.joint.front_end.abort_named("nobody") is False
    assert not rig.core.aborted
    assert not first.terminals
    assert await rig.joint.front_end.abort_named("a") is True
    assert rig.core.aborted == ["a"]


async def test_a_core_that_is_gone_is_told_to_each_stream_once(rig: Rig) -> None:
    callers = await rig.admitted("a", "b")
    rig.step("a", 1)
    await until(lambda: callers[0].tokens)
    question = asyncio.ensure_future(rig.joint.front_end.abort_named("b"))
    rig.joint.running.cancel()
    await asyncio.sleep(0)
    rig.joint.core_end.close()
    await until(lambda: rig.joint.front_end.is_lost)
    for caller in callers:
        (failed,) = caller.terminals
        assert isinstance(failed, RequestFailed)
        assert isinstance(failed.error, Unavailable)
    with pytest.raises(Unavailable):
        await question
    with pytest.raises(Unavailable):
        rig.joint.front_end.submit(Caller(rig.joint, "c").request)
    with pytest.raises(Unavailable):
        await rig.joint.front_end.abort_named("a")
    rig.joint.front_end.abort(callers[0].request)
    assert rig.joint.front_end.is_over


async def test_a_front_that_is_gone_has_its_requests_aborted_and_the_core_goes_on(rig: Rig) -> None:
    await rig.admitted("a", "b", "c")
    rig.core.finish("b", FinishReason.LENGTH)
    rig.transport.abort()
    with pytest.raises(BrokenJoint, match="the front ended"):
        await rig.joint.running
    # The core's thread may be in the middle of a step.
    rig.step("a", 1)
    rig.joint.core_end.close()
    assert rig.core.aborted == ["a", "c"]
    rig.core.announce()
    rig.joint.core_end.close()
    assert rig.core.aborted == ["a", "c"], "once"


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff",
        framed(b"\xff\xff\xff"),
        framed(core_pb2.FromFront(listening="unix:/x").SerializeToString()),
        framed(core_pb2.FromFront(submit=core_pb2.Submit(prompt=b"123")).SerializeToString()),
        framed(b""),
    ],
    ids=["length", "no message", "out of turn", "prompt", "nothing"],
)
async def test_what_is_wrong_ends_the_joint_with_that_front_alone(rig: Rig, sent: bytes) -> None:
    rig.transport.write(sent)
    with pytest.raises(BrokenJoint):
        await rig.joint.running
    assert not rig.core.requests


async def test_a_core_that_sends_what_is_no_frame_is_as_one_that_is_gone(rig: Rig) -> None:
    (caller,) = await rig.admitted("a")
    rig.joint.core_end._sock.send(b"\xff\xff\xff\xff")
    await until(lambda: caller.terminals)
    assert rig.joint.front_end.is_lost


async def test_requests_that_a_stopped_core_does_not_read_are_bounded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "JOINT_BACKLOG_BYTES_MAX", 2_000_000)
    rig.joint.running.cancel()
    await asyncio.sleep(0)
    big = [Caller(rig.joint, f"r{i}").request for i in range(20)]
    for request in big:
        request.prompt = [7] * 100_000
    with pytest.raises(Overloaded, match="bytes not yet read by the core: limit is 2000000"):
        for request in big:
            rig.joint.front_end.submit(request)
    assert rig.transport.get_write_buffer_size() < 2_500_000


async def test_health_and_the_end_are_the_cores_to_say(rig: Rig) -> None:
    front = rig.joint.front_end
    rig.joint.core_end.say_serving(True)
    await until(lambda: front.serving)
    (caller,) = await rig.admitted("a")
    rig.joint.core_end.say_serving(False)
    await until(lambda: not front.serving)
    rig.core.finish("a", FinishReason.LENGTH)
    rig.joint.core_end.say_leave()
    await until(lambda: front.is_over)
    assert caller.terminals, "nothing follows it"
    assert not front.is_lost


async def test_a_busy_front_reports_before_there_is_too_much(rig: Rig) -> None:
    reports = FrontReports(rig.joint.front_end.tell_report)
    for i in range(limits.REPORT_ENTRIES_MAX + 10):
        reports.observe_server_call("/a/B", "OK", i / 1024)
    await until(lambda: rig.joint.heard.reports)
    reports.observe_rejected("invalid")
    reports.report(0.25)
    await until(lambda: len(rig.joint.heard.reports) == 2)
    full, rest = rig.joint.heard.reports
    seconds = [call.seconds for call in (*full.ended_calls, *rest.ended_calls)]
    assert seconds == [i / 1024 for i in range(limits.REPORT_ENTRIES_MAX + 10)]
    assert (rest.event_loop_lag_s, list(rest.rejected)) == (0.25, ["invalid"])


async def test_stats_that_change_without_an_event_are_sent_with_the_next_step(rig: Rig) -> None:
    now = CoreStats(3, 4, 100, 50, 0)
    rig.core.stats = lambda: now  # type: ignore[method-assign]
    rig.core.announce()
    await until(lambda: rig.joint.front_end.stats() == now)
    heard = 0
    received = rig.joint.front_end.data_received

    def count(data: bytes) -> None:
        nonlocal heard
        heard += 1
        received(data)

    rig.joint.front_end.data_received = count  # type: ignore[method-assign]
    for _ in range(20):
        rig.core.announce()
    await asyncio.sleep(0.05)
    assert heard == 0, "nothing new, nothing sent"
