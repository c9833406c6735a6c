"""Draft streams with TRANSPORT_DEVICE over real gRPC, with a device of numbers: who waits for whom, and how
it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from common import limits
from common.handoff.cuda_driver import DriverError
from common.handoff.ring import Ring
from common.handoff.ring_offer import RingOffer, encode_ring_offer
from common.pb.tandem.v1 import drafter_pb2 as pb
from services.drafter.launch_control import LAUNCHES_IN_FLIGHT_MAX
from services.drafter.loading import LoadedDrafter, RingWork
from tests.builders_drafter import build_draft_pair
from tests.drafter_rig import DrafterRig, Stream, TargetEnd, drafts_of, outcomes_of, serving_drafter
from tests.fakes_ring import FakeFlags, FakeGpu, FakeMapping, FakeRingEngine
from tests.ring_rig import BLOCK_SIZE, draft_of, fill_row, owned_rows, small_ring

OFFER = RingOffer("/nowhere", b"t" * 32, b"r" * 16, b"g" * 16, small_ring().num_bytes, small_ring(), 0)


@dataclass
class Device:
    """What the drafter's engine is replaced by."""

    gpu: FakeGpu
    engine: FakeRingEngine
    mapping: FakeMapping

    @property
    def flags(self) -> FakeFlags:
        return self.mapping.flags[-1]

    @property
    def ring(self) -> Ring:
        return self.mapping.ring

    def go_on(self) -> None:
        """Hang no longer."""
        self.engine.hangs = False
        self.gpu.run()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build_draft_pair(tmp_path_factory.mktemp("pair"), seed=21)


@pytest.fixture
def device() -> Iterator[Device]:
    gpu = FakeGpu()
    engine = FakeRingEngine(gpu, num_lanes=64, page_size=8, block_size=BLOCK_SIZE, context_len_max=60)
    device = Device(gpu, engine, FakeMapping(gpu, small_ring()))
    yield device
    device.go_on()


@pytest.fixture
async def rig(checkpoints: tuple[Path, Path], device: Device) -> AsyncIterator[DrafterRig]:
    def equip(loaded: LoadedDrafter) -> LoadedDrafter:
        facts = replace(loaded.facts, ring=small_ring())
        return replace(loaded, facts=facts, ring_work=RingWork(device.engine, device.mapping))

    async with serving_drafter(checkpoints, equip) as rig:
        yield rig


async def attach(target: TargetEnd) -> None:
    """The second handshake, which offers the ring."""
    request = target.hello(transport=pb.TRANSPORT_DEVICE)
    request.ring.CopyFrom(encode_ring_offer(OFFER))
    answer = await target.stub.Handshake(request, timeout=5)
    assert answer.transport == pb.TRANSPORT_DEVICE


def begins(target: TargetEnd, device: Device, session_id: int, sequence: int = 1) -> pb.DraftRequest:
    """Session s opens with a prompt of 5 rows, which are there, and wants a block; its rows are owner s's."""
    device.ring.extend_captured[:5] = owned_rows(session_id, 0, 5)
    fill_row(device.ring, 0, session_id, 5, 0)
    extends = [pb.DeviceExtend(session_id=session_id, num_rows=5)]
    rows = [pb.DeviceRow(session_id=session_id, position_min=5, position_max=5)]
    return target.message(
        opens=[pb.OpenSession(session_id=session_id)],
        device=pb.DeviceStep(sequence=sequence, extends=extends, rows=rows),
    )


def goes_on(target: TargetEnd, session_id: int, sequence: int) -> pb.DraftRequest:
    """A verified block, of which the host knows bounds."""
    rows = [pb.DeviceRow(session_id=session_id, position_min=5, position_max=5 + sequence * BLOCK_SIZE)]
    return target.message(device=pb.DeviceStep(sequence=sequence, rows=rows))


async def until(condition: Any, what: str) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"never: {what}")


async def no_reply(stream: Stream) -> None:
    """None comes for a while; the read goes on and is returned by the next `reply`."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(stream_read(stream)), 0.1)


def stream_read(stream: Stream) -> asyncio.Task[pb.DraftResponse]:
    if getattr(stream, "reading", None) is None:
        stream.reading = asyncio.ensure_future(stream.reply())
    return stream.reading


async def reply(stream: Stream) -> pb.DraftResponse:
    task = stream_read(stream)
    stream.reading = None
    return await task


def check_given_back(rig: DrafterRig) -> None:
    for gauge in ("num_sessions{", "kv_cache_usage_perc{", "pages_unaccounted{", "lanes_unaccounted{"):
        assert rig.metric(gauge) == 0


async def test_steps_are_launched_ahead_and_answered_one_by_one_as_the_device_does_them(
    rig: DrafterRig, device: Device
) -> None:
    async with rig.target() as target:
        await attach(target)
        async with target.stream() as stream:
            for request in (begins(target, device, 7), goes_on(target, 7, 2), goes_on(target, 7, 3)):
                await stream.call.write(request)
            await until(lambda: device.flags.awaited == [1, 2, 3], "all three are launched")
            await no_reply(stream)
            base = 5
            for sequence, count in ((1, 0), (2, 3), (3, 1)):
                if sequence > 1:
                    fill_row(device.ring, 0, 7, base, count)
                device.flags.set_ready(sequence)
                assert device.flags.done == sequence
                answer = await reply(stream)
                base += count
                assert answer.step_id == sequence
                assert outcomes_of(answer) == {7: "OK"} and answer.outcomes[0].context_len == base
                assert device.ring.drafts[0].tolist() == draft_of(7, base)
                assert drafts_of(answer) == [] and not answer.outcomes[0].HasField("draft_row")
                await no_reply(stream)
            assert (answer.ingest_s, answer.draft_s) == (0.001, 0.002) and answer.queue_s > 0
    assert rig.metric("draft_tokens_total{") == 3 * (BLOCK_SIZE - 1)
    assert rig.metric("context_tokens_total{") == 5 + 4


async def test_a_message_that_only_opens_and_closes_is_answered_in_its_turn(
    rig: DrafterRig, device: Device
) -> None:
    async with rig.target() as target:
        await attach(target)
        async with target.stream() as stream:
            await stream.call.write(begins(target, device, 7))
            await stream.call.write(
                target.message(
                    closes=[pb.CloseSession(session_id=7)], opens=[pb.OpenSession(session_id=8)]
                )
            )
            await no_reply(stream)
            device.flags.set_ready(1)
            assert outcomes_of(await reply(stream)) == {7: "OK"}
            assert outcomes_of(await reply(stream)) == {8: "OK"}
            assert rig.metric("num_sessions{") == 1


async def test_no_more_is_in_flight_than_the_engine_has_room_for(rig: DrafterRig, device: Device) -> None:
    async with rig.target() as target:
        await attach(target)
        async with target.stream() as stream:
            total = LAUNCHES_IN_FLIGHT_MAX + 3
            for request in [begins(target, device, 7), *(goes_on(target, 7, n) for n in range(2, total + 1))]:
                await stream.call.write(request)
            await until(lambda: len(device.flags.awaited) == LAUNCHES_IN_FLIGHT_MAX, "the engine is full")
            await asyncio.sleep(0.05)
            assert len(device.flags.awaited) == LAUNCHES_IN_FLIGHT_MAX
            for sequence in range(1, total + 1):
                await until(lambda n=sequence: n in device.flags.awaited, "a place was free again")
                device.flags.set_ready(sequence)
                assert (await reply(stream)).step_id == sequence


async def test_a_device_that_hangs_shows_and_one_that_waits_for_its_target_does_not(
    rig: DrafterRig, device: Device
) -> None:
    heartbeat = "gpu_thread_heartbeat_age_seconds{"
    async with rig.target() as target:
        await attach(target)
        async with target.stream() as stream:
            await stream.call.write(begins(target, device, 7))
            await until(lambda: device.flags.awaited == [1], "it is launched")
            await asyncio.sleep(1.2)
            assert rig.metric(heartbeat) == 0
            device.engine.hangs = True
            device.flags.set_ready(1)
            await until(lambda: rig.metric(heartbeat) > 0.5, "the gauge rises")
            device.go_on()
            await reply(stream)
            await until(lambda: rig.metric(heartbeat) == 0, "the gauge falls")


@pytest.mark.parametrize("when", ["idle", "waiting", "several waiting", "done and unread", "at work"])
async def test_wherever_a_stream_is_lost_its_work_runs_out_and_the_next_connection_begins_anew(
    rig: DrafterRig, device: Device, when: str
) -> None:
    async with rig.target() as target:
        await attach(target)
        async with target.stream() as stream:
            await stream.call.write(begins(target, device, 7))
            device.flags.set_ready(1)
            await reply(stream)
            if when == "several waiting":
                for sequence in (2, 3, 4):
                    await stream.call.write(goes_on(target, 7, sequence))
                await until(lambda: device.flags.awaited == [1, 2, 3, 4], "all are launched")
            elif when != "idle":
                device.engine.hangs = when == "at work"
                await stream.call.write(goes_on(target, 7, 2))
                await until(lambda: device.flags.awaited == [1, 2], "it is launched")
                if when != "waiting":
                    fill_row(device.ring, 0, 7, 5, 2)
                    device.flags.set_ready(2)
        first = device.flags
        await until(lambda: first.num_released > 0, "the waits are released")
        if when == "at work":
            assert rig.metric("num_sessions{") == 1, "pages that the device writes to are nobody else's"
            device.go_on()
        await attach(target)
        check_given_back(rig)
        assert rig.metric('sessions_closed_total{model_name="draft",reason="stream_lost"}') == 1
        assert first.done == len(first.awaited), "nobody waits for a done that does not come"
        assert device.engine.num_attached == 1, "graphs over the same ring are not captured again"
        async with target.stream() as stream:
            await stream.call.write(begins(target, device, 8))
            device.flags.set_ready(1)
            assert outcomes_of(await reply(stream)) == {8: "OK"}
            assert device.ring.drafts[0].tolist() == draft_of(8, 5)
    assert rig.failures == []


async def test_a_target_that_ends_its_stream_is_answered_to_the_last_message(
    rig: DrafterRig, device: Device
) -> None:
    async with rig.target() as target:
        await attach(target)
        async with target.stream() as stream:
            await stream.call.write(begins(target, device, 7))
            await stream.call.write(goes_on(target, 7, 2))
            await stream.call.done_writing()
            await until(lambda: device.flags.awaited == [1, 2], "both are launched")
            device.flags.set_ready(1)
            fill_row(device.ring, 0, 7, 5, 1)
            device.flags.set_ready(2)
            assert [answer.step_id async for answer in stream.call] == [1, 2]
            assert await stream.call.code() is grpc.StatusCode.OK
        await until(lambda: rig.metric("num_sessions{") == 0, "its sessions end")


async def test_a_newer_connection_of_a_target_takes_over(rig: DrafterRig, device: Device) -> None:
    async with rig.target() as target:
        await attach(target)
        async with target.stream() as old:
            await old.call.write(begins(target, device, 7))
            await until(lambda: device.flags.awaited == [1], "it is launched")
            first = device.flags
            await attach(target)
            assert first.num_released > 0 and device.flags is not first
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await reply(old)
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            async with target.stream() as new:
                await new.call.write(begins(target, device, 8))
                device.flags.set_ready(1)
                assert outcomes_of(await reply(new)) == {8: "OK"}
    assert rig.failures == []


async def test_a_second_target_is_refused_the_ring_and_served_by_messages(
    rig: DrafterRig, device: Device
) -> None:
    async with rig.target("one") as one:
        await attach(one)
        async with one.stream() as stream:
            await stream.call.write(begins(one, device, 7))
            device.flags.set_ready(1)
            await reply(stream)
            async with rig.target("two") as two:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await attach(two)
                assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
                text = error.value.details() or ""
                assert text.startswith("target_instance_id: ours the target that streams")
                async with two.stream() as by_messages:
                    assert outcomes_of(await by_messages.ask(two.first_message(1, num_rows=6))) == {1: "OK"}
            await stream.call.write(goes_on(one, 7, 2))
            fill_row(device.ring, 0, 7, 5, 2)
            device.flags.set_ready(2)
            assert outcomes_of(await reply(stream)) == {7: "OK"}


async def test_a_link_whose_stream_never_came_is_given_to_the_next_who_asks(
    rig: DrafterRig, device: Device
) -> None:
    async with rig.target("one") as one, rig.target("two") as two:
        await attach(one)
        await attach(two)
        async with two.stream() as stream:
            await stream.call.write(begins(two, device, 7))
            device.flags.set_ready(1)
            assert outcomes_of(await reply(stream)) == {7: "OK"}


async def test_a_target_that_shakes_hands_for_messages_alone_has_no_ring_any_more(
    rig: DrafterRig, device: Device
) -> None:
    async with rig.target() as target:
        await attach(target)
        await target.shake_hands()
        async with target.stream() as stream:
            assert outcomes_of(await stream.ask(target.first_message(1, num_rows=6))) == {1: "OK"}


async def test_the_ring_of_a_target_life_that_is_over_is_let_go(rig: DrafterRig, device: Device) -> None:
    async with rig.target("first life") as target:
        await attach(target)
        async with target.stream() as stream:
            await stream.call.write(begins(target, device, 7))
            await until(lambda: device.flags.awaited == [1], "it is launched")
    await until(lambda: device.flags.num_released > 0, "the loss is noticed")
    async with rig.target("second life"):
        assert not device.mapping.is_mapped and device.engine.ring is None
        check_given_back(rig)


@pytest.mark.parametrize(
    "wrong",
    [
        {"drafts": [pb.DraftBlock(session_id=7, position=5, anchor=1)]},
        {"extends": [pb.ExtendSession(session_id=7, num_rows=1)]},
        {"device": pb.DeviceStep(sequence=1)},
        {"device": pb.DeviceStep(sequence=2, rows=[pb.DeviceRow(session_id=7)] * 2)},
        {"device": pb.DeviceStep(sequence=2, rows=[pb.DeviceRow()] * 5)},
    ],
    ids=["drafts", "extends", "sequence", "a session twice", "too many rows"],
)
async def test_what_no_target_sends_ends_its_stream_after_what_came_before(
    rig: DrafterRig, device: Device, wrong: dict[str, Any]
) -> None:
    async with rig.target() as target:
        await attach(target)
        async with target.stream() as stream:
            await stream.call.write(begins(target, device, 7))
            await stream.call.write(target.message(**wrong))
            await until(lambda: device.flags.awaited == [1], "the first is launched")
            device.flags.set_ready(1)
            assert outcomes_of(await reply(stream)) == {7: "OK"}
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await reply(stream)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: rig.metric("num_sessions{") == 0, "its sessions end")
    assert device.flags.awaited == [1] and rig.failures == []


async def test_a_stop_ends_a_stream_whose_step_is_in_flight(rig: DrafterRig, device: Device) -> None:
    async with rig.target() as target:
        await attach(target)
        async with target.stream() as stream:
            await stream.call.write(begins(target, device, 7))
            await until(lambda: device.flags.awaited == [1], "it is launched")
            await asyncio.wait_for(rig.service.stop(), 5)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await reply(stream)
            assert error.value.details() == "the drafter stops"
    assert device.flags.done == 1 and device.gpu.is_idle
    assert rig.failures == []


async def test_a_device_on_which_lost_work_does_not_run_out_fails_the_service(
    rig: DrafterRig, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RUN_OUT_DEADLINE_S", 0.2)
    async with rig.target() as target:
        await attach(target)
        async with target.stream() as stream:
            device.engine.hangs = True
            await stream.call.write(begins(target, device, 7))
            await until(lambda: device.flags.awaited == [1], "it is launched")
    await until(lambda: rig.failures == ["device"], "the service fails")
    assert rig.service._desk._table.num_sessions == 1, "its pages may still be written to"


async def give_up_a_handshake(target: TargetEnd) -> None:
    """One that has to wait for lost work to run out, and whose deadline is too short for that."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await target.stub.Handshake(target.hello(), timeout=0.1)
    assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def lose_a_step_that_hangs(rig: DrafterRig, device: Device) -> None:
    async with rig.target("first life") as target:
        await attach(target)
        async with target.stream() as stream:
            device.engine.hangs = True
            await stream.call.write(begins(target, device, 7))
            await until(lambda: device.flags.awaited == [1], "it is launched")
    await until(lambda: device.flags.num_released > 0, "the loss is noticed")


async def test_a_device_that_hangs_fails_the_service_though_a_handshake_that_waits_is_given_up(
    rig: DrafterRig, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "RUN_OUT_DEADLINE_S", 0.5)
    await lose_a_step_that_hangs(rig, device)
    async with rig.target("second life", shake=False) as target:
        await give_up_a_handshake(target)
    assert rig.failures == []
    await until(lambda: rig.failures == ["device"], "the service fails")


async def test_lost_work_ends_and_its_ring_is_let_go_though_a_handshake_that_waits_is_given_up(
    rig: DrafterRig, device: Device
) -> None:
    await lose_a_step_that_hangs(rig, device)
    async with rig.target("second life", shake=False) as target:
        await give_up_a_handshake(target)
        # The call's end and its handler's are two things.
        await asyncio.sleep(0.1)
        device.go_on()
        await until(lambda: not device.mapping.is_mapped, "the ring is let go")
        assert device.engine.ring is None
        await target.shake_hands()
        check_given_back(rig)


async def test_a_stop_while_a_handshake_waits_for_lost_work_waits_for_it_too(
    rig: DrafterRig, device: Device
) -> None:
    await lose_a_step_that_hangs(rig, device)
    links = rig.service._links
    attaching = asyncio.create_task(links.attach("second life", OFFER))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(links.close())
    await asyncio.sleep(0.1)
    assert attaching.done() and not closing.done()
    device.go_on()
    await asyncio.wait_for(closing, 5)
    check_given_back(rig)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), RuntimeError("Triton Error: out of memory")])
async def test_a_ring_whose_graphs_find_no_memory_is_refused_and_its_target_served_by_messages(
    rig: DrafterRig, device: Device, error: RuntimeError
) -> None:
    async with rig.target() as target:
        await attach(target)
        device.engine.attach_fails_with = error
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await attach(target)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (refused.value.details() or "").startswith("ring: ours graphs that fit the GPU")
        assert device.engine.ring is None and not device.mapping.is_mapped
        async with target.stream() as by_messages:
            assert outcomes_of(await by_messages.ask(target.first_message(1, num_rows=6))) == {1: "OK"}
        device.engine.attach_fails_with = None
        await attach(target)
    assert rig.failures == []


async def test_a_capture_that_fails_otherwise_fails_the_service(rig: DrafterRig, device: Device) -> None:
    device.engine.attach_fails_with = RuntimeError("CUDA error: an illegal memory access was encountered")
    async with rig.target() as target:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await attach(target)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert rig.failures == ["engine"]


async def test_a_driver_that_fails_during_a_launch_fails_the_service(
    rig: DrafterRig, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise DriverError("cuStreamWaitValue32", "CUDA_ERROR_LAUNCH_FAILED")

    async with rig.target() as target:
        await attach(target)
        monkeypatch.setattr(device.flags, "await_ready", refuse)
        async with target.stream() as stream:
            await stream.call.write(begins(target, device, 7))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await reply(stream)
            assert error.value.details() == "the drafter's engine failed"
    assert rig.failures == ["engine"]


async def test_a_broken_engine_fails_the_service_and_ends_the_stream(
    rig: DrafterRig, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    async with rig.target() as target:
        await attach(target)
        monkeypatch.setattr(device.engine, "launch", broken)
        async with target.stream() as stream:
            await stream.call.write(begins(target, device, 7))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await reply(stream)
            assert error.value.details() == "the drafter's engine failed"
    assert rig.failures == ["engine"]
