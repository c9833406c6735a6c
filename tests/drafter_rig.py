"""A drafter that really serves, in this process, on a unix socket; and a target's end of the wire."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import torch
from prometheus_client import CollectorRegistry, generate_latest

from common import wire
from common.address import UnixAddress
from common.contract import PROTOCOL_VERSION
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.pb.tandem.v1 import drafter_pb2_grpc
from common.rpc import open_channel
from services.drafter.config import DrafterSettings
from services.drafter.loading import LoadedDrafter, load_drafter
from services.drafter.service import DrafterService


class DrafterRig:
    """The service's address, its facts, and calls a target would make."""

    def __init__(self, service: DrafterService, facts: Any, address: UnixAddress) -> None:
        self.service = service
        self.facts = facts
        self.address = address
        self.failures: list[str] = []

    @contextlib.asynccontextmanager
    async def target(self, name: str = "target", *, shake: bool = True) -> AsyncIterator[TargetEnd]:
        """A channel of its own, hands shaken."""
        async with open_channel(self.address) as channel:
            end = TargetEnd(self, name, drafter_pb2_grpc.DrafterServiceStub(channel))
            if shake:
                await end.shake_hands()
            yield end

    def metric(self, line_start: str) -> float:
        """The value of the one series that starts so, `tandem_drafter_` left out."""
        registry: CollectorRegistry = self.service._registry
        found = [
            line for line in generate_latest(registry).decode().splitlines()
            if line.startswith(f"tandem_drafter_{line_start}")
        ]  # fmt: skip
        assert len(found) == 1, found
        return float(found[0].rsplit(" ", 1)[1])


class TargetEnd:
    """A target as the drafter sees one."""

    def __init__(self, rig: DrafterRig, name: str, stub: Any) -> None:
        self.rig, self.name, self.stub = rig, name, stub
        self._step_id = 0

    def hello(self, **changes: Any) -> pb.HandshakeRequest:
        """A handshake that fits; changes overwrite fields of the target's contract or the request's."""
        request = pb.HandshakeRequest(
            protocol_version=PROTOCOL_VERSION,
            target_instance_id=self.name,
            target=wire.encode_target_contract(self.rig.facts.target),
            transport=pb.TRANSPORT_INLINE,
        )
        for field, value in changes.items():
            setattr(request if field in request.DESCRIPTOR.fields_by_name else request.target, field, value)
        return request

    async def shake_hands(self, **changes: Any) -> pb.HandshakeResponse:
        return await self.stub.Handshake(self.hello(**changes), timeout=5)

    def stream(self) -> Stream:
        """A Draft stream; cancelled when its block ends."""
        return Stream(self.stub.Draft())

    def message(self, captured: torch.Tensor | None = None, **entries: list[Any]) -> pb.DraftRequest:
        """A message with the next step id, in this target's name."""
        self._step_id += 1
        request = pb.DraftRequest(step_id=self._step_id, target_instance_id=self.name, **entries)
        if captured is not None:
            request.captured.CopyFrom(wire.encode_tensor(captured))
        return request

    def rows(self, count: int, seed: int = 3) -> torch.Tensor:
        """Captured hidden states."""
        return torch.randn(
            count, self.rig.facts.captured_width, generator=torch.Generator().manual_seed(seed)
        )  # fmt: skip

    def first_message(self, session_id: int, num_rows: int, seed: int = 3, **changes: Any) -> pb.DraftRequest:
        """Opens a session, gives it context, asks for a block."""
        return self.message(
            self.rows(num_rows, seed),
            opens=[pb.OpenSession(session_id=session_id)],
            extends=[pb.ExtendSession(session_id=session_id, num_rows=num_rows)],
            drafts=[pb.DraftBlock(session_id=session_id, position=num_rows, anchor=9)],
            **changes,
        )


class Stream:
    """A Draft call, message by message."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.call.cancel()

    async def ask(self, request: pb.DraftRequest) -> pb.DraftResponse:
        """Write a message and read one reply."""
        await self.call.write(request)
        return await self.reply()

    async def reply(self) -> pb.DraftResponse:
        """The next reply; an AioRpcError when the stream ended instead."""
        reply = await asyncio.wait_for(self.call.read(), 10)
        if reply is grpc.aio.EOF:
            await self.failure()
        return reply

    async def failure(self) -> None:
        """Raise what the stream ended with."""
        code = await asyncio.wait_for(self.call.code(), 10)
        details = await self.call.details()
        none = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(code, none, none, details=details)


def drafts_of(reply: pb.DraftResponse) -> list[list[int]]:
    """The drafts tensor as lists."""
    if not reply.HasField("drafts"):
        return []
    num_blocks, num_tokens = reply.drafts.shape
    return wire.decode_tensor(reply.drafts, "drafts", torch.int32, (num_blocks, num_tokens)).tolist()


def outcomes_of(reply: pb.DraftResponse) -> dict[int, str]:
    """Outcome names by session, without their common prefix."""
    return {o.session_id: pb.Outcome.Name(o.outcome).removeprefix("OUTCOME_") for o in reply.outcomes}


@contextlib.asynccontextmanager
async def serving_drafter(
    checkpoints: tuple[Path, Path],
    equip: Callable[[LoadedDrafter], LoadedDrafter] = lambda loaded: loaded,
    **settings: Any,
) -> AsyncIterator[DrafterRig]:
    """The service over (target, draft) directories, until the block ends. equip may change what is loaded."""
    target_dir, draft_dir = checkpoints
    # Not in pytest's folders: a socket's path is short, theirs are not.
    socket_dir = tempfile.TemporaryDirectory()
    address = UnixAddress(f"{socket_dir.name}/d.sock")
    configured = DrafterSettings(
        model=str(draft_dir), target_model=str(target_dir), listen=str(address),
        **({"kv_tokens": 2048, "page_size": 8} | settings),
    )  # fmt: skip
    loaded = equip(load_drafter(configured))
    failures: list[str] = []
    service = DrafterService(configured, loaded, failures.append)
    rig = DrafterRig(service, loaded.facts, address)
    rig.failures = failures
    await service.start()
    await service.set_serving(True)
    tasks = [asyncio.create_task(work) for work in (service.keep_house(), service.watch_engine())]
    try:
        yield rig
    finally:
        for task in tasks:
            task.cancel()
        await service.stop()
        socket_dir.cleanup()
