"""The drafter maps what it is offered, once, or says by field why not."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from common.contract import DraftContract, TargetContract
from common.handoff.flags import FlagMemory, FlagPair
from common.handoff.ring import RingShape
from common.handoff.ring_offer import RingOffer
from services.drafter.ring_mapping import MappedRing, RingMapping, RingRefused
from services.target.core.ring_owner import Offering, RingOwner
from tests.fakes_handoff import GPU_UUID, FakeRingDevice, map_memfd

TARGET = TargetContract(
    hidden_size=16, num_layers=6, vocab_rows=100, dtype="float32", weights_fingerprint="w"
)
DRAFT = DraftContract(
    captured_layer_ids=(1, 3), block_size=4, num_draft_tokens=3, mask_token_id=99, context_len_max=4096,
    weights_fingerprint="d",
)  # fmt: skip
LARGEST = RingShape(8, 4, 3, 32, torch.float32, 64)


class FakeMappingDevice:
    """A MappingDevice over memfds; flags are the pair of words."""

    gpu_uuid = GPU_UUID

    def __init__(self) -> None:
        self.num_imports = 0

    def import_memory(self, descriptor: int, num_bytes: int) -> torch.Tensor:
        self.num_imports += 1
        return map_memfd(descriptor, num_bytes)

    def register(self, flags: FlagMemory) -> None: ...

    def flags(self, pair: FlagPair) -> FlagPair:
        return pair


@pytest.fixture
def socket_parent() -> Iterator[Path]:
    # Not in pytest's folders: a socket's path is short, theirs are not.
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@pytest.fixture
def on() -> FakeRingDevice:
    return FakeRingDevice()


@pytest.fixture
def owner(on: FakeRingDevice, socket_parent: Path) -> RingOwner:
    return RingOwner(on, TARGET, num_rows=4, extend_rows_max=16, socket_parent=socket_parent)


@pytest.fixture
def device() -> FakeMappingDevice:
    return FakeMappingDevice()


@pytest.fixture
def mapping(device: FakeMappingDevice) -> RingMapping:
    return RingMapping(device, LARGEST)  # type: ignore[arg-type]


@pytest.fixture
async def offering(owner: RingOwner) -> AsyncIterator[Offering]:
    async with owner.offering(DRAFT) as offering:
        yield offering


async def map_in_thread(mapping: RingMapping, offer: RingOffer) -> MappedRing:
    return await asyncio.to_thread(mapping.map, offer)


async def test_both_sides_see_one_ring(offering: Offering, mapping: RingMapping) -> None:
    mapped = await map_in_thread(mapping, offering.offer)
    ours, theirs = offering.offered.ring, mapped.ring
    states = torch.randn(ours.verify_captured.shape)
    ours.verify_captured.copy_(states)
    theirs.drafts.copy_(torch.arange(12, dtype=torch.int32).view(4, 3))
    assert torch.equal(theirs.verify_captured, states)
    assert ours.drafts.flatten().tolist() == list(range(12))


async def test_the_flags_are_those_of_the_connection(
    owner: RingOwner, on: FakeRingDevice, mapping: RingMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours: list[FlagPair] = []
    monkeypatch.setattr(on, "flags", ours.append)
    theirs = []
    for _ in range(3):
        async with owner.offering(DRAFT) as offering:
            theirs.append((await map_in_thread(mapping, offering.offer)).flags)
    for i, pair in enumerate(ours):
        pair.ready.store(10 + i)
        theirs[i].done.store(20 + i)
    assert [pair.ready.load() for pair in theirs] == [10, 11, 12]
    assert [pair.done.load() for pair in ours] == [20, 21, 22]


async def test_a_pair_that_is_used_again_starts_at_0(
    owner: RingOwner, on: FakeRingDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs: list[FlagPair] = []
    monkeypatch.setattr(on, "flags", pairs.append)
    for _ in range(64):
        async with owner.offering(DRAFT):
            pass
    pairs[0].done.store(99)
    async with owner.offering(DRAFT):
        assert (pairs[64].ready.load(), pairs[64].done.load()) == (0, 0)
    assert pairs[64] == pairs[0]


async def test_a_ring_that_is_mapped_is_not_mapped_again(
    owner: RingOwner, mapping: RingMapping, device: FakeMappingDevice, on: FakeRingDevice
) -> None:
    async with owner.offering(DRAFT) as first:
        before = await map_in_thread(mapping, first.offer)
    async with owner.offering(DRAFT) as second:
        after = await map_in_thread(mapping, second.offer)
    assert after.ring is before.ring
    assert after.flags != before.flags
    assert (device.num_imports, len(on.allocated)) == (1, 1)
    assert second.offered.ring is first.offered.ring
    assert second.offer.token != first.offer.token


async def test_after_unmap_it_is_mapped_anew(
    owner: RingOwner, mapping: RingMapping, device: FakeMappingDevice
) -> None:
    for _ in range(2):
        async with owner.offering(DRAFT) as offering:
            await map_in_thread(mapping, offering.offer)
        mapping.unmap()
    assert device.num_imports == 2


async def test_a_draft_of_another_shape_gets_another_ring(owner: RingOwner, on: FakeRingDevice) -> None:
    async with owner.offering(DRAFT) as first:
        pass
    wider = dataclasses.replace(DRAFT, captured_layer_ids=(1, 2, 3))
    async with owner.offering(wider) as second:
        pass
    assert second.offer.ring_id != first.offer.ring_id
    assert second.offered.ring.shape.captured_width == 48
    assert len(on.allocated) == 2


async def test_a_target_captures_in_the_ring_that_it_offered_also_when_nobody_maps_it(
    owner: RingOwner,
) -> None:
    alone = owner.ring_for(DRAFT)
    assert owner.ring_for(DRAFT) is alone
    async with owner.offering(DRAFT) as offering:
        pass
    assert owner.ring_for(DRAFT) is offering.offered.ring


async def test_connections_take_turns_with_the_flags(owner: RingOwner) -> None:
    slots = []
    for _ in range(66):
        async with owner.offering(DRAFT) as offering:
            slots.append(offering.offer.flag_slot)
    assert slots == [*range(64), 0, 1]


async def test_no_descriptor_is_left_open(owner: RingOwner, mapping: RingMapping) -> None:
    async with owner.offering(DRAFT) as offering:
        await map_in_thread(mapping, offering.offer)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        async with owner.offering(DRAFT) as offering:
            mapping.unmap()
            await map_in_thread(mapping, offering.offer)
    # mmap keeps a duplicate of its own for the mapping that is there.
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"gpu_uuid": b"?" * 16}, "gpu_uuid"),
        ({"shape": dataclasses.replace(LARGEST, num_rows=9)}, "ring"),
        ({"shape": dataclasses.replace(LARGEST, extend_rows_max=65)}, "ring"),
        ({"shape": dataclasses.replace(LARGEST, block_size=5)}, "ring"),
        ({"shape": dataclasses.replace(LARGEST, captured_width=48)}, "ring"),
        ({"shape": dataclasses.replace(LARGEST, dtype=torch.bfloat16)}, "ring"),
        ({"token": b"?" * 32}, "socket_path"),
        ({"socket_path": "/nowhere/ring"}, "socket_path"),
        ({"num_bytes": 1 << 30}, "ring"),
    ],
)
async def test_what_cannot_be_mapped_is_refused_by_field(
    offering: Offering, mapping: RingMapping, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(RingRefused) as error:
        await map_in_thread(mapping, dataclasses.replace(offering.offer, **changes))
    assert error.value.mismatch.field == field
    assert offering.offer.socket_path not in str(error.value)


async def test_a_refused_offer_leaves_the_ring_of_before(
    owner: RingOwner, mapping: RingMapping, device: FakeMappingDevice
) -> None:
    async with owner.offering(DRAFT) as offering:
        mapped = await map_in_thread(mapping, offering.offer)
        with pytest.raises(RingRefused):
            await map_in_thread(mapping, dataclasses.replace(offering.offer, gpu_uuid=b"?" * 16))
        assert (await map_in_thread(mapping, offering.offer)).ring is mapped.ring
    assert device.num_imports == 1
