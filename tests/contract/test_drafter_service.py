"""Draft streams over real gRPC on a unix socket, with a tiny random draft."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import torch

from common import limits
from common.handoff.transport import Block, Extend, Open, Outcome, Step
from common.pb.tandem.v1 import drafter_pb2 as pb
from tests.builders_drafter import build_draft_pair, load_drafter
from tests.drafter_rig import DrafterRig, drafts_of, outcomes_of, serving_drafter


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_draft_pair(tmp_path_factory.mktemp("pair"), seed=21)


@pytest.fixture
async def rig(checkpoints: tuple[Path, Path]) -> AsyncIterator[DrafterRig]:
    async with serving_drafter(checkpoints) as rig:
        yield rig


def failed(error: pytest.ExceptionInfo[grpc.aio.AioRpcError]) -> tuple[grpc.StatusCode, str]:
    return error.value.code(), error.value.details() or ""


async def test_a_message_is_answered_with_the_drafts_of_the_engine(
    rig: DrafterRig, checkpoints: tuple[Path, Path]
) -> None:
    async with rig.target() as target, target.stream() as stream:
        request = target.first_message(4, num_rows=11)
        reply = await stream.ask(request)
        captured = target.rows(11)
    assert reply.step_id == request.step_id
    assert reply.drafter_instance_id == rig.facts.instance_id
    assert [(o.session_id, o.epoch, o.outcome, o.context_len, o.draft_row) for o in reply.outcomes] == [
        (4, 0, pb.OUTCOME_OK, 11, 0)
    ]
    assert min(reply.queue_s, reply.ingest_s, reply.draft_s) > 0
    alone = load_drafter(*checkpoints)
    expected = alone.runner.run(
        "x", Step([], [Open(1, 0, 0)], [Extend(1, 0, 0, 0, 11)], [Block(1, 0, 11, 9)]), captured
    )
    assert expected.drafts is not None
    assert drafts_of(reply) == expected.drafts.tolist()


async def test_a_long_extend_may_come_in_several_messages_of_a_step(rig: DrafterRig) -> None:
    async with rig.target() as target, target.stream() as stream:
        whole = drafts_of(await stream.ask(target.first_message(1, num_rows=20)))
        captured = target.rows(20)
        first = target.message(
            captured[:13],
            opens=[pb.OpenSession(session_id=2)],
            extends=[pb.ExtendSession(session_id=2, num_rows=13)],
        )
        second = target.message(
            captured[13:],
            extends=[pb.ExtendSession(session_id=2, position=13, num_rows=7)],
            drafts=[pb.DraftBlock(session_id=2, position=20, anchor=9)],
        )
        assert drafts_of(await stream.ask(first)) == []
        assert drafts_of(await stream.ask(second)) == whole


async def test_outcomes_and_their_numbers_are_those_of_the_contract(rig: DrafterRig) -> None:
    names = {name.removeprefix("OUTCOME_"): number for name, number in pb.Outcome.items()}
    assert {outcome.name: outcome.value for outcome in Outcome} | {"UNSPECIFIED": 0} == names


async def test_a_session_that_does_not_exist_is_answered_and_not_created(rig: DrafterRig) -> None:
    async with rig.target() as target, target.stream() as stream:
        reply = await stream.ask(target.message(drafts=[pb.DraftBlock(session_id=8, anchor=1)]))
    assert outcomes_of(reply) == {8: "UNKNOWN_SESSION"}
    assert rig.metric("num_sessions{") == 0


async def test_sessions_outlive_their_stream_and_go_on_after_a_reconnect(rig: DrafterRig) -> None:
    async with rig.target() as target:
        async with target.stream() as stream:
            first = await stream.ask(target.first_message(1, num_rows=6))
    async with rig.target() as target, target.stream() as stream:
        again = await stream.ask(
            target.message(drafts=[pb.DraftBlock(session_id=1, position=6, anchor=9)])
        )  # fmt: skip
    assert outcomes_of(again) == {1: "OK"}
    assert drafts_of(again) == drafts_of(first)


async def test_a_new_life_of_the_target_drops_the_old_ones_sessions(rig: DrafterRig) -> None:
    async with rig.target("first life") as target, target.stream() as stream:
        await stream.ask(target.first_message(1, num_rows=6))
    await settle(rig, "num_sessions{", 1)
    async with rig.target("second life") as target, target.stream() as stream:
        assert rig.metric("num_sessions{") == 0
        assert rig.metric('sessions_closed_total{model_name="draft",reason="instance_gone"}') == 1
        asked = target.message(drafts=[pb.DraftBlock(session_id=1, position=6, anchor=9)])
        assert outcomes_of(await stream.ask(asked)) == {1: "UNKNOWN_SESSION"}


async def test_two_targets_that_stream_at_once_leave_each_other_alone(rig: DrafterRig) -> None:
    async with rig.target("one") as one, one.stream() as stream_one:
        first = await stream_one.ask(one.first_message(1, num_rows=6))
        async with rig.target("two") as two, two.stream() as stream_two:
            other = await stream_two.ask(two.first_message(1, num_rows=6, seed=4))
            again = one.message(drafts=[pb.DraftBlock(session_id=1, position=6, anchor=9)])
            assert drafts_of(await stream_one.ask(again)) == drafts_of(first)
        assert outcomes_of(other) == {1: "OK"}


async def test_a_stream_without_a_handshake_is_refused(rig: DrafterRig) -> None:
    async with rig.target("stranger", shake=False) as target, target.stream() as stream:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.ask(target.first_message(1, num_rows=2))
    assert failed(error)[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert "target_instance_id" in failed(error)[1]


async def test_a_stream_that_its_target_ends_is_answered_to_the_last_message(rig: DrafterRig) -> None:
    async with rig.target() as target, target.stream() as stream:
        for session_id in range(4):
            await stream.call.write(target.first_message(session_id, num_rows=3))
        await stream.call.done_writing()
        replies = [reply async for reply in stream.call]
        assert len(replies) == 4
        # The last one has no newer message behind it, so its block is drafted.
        assert outcomes_of(replies[-1]) == {3: "OK"}
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_an_empty_stream_ends_well(rig: DrafterRig) -> None:
    async with rig.target() as target, target.stream() as stream:
        await stream.call.done_writing()
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_older_messages_append_and_are_busy_while_newer_ones_wait(rig: DrafterRig) -> None:
    release = threading.Event()
    thread = rig.service._engine_thread
    async with rig.target() as target, target.stream() as stream:
        await stream.ask(target.message(opens=[pb.OpenSession(session_id=1)]))
        blocked = asyncio.create_task(thread.run(release.wait))
        captured = target.rows(9)
        # More than fit the queue: what does not fit waits in gRPC's own buffers, and nothing is lost.
        for i in range(9):
            await stream.call.write(
                target.message(
                    captured[i : i + 1],
                    extends=[pb.ExtendSession(session_id=1, position=i, num_rows=1)],
                    drafts=[pb.DraftBlock(session_id=1, position=i + 1, anchor=9)],
                )
            )
        await settle_queue(rig, limits.DRAFT_QUEUE_MAX)
        await settle_above(rig, "queue_depth{", limits.DRAFT_QUEUE_MAX - 1)
        await settle_above(rig, "gpu_thread_heartbeat_age_seconds{", 0)
        release.set()
        await blocked
        replies = [await stream.reply() for _ in range(9)]
        assert [outcomes_of(reply)[1] for reply in replies] == ["BUSY"] * 8 + ["OK"]
        assert [reply.outcomes[0].context_len for reply in replies] == list(range(1, 10))
        assert [reply.step_id for reply in replies] == list(range(2, 11))
        assert replies[0].queue_s > 0
        fresh = await stream.ask(target.first_message(2, num_rows=9))
    assert drafts_of(replies[-1]) == drafts_of(fresh)


async def test_expired_sessions_are_closed_without_anyone_asking(
    checkpoints: tuple[Path, Path],
) -> None:
    async with serving_drafter(checkpoints, lease_s=0.2) as rig:
        async with rig.target() as target, target.stream() as stream:
            await stream.ask(target.first_message(1, num_rows=6))
            assert rig.metric("num_sessions{") == 1
            await settle(rig, "num_sessions{", 0)
        assert rig.metric('sessions_closed_total{model_name="draft",reason="lease_expired"}') == 1
        assert rig.metric("kv_cache_usage_perc{") == 0
        assert rig.metric("pages_unaccounted{") == 0


async def test_a_full_pool_is_no_capacity_for_the_newcomer_alone(
    checkpoints: tuple[Path, Path],
) -> None:
    async with serving_drafter(checkpoints, kv_tokens=32) as rig:
        async with rig.target() as target, target.stream() as stream:
            first = await stream.ask(target.first_message(1, num_rows=20))
            second = await stream.ask(target.first_message(2, num_rows=20))
            assert (outcomes_of(first), outcomes_of(second)) == ({1: "OK"}, {2: "NO_CAPACITY"})
            again = target.message(drafts=[pb.DraftBlock(session_id=1, position=20, anchor=9)])
            assert drafts_of(await stream.ask(again)) == drafts_of(first)


async def test_close_sessions_counts_what_was_open(rig: DrafterRig) -> None:
    async with rig.target() as target, target.stream() as stream:
        for session_id in (1, 2, 3):
            await stream.ask(target.first_message(session_id, num_rows=3))
        close = pb.CloseSessionsRequest(target_instance_id="target", session_ids=[1, 77])
        assert (await target.stub.CloseSessions(close)).num_closed == 1
        everything = pb.CloseSessionsRequest(target_instance_id="target")
        assert (await target.stub.CloseSessions(everything)).num_closed == 2
    assert rig.metric("num_sessions{") == 0
    assert rig.metric('sessions_closed_total{model_name="draft",reason="asked"}') == 3


async def test_draining_refuses_sessions_finishes_open_ones_and_then_ends_the_stream(rig: DrafterRig) -> None:
    async with rig.target() as target, target.stream() as stream:
        first = await stream.ask(target.first_message(1, num_rows=5))
        draining = asyncio.create_task(rig.service.drain())
        refused = await stream.ask(target.first_message(2, num_rows=5))
        assert outcomes_of(refused) == {2: "NO_CAPACITY"}
        again = target.message(drafts=[pb.DraftBlock(session_id=1, position=5, anchor=9)])
        assert drafts_of(await stream.ask(again)) == drafts_of(first)
        assert not draining.done()
        await stream.ask(target.message(closes=[pb.CloseSession(session_id=1)]))
        await asyncio.wait_for(draining, 5)
        await rig.service.stop()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.reply()
        assert failed(error) == (grpc.StatusCode.UNAVAILABLE, "the drafter stops")


async def test_sessions_of_a_target_that_is_gone_do_not_hold_up_a_drain(rig: DrafterRig) -> None:
    async with rig.target() as target, target.stream() as stream:
        await stream.ask(target.first_message(1, num_rows=5))
    await asyncio.wait_for(rig.service.drain(), 5)


async def test_a_broken_engine_fails_the_service_and_all_streams(
    rig: DrafterRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("device lost")

    async with rig.target() as target, target.stream() as stream:
        await stream.ask(target.first_message(1, num_rows=5))
        monkeypatch.setattr(rig.service._desk._runner._engine, "draft_to_host", broken)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.ask(target.first_message(2, num_rows=5))
        # What broke stays in the log.
        assert failed(error) == (grpc.StatusCode.UNAVAILABLE, "the drafter's engine failed")
        monkeypatch.undo()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await target.stub.CloseSessions(pb.CloseSessionsRequest(target_instance_id="target"))
        assert failed(error)[0] is grpc.StatusCode.UNAVAILABLE
    assert rig.failures == ["engine"]


async def settle(rig: DrafterRig, metric: str, value: float) -> None:
    """Wait until a gauge has a value."""
    for _ in range(500):
        if rig.metric(metric) == value:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{metric} is {rig.metric(metric)}, not {value}")


async def settle_queue(rig: DrafterRig, depth: int) -> None:
    """Wait until that many messages wait for the engine."""
    for _ in range(500):
        if rig.service._servicer.queue_depth >= depth:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"queue depth is {rig.service._servicer.queue_depth}, not {depth}")


async def settle_above(rig: DrafterRig, metric: str, value: float) -> None:
    """Wait until a gauge is above a value."""
    for _ in range(500):
        if rig.metric(metric) > value:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{metric} is {rig.metric(metric)}, not above {value}")
