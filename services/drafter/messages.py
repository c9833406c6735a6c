"""Draft messages between protobuf and the step. Parsed once, here; inside, the types are true.

Knows the messages; must not know streams, the session table or the model.
"""

from __future__ import annotations

import torch

from common import limits, wire
from common.errors import InvalidRequest, InvalidTensor
from common.handoff.ring import RingShape
from common.handoff.transport import Block, Close, DeviceRow, DeviceStep, Extend, Open, Step
from common.pb.tandem.v1 import drafter_pb2
from services.drafter.step import StepReply

# A stream that counts a thousand steps a second reaches it in a hundred million years.
SEQUENCE_MAX = 2**63 - 1


def decode_step(request: drafter_pb2.DraftRequest) -> Step:
    """All of an inline message but its tensor. InvalidRequest when it has more entries than a message may,
    or is a device step."""
    _check_counts(request, ("closes", "opens", "extends", "drafts"))
    if request.HasField("device"):
        raise InvalidRequest("device", limit="absent on a stream without TRANSPORT_DEVICE", given="present")
    return Step(
        closes=_decode_closes(request),
        opens=_decode_opens(request),
        extends=_decode_extends(request),
        blocks=[Block(m.session_id, m.epoch, m.position, m.anchor) for m in request.drafts],
    )


def decode_device_step(
    request: drafter_pb2.DraftRequest, ring: RingShape, last_sequence: int
) -> DeviceStep | None:
    """All of a message on a stream with TRANSPORT_DEVICE; None when it holds closes and opens alone, which
    `decode_step` reads then.

    Every number is bounded: rows lie in the ring, positions are at most POSITION_MAX, the sequence is higher
    than last_sequence (0 at first), no session has two rows. InvalidRequest names what is not so.
    """
    for field in ("extends", "drafts"):
        if getattr(request, field):
            raise InvalidRequest(field, limit="absent on a stream with TRANSPORT_DEVICE", given="present")
    if request.HasField("captured"):
        raise InvalidRequest("captured", limit="absent on a stream with TRANSPORT_DEVICE", given="present")
    if not request.HasField("device"):
        return None
    _check_counts(request, ("closes", "opens"))
    device = request.device
    _check_counts(device, ("extends",), "device.")
    if len(device.rows) > ring.num_rows:
        raise InvalidRequest("device.rows", limit=f"at most {ring.num_rows}", given=len(device.rows))
    if not last_sequence < device.sequence <= SEQUENCE_MAX:
        raise InvalidRequest(
            "device.sequence", limit=f"{last_sequence + 1} to {SEQUENCE_MAX}", given=device.sequence
        )
    rows = [_decode_row(row) for row in device.rows]
    session_ids = [row.session_id for row in rows if row is not None]
    if len(set(session_ids)) < len(session_ids):
        raise InvalidRequest("device.rows", limit="one for each session", given="more")
    return DeviceStep(
        sequence=device.sequence,
        closes=_decode_closes(request),
        opens=_decode_opens(request),
        extends=[_decode_device_extend(extend, ring) for extend in device.extends],
        rows=rows,
    )


def _decode_device_extend(m: drafter_pb2.DeviceExtend, ring: RingShape) -> Extend:
    limits.check_range("device.extends.num_rows", m.num_rows, 1, ring.extend_rows_max)
    limits.check_range("device.extends.row_start", m.row_start, 0, ring.extend_rows_max - m.num_rows)
    limits.check_range("device.extends.position", m.position, 0, limits.POSITION_MAX - m.num_rows)
    return Extend(m.session_id, m.epoch, m.position, m.row_start, m.row_start + m.num_rows)


def _decode_row(m: drafter_pb2.DeviceRow) -> DeviceRow | None:
    if m.session_id == 0:
        if m.epoch or m.position_min or m.position_max or m.begins:
            raise InvalidRequest("device.rows", limit="all 0 where no session is named", given="more")
        return None
    limits.check_range("device.rows.position_max", m.position_max, 0, limits.POSITION_MAX)
    limits.check_range("device.rows.position_min", m.position_min, 0, m.position_max)
    return DeviceRow(m.session_id, m.epoch, m.position_min, m.position_max, m.begins)


def _check_counts(
    message: drafter_pb2.DraftRequest | drafter_pb2.DeviceStep, fields: tuple[str, ...], prefix: str = ""
) -> None:
    for field in fields:
        count = len(getattr(message, field))
        if count > limits.DRAFT_ENTRIES_MAX:
            limit = f"at most {limits.DRAFT_ENTRIES_MAX} entries"
            raise InvalidRequest(prefix + field, limit=limit, given=count)


def _decode_closes(request: drafter_pb2.DraftRequest) -> list[Close]:
    return [Close(m.session_id, m.epoch) for m in request.closes]


def _decode_opens(request: drafter_pb2.DraftRequest) -> list[Open]:
    return [Open(m.session_id, m.epoch, m.start_position) for m in request.opens]


def _decode_extends(request: drafter_pb2.DraftRequest) -> list[Extend]:
    """On the wire an extend has a number of rows; which ones follows from the order."""
    extends, row = [], 0
    for m in request.extends:
        extends.append(Extend(m.session_id, m.epoch, m.position, row, row + m.num_rows))
        row += m.num_rows
    return extends


def decode_captured(request: drafter_pb2.DraftRequest, dtype: torch.dtype, width: int) -> torch.Tensor | None:
    """The captured rows `[sum of num_rows, width]`, or None when nothing is extended.

    InvalidTensor when type, width, byte count or the number of rows is not what was agreed.
    """
    num_rows = sum(extend.num_rows for extend in request.extends)
    if num_rows == 0:
        if request.HasField("captured"):
            raise InvalidTensor("captured", limit="absent when no extend has rows", given="present")
        return None
    return wire.decode_tensor(request.captured, "captured", dtype, (num_rows, width))


def encode_reply(
    request: drafter_pb2.DraftRequest, reply: StepReply, drafter_instance_id: str, queue_s: float
) -> drafter_pb2.DraftResponse:
    """The response to a request, with this process's own times in it."""
    response = drafter_pb2.DraftResponse(
        step_id=request.step_id,
        drafter_instance_id=drafter_instance_id,
        queue_s=queue_s,
        ingest_s=reply.ingest_s,
        draft_s=reply.draft_s,
    )
    for verdict in reply.verdicts:
        response.outcomes.add(
            session_id=verdict.session_id,
            epoch=verdict.epoch,
            outcome=drafter_pb2.Outcome.ValueType(verdict.outcome),
            context_len=verdict.context_len,
            draft_row=verdict.draft_row,
        )
    if reply.drafts is not None:
        response.drafts.CopyFrom(wire.encode_tensor(reply.drafts))
    return response
