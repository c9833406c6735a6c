"""Draft messages between protobuf and the step. Parsed once, here; inside, the types are true.

Knows the messages; must not know streams, the session table or the model.
"""

from __future__ import annotations

import torch

from common import limits, wire
from common.errors import InvalidRequest, InvalidTensor
from common.handoff.transport import Block, Close, Extend, Open, Step
from common.pb.tandem.v1 import drafter_pb2
from services.drafter.step import StepReply


def decode_step(request: drafter_pb2.DraftRequest) -> Step:
    """All of a message but its tensor. InvalidRequest when it has more entries than a message may."""
    for field in ("closes", "opens", "extends", "drafts"):
        count = len(getattr(request, field))
        if count > limits.DRAFT_ENTRIES_MAX:
            raise InvalidRequest(field, limit=f"at most {limits.DRAFT_ENTRIES_MAX} entries", given=count)
    return Step(
        closes=[Close(m.session_id, m.epoch) for m in request.closes],
        opens=[Open(m.session_id, m.epoch, m.start_position) for m in request.opens],
        extends=_decode_extends(request),
        blocks=[Block(m.session_id, m.epoch, m.position, m.anchor) for m in request.drafts],
    )


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
