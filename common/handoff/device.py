"""The device transport: captured rows and drafts stay in the hand-off ring, messages carry control alone.

Packs a step into one message and checks replies, which nobody waits for. Knows the messages; knows no grpc
(a Pipe carries them), no CUDA (whoever posts writes the flags) and no beliefs about sessions.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from common.handoff.pipe import Pipe
from common.handoff.replies import Awaited, read_outcomes
from common.handoff.transport import DeviceStep, SessionReport
from common.pb.tandem.v1 import drafter_pb2 as pb

# A time that has passed, for a Pipe that is asked what it has.
_AT_ONCE = 0.0


@dataclass(frozen=True)
class _Awaited(Awaited):
    """Also the step's sequence; 0 for a message without one."""

    sequence: int


@dataclass(frozen=True)
class DeviceAnswer:
    """All of a step is done on the drafter's device; sequence is 0 when there was nothing to do there."""

    sequence: int
    reports: list[SessionReport]


class DeviceTransport:
    """Steps over a Pipe, once a connection. Used by one thread; never waits."""

    def __init__(self, pipe: Pipe, *, target_instance_id: str, drafter_instance_id: str) -> None:
        self._pipe = pipe
        self._target_instance_id = target_instance_id
        self._drafter_instance_id = drafter_instance_id
        self._next_step_id = 1
        self._awaited: deque[_Awaited] = deque()

    def post(self, step: DeviceStep) -> bool:
        """Hand a step over; False, and nothing was handed over, when the drafter is so far behind that the
        bounded queue to it is full. Raises PeerLost."""
        request = pack(step)
        request.step_id, request.target_instance_id = self._next_step_id, self._target_instance_id
        if not self._pipe.send([request]):
            return False
        sequence = step.sequence if request.HasField("device") else 0
        self._awaited.append(_Awaited(self._next_step_id, _sessions(step), sequence))
        self._next_step_id += 1
        return True

    def collect(self) -> list[DeviceAnswer]:
        """What has been answered since. Raises PeerLost, or PeerFault when a reply cannot be what was
        asked for."""
        answers = []
        while self._awaited and (reply := self._pipe.receive(_AT_ONCE)) is not None:
            awaited = self._awaited.popleft()
            reports = [
                SessionReport(*key, outcome, said.context_len)
                for key, outcome, said in read_outcomes(reply, awaited, self._drafter_instance_id)
            ]
            answers.append(DeviceAnswer(awaited.sequence, reports))
        return answers


def pack(step: DeviceStep) -> pb.DraftRequest:
    """The message of a step; the caller fills in ids. Without extends and rows it has no device step."""
    request = pb.DraftRequest()
    for close in step.closes:
        request.closes.add(session_id=close.session_id, epoch=close.epoch)
    for begin in step.opens:
        request.opens.add(
            session_id=begin.session_id, epoch=begin.epoch, start_position=begin.start_position
        )
    if not step.is_for_the_device:
        return request
    device = request.device
    device.sequence = step.sequence
    for extend in step.extends:
        device.extends.add(
            session_id=extend.session_id, epoch=extend.epoch, position=extend.position,
            row_start=extend.row_start, num_rows=extend.num_rows,
        )  # fmt: skip
    for row in step.rows:
        if row is None:
            device.rows.add()
        else:
            device.rows.add(
                session_id=row.session_id, epoch=row.epoch, position_min=row.position_min,
                position_max=row.position_max, begins=row.begins,
            )  # fmt: skip
    return request


def _sessions(step: DeviceStep) -> frozenset[tuple[int, int]]:
    opens = {(begin.session_id, begin.epoch) for begin in step.opens}
    extends = {(extend.session_id, extend.epoch) for extend in step.extends}
    return frozenset(opens | extends | {(row.session_id, row.epoch) for row in step.rows if row is not None})
