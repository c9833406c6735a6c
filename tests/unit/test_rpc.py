"""The gRPC layer: what each error becomes, what is measured, what reconnecting costs."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common import limits
from common.address import Address, TcpAddress, UnixAddress
from common.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequest,
    InvalidTensor,
    Overloaded,
    TandemError,
    Unavailable,
)
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.pb.tandem.v1 import drafter_pb2_grpc
from common.rpc import CHANNEL_OPTIONS, SERVER_OPTIONS, RpcServer, method_names, open_channel
from common.rpc_calls import status_of

Calls = list[tuple[str, str]]


class Scripted(drafter_pb2_grpc.DrafterServiceServicer):
    """Handshake raises or aborts what it is told; Draft echoes step ids until 99, and notes its end."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.abort_with: grpc.StatusCode | None = None
        self.unwound = asyncio.Event()

    async def Handshake(self, request: pb.HandshakeRequest, context: Any) -> pb.HandshakeResponse:
        if self.abort_with is not None:
            await context.abort(self.abort_with, "as told")
        if self.error is not None:
            raise self.error
        return pb.HandshakeResponse(protocol_version=request.protocol_version)

    async def Draft(
        self, requests: AsyncIterator[pb.DraftRequest], context: Any
    ) -> AsyncIterator[pb.DraftResponse]:
        try:
            async for request in requests:
                if request.step_id == 99:
                    raise InvalidRequest("step_id", limit="below 99", given=99)
                yield pb.DraftResponse(step_id=request.step_id)
        finally:
            self.unwound.set()


class Rig:
    def __init__(self, address: Address) -> None:
        self.address = address
        self.calls: Calls = []
        self.servicer = Scripted()
        self.server = self.make_server()
        self.channel = open_channel(address)
        self.stub = drafter_pb2_grpc.DrafterServiceStub(self.channel)

    async def told(self, *calls: tuple[str, str]) -> None:
        """Wait until exactly these calls were observed: the caller may have its answer a moment earlier."""
        async with asyncio.timeout(10):
            while self.calls != list(calls):
                await asyncio.sleep(0.002)

    def make_server(self) -> RpcServer:
        server = RpcServer(
            ["tandem.v1.DrafterService"], lambda method, status, s: self.calls.append((method, status))
        )
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self.servicer, server.server)
        return server


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    with tempfile.TemporaryDirectory(prefix="td") as folder:
        rig = Rig(UnixAddress(str(Path(folder) / "s")))
        await rig.server.start(rig.address)
        yield rig
        await rig.channel.close()
        await rig.server.stop(0)


async def handshake_error(rig: Rig) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rig.stub.Handshake(pb.HandshakeRequest())
    return caught.value


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("a", limit=1, given=2), grpc.StatusCode.INVALID_ARGUMENT),
        (InvalidTensor("a", limit=1, given=2), grpc.StatusCode.INVALID_ARGUMENT),
        (Overloaded("a", limit=1, given=2), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable("draining"), grpc.StatusCode.UNAVAILABLE),
        (TandemError("other"), grpc.StatusCode.INTERNAL),
        (ConfigError("a", "b", given=1), grpc.StatusCode.INTERNAL),
        (CheckpointError("a", "b", given=1), grpc.StatusCode.INTERNAL),
    ],
)
async def test_each_error_reaches_the_caller_as_its_status_with_its_text(
    rig: Rig, error: TandemError, code: grpc.StatusCode
) -> None:
    assert status_of(error) is code
    rig.servicer.error = error
    caught = await handshake_error(rig)
    assert (caught.code(), caught.details()) == (code, str(error))
    await rig.told(("/tandem.v1.DrafterService/Handshake", code.name))


async def test_an_abort_by_the_servicer_keeps_its_code_and_is_counted_under_it(rig: Rig) -> None:
    rig.servicer.abort_with = grpc.StatusCode.FAILED_PRECONDITION
    assert (await handshake_error(rig)).code() is grpc.StatusCode.FAILED_PRECONDITION
    await rig.told(("/tandem.v1.DrafterService/Handshake", "FAILED_PRECONDITION"))


async def test_an_unforeseen_exception_is_internal_and_its_text_stays_here(rig: Rig) -> None:
    rig.servicer.error = ValueError("a path or a secret")
    caught = await handshake_error(rig)
    assert (caught.code(), caught.details()) == (grpc.StatusCode.INTERNAL, "internal error")


async def test_a_stream_passes_both_ways_and_its_error_ends_it_alone(rig: Rig) -> None:
    stream, other = rig.stub.Draft(), rig.stub.Draft()
    for step_id in (1, 2):
        await stream.write(pb.DraftRequest(step_id=step_id))
        assert (await stream.read()).step_id == step_id
    await other.write(pb.DraftRequest(step_id=5))
    assert (await other.read()).step_id == 5
    await stream.write(pb.DraftRequest(step_id=99))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await other.write(pb.DraftRequest(step_id=6))
    assert (await other.read()).step_id == 6
    await other.done_writing()
    assert await other.code() is grpc.StatusCode.OK
    method = "/tandem.v1.DrafterService/Draft"
    await rig.told((method, "INVALID_ARGUMENT"), (method, "OK"))


async def test_bytes_that_are_no_message_end_a_stream_with_invalid_argument(rig: Rig) -> None:
    stream = rig.channel.stream_stream("/tandem.v1.DrafterService/Draft")()
    await stream.write(b"\xff\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_cancelled_stream_unwinds_the_servicer_at_once(rig: Rig) -> None:
    stream = rig.stub.Draft()
    await stream.write(pb.DraftRequest(step_id=1))
    await stream.read()
    stream.cancel()
    await asyncio.wait_for(rig.servicer.unwound.wait(), 5)


async def test_health_is_not_serving_until_told(rig: Rig) -> None:
    health = health_pb2_grpc.HealthStub(rig.channel)
    status = health_pb2.HealthCheckResponse
    ask = health_pb2.HealthCheckRequest(service="tandem.v1.DrafterService")
    assert (await health.Check(ask)).status == status.NOT_SERVING
    await rig.server.set_serving(True)
    assert (await health.Check(ask)).status == status.SERVING
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == status.SERVING


async def test_a_server_that_comes_back_is_found_within_a_second(rig: Rig) -> None:
    await rig.stub.Handshake(pb.HandshakeRequest())
    await rig.server.stop(0)
    away_until = time.monotonic() + 2
    while time.monotonic() < away_until:
        assert (await handshake_error(rig)).code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.sleep(0.05)
    rig.server = rig.make_server()
    await rig.server.start(rig.address)
    back_at = time.monotonic()
    await rig.stub.Handshake(pb.HandshakeRequest(), wait_for_ready=True, timeout=10)
    assert time.monotonic() - back_at < 1.0


async def test_a_caller_measures_its_own_calls_and_how_they_ended(rig: Rig) -> None:
    made: Calls = []

    def note(method: str, status: str, seconds: float) -> None:
        assert 0 <= seconds < 10
        made.append((method, status))

    async with open_channel(rig.address, note) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        assert (await stub.Handshake(pb.HandshakeRequest(protocol_version=3))).protocol_version == 3
        rig.servicer.abort_with = grpc.StatusCode.FAILED_PRECONDITION
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Handshake(pb.HandshakeRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        stream = stub.Draft()
        await stream.write(pb.DraftRequest(step_id=1))
        assert (await stream.read()).step_id == 1
        stream.cancel()
    method = "/tandem.v1.DrafterService/Handshake"
    assert made == [(method, "OK"), (method, "FAILED_PRECONDITION")]


async def test_a_tcp_port_that_the_system_chose_is_told(rig: Rig) -> None:
    server = rig.make_server()
    address = await server.start(TcpAddress("127.0.0.1", 0))
    assert isinstance(address, TcpAddress)
    assert address.port > 0
    async with open_channel(address) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)
        assert (await stub.Handshake(pb.HandshakeRequest(protocol_version=3))).protocol_version == 3
    await server.stop(0)


def test_both_sides_speak_of_the_same_message_size_and_pings_are_permitted() -> None:
    server, channel = dict(SERVER_OPTIONS), dict(CHANNEL_OPTIONS)
    for options in (server, channel):
        assert options["grpc.max_receive_message_length"] == limits.MESSAGE_BYTES_MAX
        assert options["grpc.max_send_message_length"] == limits.MESSAGE_BYTES_MAX
    assert channel["grpc.keepalive_time_ms"] >= server["grpc.http2.min_ping_interval_without_data_ms"]
    assert 30_000 >= server["grpc.http2.min_ping_interval_without_data_ms"], "a gateway pings every 30 s"


def test_methods_are_named_as_they_are_called() -> None:
    service = pb.DESCRIPTOR.services_by_name["DrafterService"]
    assert "/tandem.v1.DrafterService/Draft" in method_names(service)
