"""Everything the drafter knows, behind plain calls: each method is one job for the engine's thread.

Joins messages, session table, step and metrics. Must not know streams or status codes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from common.contract import DraftContract, TargetContract
from common.errors import InvalidTensor
from common.handoff.transport import Outcome
from common.pb.tandem.v1 import drafter_pb2
from services.drafter.messages import decode_captured, decode_step, encode_reply
from services.drafter.metrics import DrafterMetrics
from services.drafter.session_table import SessionTable
from services.drafter.step import StepReply, StepRunner, refuse


@dataclass(frozen=True)
class DrafterFacts:
    """What does not change in the life of this process."""

    instance_id: str
    target: TargetContract
    draft: DraftContract
    dtype: torch.dtype
    num_sessions_max: int
    lease_s: float

    @property
    def captured_width(self) -> int:
        return len(self.draft.captured_layer_ids) * self.target.hidden_size


class DrafterDesk:
    """Answers messages and keeps house. All methods run on the engine's thread."""

    def __init__(
        self,
        facts: DrafterFacts,
        table: SessionTable,
        runner: StepRunner,
        metrics: DrafterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._facts = facts
        self._table = table
        self._runner = runner
        self._metrics = metrics
        self._clock = clock

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
        self._metrics.observe_table(
            self._table.num_sessions, self._table.usage, self._table.num_pages_unaccounted
        )
