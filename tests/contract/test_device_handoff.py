"""The two handshakes and the first steps after them, over real gRPC and a real socket; memory is a memfd."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import grpc
import pytest
import torch

from common import limits
from common.address import UnixAddress
from common.contract import DraftContract, TargetContract
from common.handoff.flags import FlagMemory, FlagPair
from common.handoff.ring import RingShape
from common.handoff.ring_offer import RingOffer, decode_ring_offer
from common.pb.tandem.v1 import drafter_pb2 as pb
from services.drafter.device_links import RING_TAKEN
from services.drafter.ring_mapping import MappedRing, RingMapping, RingRefused
from services.target.core.device_drafter import DeviceDrafter
from services.target.core.drafter_status import LinkState
from services.target.core.handoff_choice import HandoffChoice
from services.target.core.pipelined_source import PostedExtend, PostedRow, PostedStep
from services.target.core.ring_owner import RingOwner, RingUnavailable
from tests.fakes_drafter import ScriptedDrafter
from tests.fakes_handoff import GPU_UUID, FakeRingDevice, map_memfd

TARGET = TargetContract(
    hidden_size=16, num_layers=6, vocab_rows=100, dtype="float32", weights_fingerprint="w"
)
DRAFT = DraftContract(
    captured_layer_ids=(1, 3), block_size=4, num_draft_tokens=3, mask_token_id=99, context_len_max=4096,
    weights_fingerprint="d",
)  # fmt: skip
LARGEST = RingShape(8, 4, 3, 32, torch.float32, 64)
DEADLINE_S = 0.3


class Maps(Protocol):
    """What the drafter takes rings up with."""

    def map(self, offer: RingOffer) -> MappedRing: ...


class DeviceScriptedDrafter(ScriptedDrafter):
    """Takes rings up as the real one does, and drafts into them by counting from the anchors there."""

    gpu_uuid = GPU_UUID

    def __init__(self) -> None:
        super().__init__(TARGET, DRAFT)
        self.mapping: Maps | None = RingMapping(self, LARGEST)  # type: ignore[arg-type]
        self.mapped: MappedRing | None = None
        self.offers: list[RingOffer] = []
        self.second_instance_id: str | None = None

    # MappingDevice
    def import_memory(self, descriptor: int, num_bytes: int) -> torch.Tensor:
        return map_memfd(descriptor, num_bytes)

    def register(self, flags: FlagMemory) -> None: ...

    def flags(self, pair: FlagPair) -> FlagPair:
        return pair

    async def Handshake(
        self, request: pb.HandshakeRequest, context: grpc.aio.ServicerContext
    ) -> pb.HandshakeResponse:
        response = await super().Handshake(request, context)
        if request.transport == pb.TRANSPORT_INLINE:
            return response
        if self.mapping is None:
            text = "transport: ours TRANSPORT_INLINE, theirs TRANSPORT_DEVICE"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        assert self.mapping is not None
        self.offers.append(decode_ring_offer(request.ring))
        try:
            self.mapped = await asyncio.to_thread(self.mapping.map, self.offers[-1])
        except RingRefused as refused:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refused.mismatch))
        response.transport = pb.TRANSPORT_DEVICE
        response.drafter_instance_id = self.second_instance_id or response.drafter_instance_id
        return response

    def answer(self, request: pb.DraftRequest) -> pb.DraftResponse:
        if not request.HasField("device"):
            return super().answer(request)
        assert self.mapped is not None
        ring, reply = self.mapped.ring, super().answer(pb.DraftRequest(step_id=request.step_id))
        named = {(m.session_id, m.epoch) for m in request.opens}
        named |= {(m.session_id, m.epoch) for m in request.device.extends}
        for i, m in enumerate(request.device.rows):
            if m.session_id:
                named.add((m.session_id, m.epoch))
                ring.drafts[i] = torch.tensor(self.draft_of(int(ring.anchor[i])), dtype=torch.int32)
        for session_id, epoch in named:
            reply.outcomes.add(session_id=session_id, epoch=epoch, outcome=pb.OUTCOME_OK)
        self.mapped.flags.done.store(request.device.sequence)  # type: ignore[attr-defined]
        return reply


class World:
    """The target's side, with what its metrics heard."""

    def __init__(self, path: Path, choice: HandoffChoice, device: FakeRingDevice, parent: Path) -> None:
        self.transports: list[str | None] = []
        self.fallbacks: list[str] = []
        self.fields: list[list[str]] = []
        self.number = 0
        self.owner = RingOwner(device, TARGET, num_rows=4, extend_rows_max=16, socket_parent=parent)
        self.drafter = DeviceDrafter.connect(
            UnixAddress(str(path)), TARGET, "target-1", DEADLINE_S, self, choice, self.owner
        )

    # DeviceObserver
    def observe_drafter(self, up: bool, breaker: str) -> None: ...

    def observe_mismatches(self, fields: list[str]) -> None:
        self.fields.append(fields)

    def observe_transport(self, transport: str | None) -> None:
        self.transports.append(transport)

    def observe_resync(self, kind: str) -> None: ...

    def observe_watchdog_release(self) -> None: ...

    def observe_fallback(self, reason: str) -> None:
        self.fallbacks.append(reason)

    def launch(self, *rows: PostedRow, extends: tuple[PostedExtend, ...] = ()) -> None:
        """A launch and its post, as the loop makes them."""
        self.number += 1
        self.drafter.await_drafts()
        self.drafter.mark_ready()
        self.drafter.post(PostedStep(self.number, list(extends), list(rows), []))

    def until(self, done: Callable[[], bool], within_s: float = 10.0) -> None:
        end = time.monotonic() + within_s
        while not done():
            assert time.monotonic() < end
            time.sleep(0.01)
            self.drafter.settle()

    def until_up(self) -> None:
        self.until(lambda: self.drafter.state is LinkState.UP)
        self.drafter.settle()


@pytest.fixture
def parent() -> Iterator[Path]:
    # Not in pytest's folders: a socket's path is short, theirs are not.
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "rings").mkdir()
        yield Path(directory)


@pytest.fixture
def path(parent: Path) -> Path:
    return parent / "d.sock"


@pytest.fixture
def scripted() -> DeviceScriptedDrafter:
    return DeviceScriptedDrafter()


@pytest.fixture
def device() -> FakeRingDevice:
    return FakeRingDevice()


@pytest.fixture
def start(path: Path, parent: Path, device: FakeRingDevice) -> Iterator[Callable[[HandoffChoice], World]]:
    worlds: list[World] = []

    def make(choice: HandoffChoice) -> World:
        worlds.append(World(path, choice, device, parent / "rings"))
        return worlds[-1]

    yield make
    for world in worlds:
        world.drafter.close()


Start = Callable[[HandoffChoice], World]
EITHER = pytest.mark.parametrize("choice", [HandoffChoice.AUTO, HandoffChoice.DEVICE])


@EITHER
def test_a_drafter_on_the_same_gpu_drafts_into_the_targets_ring(
    start: Start, path: Path, scripted: DeviceScriptedDrafter, choice: HandoffChoice
) -> None:
    with scripted.serving(f"unix:{path}"):
        world = start(choice)
        world.until_up()
        ring = world.drafter.ring
        assert ring is not None and world.drafter.inline is None
        assert world.transports[-1] == "device" and world.fallbacks == []
        ring.anchor[0] = 41
        world.launch(PostedRow(1, 5, 5), extends=(PostedExtend(1, 0, 0, 5),))
        world.until(lambda: ring.drafts[0].tolist() == [42, 43, 44])
        assert world.drafter.draft_rows([1]) == [0]
        ring.anchor[0] = 50
        world.launch(PostedRow(1, 6, 9))
        world.until(lambda: ring.drafts[0].tolist() == [51, 52, 53])
        world.drafter.post(PostedStep(2, [], [], [1]))
        world.until(lambda: len(scripted.requests) == 3)
    assert [request.device.sequence for request in scripted.requests] == [1, 2, 0]
    assert [close.session_id for close in scripted.requests[2].closes] == [1]


@EITHER
def test_the_socket_is_gone_when_the_handshake_is_answered(
    start: Start, path: Path, parent: Path, scripted: DeviceScriptedDrafter, choice: HandoffChoice
) -> None:
    with scripted.serving(f"unix:{path}"):
        start(choice).until_up()
        assert scripted.offers[0].socket_path.startswith(str(parent / "rings"))
        assert list((parent / "rings").iterdir()) == []


def test_with_inline_no_ring_is_offered_or_allocated(
    start: Start, path: Path, scripted: DeviceScriptedDrafter, device: FakeRingDevice
) -> None:
    with scripted.serving(f"unix:{path}"):
        world = start(HandoffChoice.INLINE)
        world.until_up()
        assert world.drafter.inline is not None and world.transports[-1] == "inline"
    assert scripted.num_handshakes == 1 and device.allocated == [] and world.fallbacks == []


def other_gpu(scripted: DeviceScriptedDrafter, device: FakeRingDevice) -> None:
    scripted.gpu_uuid = b"?" * 16


def no_gpu(scripted: DeviceScriptedDrafter, device: FakeRingDevice) -> None:
    scripted.mapping = None


def taken(scripted: DeviceScriptedDrafter, device: FakeRingDevice) -> None:
    class Taken:
        def map(self, offer: RingOffer) -> MappedRing:
            raise RingRefused(RING_TAKEN)

    scripted.mapping = Taken()


def smaller(scripted: DeviceScriptedDrafter, device: FakeRingDevice) -> None:
    scripted.mapping = RingMapping(scripted, replace(LARGEST, num_rows=3))  # type: ignore[arg-type]


def no_memory(scripted: DeviceScriptedDrafter, device: FakeRingDevice) -> None:
    device.fails_with = RingUnavailable("no_memory")


CAUSES = pytest.mark.parametrize(
    ("cause", "reason", "field"),
    [
        (other_gpu, "other_gpu", "gpu_uuid"),
        (no_gpu, "no_device", "transport"),
        (taken, "taken", "target_instance_id"),
        (smaller, "refused", "ring"),
        (no_memory, "no_memory", "transport"),
    ],
)
Cause = Callable[[DeviceScriptedDrafter, FakeRingDevice], None]


@CAUSES
def test_auto_goes_on_by_messages_and_says_why(
    start: Start, path: Path, scripted: DeviceScriptedDrafter, device: FakeRingDevice,
    cause: Cause, reason: str, field: str, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    cause(scripted, device)
    with scripted.serving(f"unix:{path}"):
        world = start(HandoffChoice.AUTO)
        world.until_up()
        source = world.drafter.inline
        assert source is not None
        source.collect()
        assert source.captured_layer_ids == DRAFT.captured_layer_ids
        assert world.drafter.ring is not None
    assert world.fallbacks == [reason]
    assert [t for t in world.transports if t] == ["inline"]
    assert capfd.readouterr().out.count("handoff_falls_back_to_inline") == 1


@CAUSES
def test_device_does_not_go_on_and_names_the_field(
    start: Start, path: Path, scripted: DeviceScriptedDrafter, device: FakeRingDevice,
    cause: Cause, reason: str, field: str,
) -> None:  # fmt: skip
    cause(scripted, device)
    with scripted.serving(f"unix:{path}"):
        world = start(HandoffChoice.DEVICE)
        world.until(lambda: world.drafter.state is LinkState.MISMATCH)
        assert [mismatch.field for mismatch in world.drafter.mismatches] == [field]
        assert world.drafter.draft is None and world.drafter.inline is None
    assert world.fallbacks == [] and world.fields[-1] == [field]


def test_a_socket_that_the_drafter_cannot_see_is_named(
    start: Start, path: Path, parent: Path, scripted: DeviceScriptedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between hosts, or containers without a common directory."""
    assert scripted.mapping is not None
    map_ring = scripted.mapping.map
    monkeypatch.setattr(
        scripted.mapping, "map", lambda offer: map_ring(replace(offer, socket_path="/elsewhere/ring"))
    )
    with scripted.serving(f"unix:{path}"):
        world = start(HandoffChoice.AUTO)
        world.until_up()
        assert world.fallbacks == ["unreachable"]


def test_a_directory_that_does_not_exist_is_a_reason_of_the_targets(
    start: Start, path: Path, parent: Path, scripted: DeviceScriptedDrafter
) -> None:
    (parent / "rings").rmdir()
    with scripted.serving(f"unix:{path}"):
        world = start(HandoffChoice.AUTO)
        world.until_up()
        assert world.fallbacks == ["no_socket"]


def test_a_connection_that_comes_back_finds_its_ring_mapped(
    start: Start, path: Path, scripted: DeviceScriptedDrafter, device: FakeRingDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(limits, "PROBE_INTERVAL_S", 0.1)
    with scripted.serving(f"unix:{path}"):
        world = start(HandoffChoice.AUTO)
        world.until_up()
        ring = world.drafter.ring
    world.until(lambda: world.drafter.draft is None)
    with scripted.serving(f"unix:{path}"):
        world.until_up()
        assert world.drafter.ring is ring
    first, second = scripted.offers[0], scripted.offers[-1]
    assert first.ring_id == second.ring_id and first.flag_slot != second.flag_slot
    assert len(device.allocated) == 1


def test_another_drafter_at_the_second_handshake_is_asked_from_the_start(
    start: Start, path: Path, scripted: DeviceScriptedDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PROBE_INTERVAL_S", 0.1)
    scripted.second_instance_id = "drafter-2"
    with scripted.serving(f"unix:{path}"):
        world = start(HandoffChoice.AUTO)
        world.until(lambda: len(scripted.offers) > 1)
        assert world.drafter.state is not LinkState.UP
        scripted.second_instance_id = None
        world.until_up()
        assert world.transports[-1] == "device"


def test_a_drafter_that_dies_with_a_step_in_hand_is_let_go_of(
    start: Start, path: Path, scripted: DeviceScriptedDrafter
) -> None:
    scripted.alter = lambda request, reply: None
    with scripted.serving(f"unix:{path}"):
        world = start(HandoffChoice.AUTO)
        world.until_up()
        connection = world.drafter._connection
        assert connection is not None
        world.launch(PostedRow(1, 5, 9))
        world.drafter.await_drafts()
    world.until(lambda: world.drafter.draft is None)
    assert connection._flags.released[0] == 1  # type: ignore[attr-defined]
