"""Streams that no target of ours would send: each ends with a status of its own, others go on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from common import limits
from common.pb.tandem.v1 import drafter_pb2 as pb
from tests.builders_drafter import build_draft_pair
from tests.drafter_rig import DrafterRig, Stream, TargetEnd, drafts_of, serving_drafter


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_draft_pair(tmp_path_factory.mktemp("pair"), seed=41)


@pytest.fixture
async def rig(checkpoints: tuple[Path, Path]) -> AsyncIterator[DrafterRig]:
    async with serving_drafter(checkpoints) as rig:
        yield rig


async def raw_stream(rig: DrafterRig, messages: list[bytes]) -> tuple[grpc.StatusCode, str]:
    """Send bytes as they are on a Draft stream; the status that it ends with."""
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(str(rig.address), options=options) as channel:
        call = channel.stream_stream("/tandem.v1.DrafterService/Draft")()
        try:
            for message in messages:
                await call.write(message)
            await call.done_writing()
            # The status comes behind the replies.
            while await call.read() is not grpc.aio.EOF:
                continue
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        return await call.code(), await call.details()


async def check_undisturbed(target: TargetEnd, stream: Stream, expected: list[list[int]]) -> None:
    again = target.message(drafts=[pb.DraftBlock(session_id=1, position=6, anchor=9)])
    assert drafts_of(await stream.ask(again)) == expected


@pytest.mark.parametrize("where", ["first", "later"])
async def test_bytes_that_are_no_message_end_their_stream_alone(rig: DrafterRig, where: str) -> None:
    async with rig.target() as target, target.stream() as stream:
        expected = drafts_of(await stream.ask(target.first_message(1, num_rows=6)))
        good = pb.DraftRequest(target_instance_id="target").SerializeToString()
        messages = [b"\xff\xff\xff\xff garbage"] if where == "first" else [good, b"\xff\xff\xff\xff"]
        code, _ = await raw_stream(rig, messages)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        await check_undisturbed(target, stream, expected)
    assert rig.failures == []


async def test_a_message_above_the_size_limit_ends_its_stream_alone(rig: DrafterRig) -> None:
    async with rig.target() as target, target.stream() as stream:
        expected = drafts_of(await stream.ask(target.first_message(1, num_rows=6)))
        code, _ = await raw_stream(rig, [b"\0" * (limits.MESSAGE_BYTES_MAX + 1)])
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await check_undisturbed(target, stream, expected)


async def test_too_many_entries_end_their_stream_alone(rig: DrafterRig) -> None:
    async with rig.target() as target, target.stream() as stream:
        expected = drafts_of(await stream.ask(target.first_message(1, num_rows=6)))
        async with target.stream() as hostile:
            crowd = [pb.CloseSession(session_id=i) for i in range(limits.DRAFT_ENTRIES_MAX + 1)]
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await hostile.ask(target.message(closes=crowd))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"closes: must be at most {limits.DRAFT_ENTRIES_MAX} entries" in str(error.value.details())
        await check_undisturbed(target, stream, expected)


async def test_a_stream_cannot_speak_for_another_target(rig: DrafterRig) -> None:
    async with rig.target("one") as one, one.stream() as stream_one:
        expected = drafts_of(await stream_one.ask(one.first_message(1, num_rows=6)))
        async with rig.target("two") as two, two.stream() as stream_two:
            await stream_two.ask(two.message())
            forged = two.message(closes=[pb.CloseSession(session_id=1, epoch=99)])
            forged.target_instance_id = "one"
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await stream_two.ask(forged)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "target_instance_id" in str(error.value.details())
        await check_undisturbed(one, stream_one, expected)


async def test_errors_and_outcomes_say_nothing_of_the_machine(rig: DrafterRig) -> None:
    async with rig.target(shake=False) as target:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await target.shake_hands(weights_fingerprint="no")
    assert "/" not in str(error.value.details())


async def test_a_target_that_never_reads_its_replies_holds_up_no_one(rig: DrafterRig) -> None:
    async with rig.target("deaf") as deaf, deaf.stream() as silent:
        for i in range(50):
            await silent.call.write(deaf.first_message(i % 4, num_rows=3))
        async with rig.target() as target, target.stream() as stream:
            expected = drafts_of(await stream.ask(target.first_message(1, num_rows=6)))
            await check_undisturbed(target, stream, expected)
    assert rig.failures == []
