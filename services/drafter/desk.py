"""Everything the drafter knows, behind plain calls: each method is one job for the engine's thread.

Joins messages, session table, step and metrics. Must not know streams or status codes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from common.contract import DraftContract, TargetContract
from common.errors import InvalidTensor, Unavailable
from common.handoff.ring import RingShape
from common.handoff.transport import Outcome
from common.pb.tandem.v1 import drafter_pb2
from services.drafter.device_link import DeviceLink
from services.drafter.device_runner import DeviceRunner, Launched
from services.drafter.messages import decode_captured, decode_device_step, decode_step, encode_reply
from services.drafter.metrics import DrafterMetrics
from services.drafter.session_table import SessionTable
from services.drafter.step import StepReply, StepRunner, refuse


@dataclass(frozen=True)
class DrafterFacts:
    """What does not change in the life of this process. ring: the largest hand-off ring that the engine can
    work over; None where it works over none."""

    instance_id: str
    target: TargetContract
    draft: DraftContract
    dtype: torch.dtype
    num_sessions_max: int
    lease_s: float
    ring: RingShape | None = None

    @property
    def captured_width(self) -> int:
        return len(self.draft.captured_layer_ids) * self.target.hidden_size


@dataclass(frozen=True)
class InFlight:
    """A message of a device stream that was begun. launched: its step; None when it had none, and `reply` is
    there already."""

    request: drafter_pb2.DraftRequest
    link: DeviceLink
    arrived_s: float
    queue_s: float
    launched: Launched | None
    reply: StepReply | None

    @property
    def is_done(self) -> bool:
        """Whether the device has done it. So is the next: any thread, never waits."""
        return self.launched is None or self.launched.done.query()

    @property
    def has_begun(self) -> bool:
        """Whether the device has come to it."""
        return self.launched is None or self.launched.began.query()


class DrafterDesk:
    """Answers messages and keeps house. All methods run on the engine's thread."""

    def __init__(
        self,
        facts: DrafterFacts,
        table: SessionTable,
        runner: StepRunner,
        metrics: DrafterMetrics,
        device_runner: DeviceRunner | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """device_runner: None where there is no hand-off ring; then nobody has a DeviceLink."""
        self._facts = facts
        self._table = table
        self._runner = runner
        self._metrics = metrics
        self._device_runner = device_runner
        self._clock = clock

    # --- inline messages -----------------------------------------------------------------------------

    def answer(
        self, request: drafter_pb2.DraftRequest, arrived_s: float, newer_waits: Callable[[], bool]
    ) -> drafter_pb2.DraftResponse:
        """The response to one message. InvalidRequest when it cannot be a message of ours at all.

        When a newer message of the same stream waits, nobody waits for this one's blocks any more.
        """
        began_s = self._clock()
        reply = self._run(request, with_blocks=not newer_waits())
        queue_s = began_s - arrived_s
        response = encode_reply(request, reply, self._facts.instance_id, queue_s)
        self._metrics.observe_step(reply, queue_s, self._clock() - arrived_s)
        self._observe_table()
        return response

    # --- device messages -----------------------------------------------------------------------------

    def attach(self, link: DeviceLink) -> bool:
        """Work over this link's ring from now on. False when the device has no memory for that."""
        is_attached = self._over_rings.attach(link)
        self._observe_table()
        return is_attached

    def launch(self, link: DeviceLink, request: drafter_pb2.DraftRequest, arrived_s: float) -> InFlight:
        """Begin a message. InvalidRequest when it cannot be a message of ours at all."""
        queue_s = self._clock() - arrived_s
        step = decode_device_step(request, link.ring.shape, link.last_sequence)
        if step is not None:
            launched = self._over_rings.launch(link, step)
            return InFlight(request, link, arrived_s, queue_s, launched, None)
        reply = self._runner.run(request.target_instance_id, decode_step(request), None)
        return InFlight(request, link, arrived_s, queue_s, None, reply)

    def finish(self, oldest: InFlight) -> drafter_pb2.DraftResponse:
        """The response to the oldest message in flight, which is done. Unavailable when its link is lost."""
        if oldest.link.is_lost:
            raise Unavailable("the connection is lost")
        reply = oldest.reply or self._over_rings.finish(oldest.link)
        response = encode_reply(oldest.request, reply, self._facts.instance_id, oldest.queue_s)
        self._metrics.observe_step(reply, oldest.queue_s, self._clock() - oldest.arrived_s)
        self._observe_table()
        return response

    def is_idle(self, link: DeviceLink) -> bool:
        """Whether the device has done all that was launched for a link."""
        return self._over_rings.is_idle(link)

    def end_link(self, link: DeviceLink) -> None:
        """End the sessions of a link that is lost and idle."""
        self._over_rings.end(link)
        self._observe_table()

    def detach(self) -> None:
        """Let go of the ring that was attached last."""
        self._over_rings.detach()

    # --- sessions ------------------------------------------------------------------------------------

    def drop_other_instances(self, living: Collection[str]) -> int:
        """End the sessions of target lives that are over; how many there were."""
        return self._observed(self._table.drop_other_instances(living))

    def close_sessions(self, target_instance_id: str, session_ids: Collection[int]) -> int:
        """End sessions of a target, or all of them when none is named; how many were open."""
        return self._observed(self._table.close_instance(target_instance_id, session_ids))

    def keep_house(self) -> int:
        """End sessions whose lease is over; how many there were."""
        return self._observed(self._table.expire())

    def refuse_opens(self) -> None:
        """From now on no session begins."""
        self._table.refuse_opens()

    def num_sessions_of(self, target_instance_ids: Collection[str]) -> int:
        """Sessions that these target lives hold."""
        return self._table.num_sessions_of(target_instance_ids)

    # --- leaves --------------------------------------------------------------------------------------

    @property
    def _over_rings(self) -> DeviceRunner:
        assert self._device_runner is not None, "nobody has a link where there is no ring"
        return self._device_runner

    def _run(self, request: drafter_pb2.DraftRequest, with_blocks: bool) -> StepReply:
        step = decode_step(request)
        try:
            captured = decode_captured(request, self._facts.dtype, self._facts.captured_width)
        except InvalidTensor:
            return refuse(step, Outcome.INVALID_TENSOR)
        return self._runner.run(request.target_instance_id, step, captured, with_blocks=with_blocks)

    def _observed(self, count: int) -> int:
        self._observe_table()
        return count

    def _observe_table(self) -> None:
        table = self._table
        self._metrics.observe_table(
            table.num_sessions, table.usage, table.num_pages_unaccounted, table.num_lanes_unaccounted
        )
