"""The drafter's gRPC face: handshake, draft streams, closing sessions. Status codes are chosen here.

Must not know tensors or the rules of sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc

from common import limits, wire
from common.contract import PROTOCOL_VERSION, Mismatch, mismatches
from common.errors import InvalidRequest, Unavailable
from common.handoff.ring_offer import RingOffer, decode_ring_offer
from common.log import get_log
from common.pb.tandem.v1 import drafter_pb2, drafter_pb2_grpc
from services.drafter.desk import DrafterDesk, DrafterFacts
from services.drafter.device_links import DeviceLinks
from services.drafter.device_stream import DeviceStream
from services.drafter.draft_stream import DraftStream
from services.drafter.engine_thread import EngineThread
from services.drafter.instances import TargetInstances
from services.drafter.ring_mapping import RingRefused

log = get_log("servicer")

SERVICE = drafter_pb2.DESCRIPTOR.services_by_name["DrafterService"]

# How often a drain looks whether the last session has gone.
DRAIN_POLL_S = 0.05


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Answers tandem.v1.DrafterService. Lives on the event loop."""

    def __init__(
        self, facts: DrafterFacts, desk: DrafterDesk, engine_thread: EngineThread, links: DeviceLinks
    ) -> None:
        self._facts = facts
        self._desk = desk
        self._engine_thread = engine_thread
        self._links = links
        self._instances = TargetInstances()
        self._streams: set[DraftStream | DeviceStream] = set()

    async def Handshake(
        self, request: drafter_pb2.HandshakeRequest, context: Any
    ) -> drafter_pb2.HandshakeResponse:
        """Compare contracts; a target that fits is known from here on. With TRANSPORT_DEVICE its ring is
        mapped, and graphs over it captured, before the answer."""
        _check_instance_id(request.target_instance_id)
        wrong = self._unmet(request)
        if wrong:
            await _refuse(request, wrong, context)
        offer = await _read_offer(request, context)
        living = self._instances.admit(request.target_instance_id)
        await self._links.forget_the_dead(self._instances.__contains__)
        num_dropped = await self._engine_thread.run(self._desk.drop_other_instances, living)
        if offer is not None:
            await self._attach(request, offer, context)
        else:
            self._links.drop_unclaimed(request.target_instance_id)
        log.info(
            "handshake",
            target=request.target_instance_id,
            transport=_transport_name(request.transport),
            num_sessions_dropped=num_dropped,
        )
        return drafter_pb2.HandshakeResponse(
            protocol_version=PROTOCOL_VERSION,
            drafter_instance_id=self._facts.instance_id,
            target=wire.encode_target_contract(self._facts.target),
            draft=wire.encode_draft_contract(self._facts.draft),
            transport=request.transport,
            num_sessions_max=self._facts.num_sessions_max,
            lease_s=self._facts.lease_s,
        )

    async def Draft(
        self, requests: AsyncIterator[drafter_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        """One stream, from its first message to its end. Its sessions outlive it when it was inline, until
        their lease ends: the target may come back."""
        arriving = aiter(requests)
        first = await anext(arriving, None)
        if first is None:
            return
        instance_id = first.target_instance_id
        if instance_id not in self._instances:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                "target_instance_id: must be of a target that shook hands with this drafter",
            )
        stream = self._open_stream(instance_id)
        self._instances.stream_began(instance_id)
        self._streams.add(stream)
        try:
            async for response in stream.replies(_of_instance(instance_id, first, arriving)):
                yield response
        finally:
            self._streams.discard(stream)
            self._instances.stream_ended(instance_id)

    async def CloseSessions(
        self, request: drafter_pb2.CloseSessionsRequest, context: Any
    ) -> drafter_pb2.CloseSessionsResponse:
        """Close sessions of a target; whatever is not open is ignored."""
        _check_instance_id(request.target_instance_id)
        if len(request.session_ids) > limits.DRAFT_ENTRIES_MAX:
            raise InvalidRequest(
                "session_ids", limit=f"at most {limits.DRAFT_ENTRIES_MAX}", given=len(request.session_ids)
            )
        num_closed = await self._engine_thread.run(
            self._desk.close_sessions, request.target_instance_id, list(request.session_ids)
        )
        return drafter_pb2.CloseSessionsResponse(num_closed=num_closed)

    @property
    def queue_depth(self) -> int:
        """Messages of all streams that wait."""
        return sum(stream.num_waiting for stream in self._streams)

    async def drain(self) -> None:
        """Refuse new sessions; return when no connected target holds one any more."""
        await self._engine_thread.run(self._desk.refuse_opens)
        while await self._engine_thread.run(self._desk.num_sessions_of, self._instances.streaming):
            await asyncio.sleep(DRAIN_POLL_S)

    def end_streams(self) -> None:
        """End all streams; their targets go on without drafts."""
        for stream in self._streams:
            stream.end(Unavailable("the drafter stops"))

    def _open_stream(self, instance_id: str) -> DraftStream | DeviceStream:
        link = self._links.unclaimed(instance_id)
        if link is None:
            return DraftStream(self._desk, self._engine_thread)
        return DeviceStream(self._desk, self._engine_thread, self._links, link)

    def _unmet(self, request: drafter_pb2.HandshakeRequest) -> list[Mismatch]:
        if request.protocol_version != PROTOCOL_VERSION:
            # What other versions mean by the other fields is not known here.
            return [Mismatch("protocol_version", PROTOCOL_VERSION, request.protocol_version)]
        wrong = mismatches(self._facts.target, wire.decode_target_contract(request.target))
        ours = ["TRANSPORT_INLINE"] if self._facts.ring is None else ["TRANSPORT_INLINE", "TRANSPORT_DEVICE"]
        theirs = _transport_name(request.transport)
        if theirs not in ours:
            wrong.append(Mismatch("transport", " or ".join(ours), theirs))
        return wrong

    async def _attach(self, request: drafter_pb2.HandshakeRequest, offer: RingOffer, context: Any) -> None:
        try:
            await self._links.attach(request.target_instance_id, offer)
        except RingRefused as refused:
            await _refuse(request, [refused.mismatch], context)


async def _refuse(request: drafter_pb2.HandshakeRequest, wrong: list[Mismatch], context: Any) -> NoReturn:
    """End a handshake with every field that does not fit."""
    log.warning("handshake_refused", target=request.target_instance_id, fields=[m.field for m in wrong])
    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "; ".join(str(m) for m in wrong))
    raise AssertionError("abort raises")


async def _read_offer(request: drafter_pb2.HandshakeRequest, context: Any) -> RingOffer | None:
    """The offer of a handshake that asks for the device; None for another one."""
    if request.transport != drafter_pb2.TRANSPORT_DEVICE:
        return None
    try:
        return decode_ring_offer(request.ring)
    except InvalidRequest as error:
        wrong = Mismatch("ring", f"{error.field} {error.limit}", error.given)
        await _refuse(request, [wrong], context)


async def _of_instance(
    instance_id: str, first: drafter_pb2.DraftRequest, rest: AsyncIterator[drafter_pb2.DraftRequest]
) -> AsyncIterator[drafter_pb2.DraftRequest]:
    """All requests of a stream; InvalidRequest at one of another target."""
    yield first
    async for request in rest:
        if request.target_instance_id != instance_id:
            raise InvalidRequest(
                "target_instance_id", limit="the same in every message of a stream", given="another one"
            )
        yield request


def _check_instance_id(instance_id: str) -> None:
    if not 1 <= len(instance_id) <= limits.INSTANCE_ID_CHARS_MAX:
        raise InvalidRequest(
            "target_instance_id",
            limit=f"1 to {limits.INSTANCE_ID_CHARS_MAX} characters",
            given=len(instance_id),
        )


def _transport_name(number: int) -> str:
    known = drafter_pb2.Transport.DESCRIPTOR.values_by_number.get(number)
    return known.name if known else f"number {number}"
