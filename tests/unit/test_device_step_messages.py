"""The drafter's reading of device steps: whatever a message says stays inside the ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import limits
from common.errors import InvalidRequest
from common.handoff.ring import RingShape
from common.handoff.transport import Close, DeviceRow, DeviceStep, Extend, Open
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.pb.tandem.v1 import tensor_pb2
from services.drafter.messages import SEQUENCE_MAX, decode_device_step, decode_step

RING = RingShape(3, 4, 3, 8, torch.float32, 16)
ROW = {"session_id": 7, "epoch": 2, "position_min": 5, "position_max": 9, "begins": True}
EXTEND = {"session_id": 8, "position": 40, "row_start": 10, "num_rows": 6}


def message(rows: list[dict[str, Any]] | None = None, **changes: Any) -> pb.DraftRequest:
    device = {
        "sequence": 4,
        "extends": [pb.DeviceExtend(**EXTEND)],
        "rows": [pb.DeviceRow(**row) for row in ([ROW, {}] if rows is None else rows)],
    }
    return pb.DraftRequest(device=pb.DeviceStep(**(device | changes)))


def test_a_device_step_is_read_as_it_was_written() -> None:
    request = message()
    request.closes.add(session_id=3, epoch=1)
    request.opens.add(session_id=8, start_position=40)
    assert decode_device_step(request, RING, 3) == DeviceStep(
        sequence=4,
        closes=[Close(3, 1)],
        opens=[Open(8, 0, 40)],
        extends=[Extend(8, 0, 40, 10, 16)],
        rows=[DeviceRow(7, 2, 5, 9, True), None],
    )


def test_a_message_without_a_device_step_is_for_the_ordinary_reader() -> None:
    request = pb.DraftRequest(closes=[pb.CloseSession(session_id=3)])
    assert decode_device_step(request, RING, 3) is None
    assert decode_step(request).closes == [Close(3, 0)]


def test_a_device_step_is_no_inline_message() -> None:
    with pytest.raises(InvalidRequest, match="device: must be absent"):
        decode_step(message())


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (message(sequence=3), "device.sequence"),
        (message(sequence=0), "device.sequence"),
        (message(sequence=SEQUENCE_MAX + 1), "device.sequence"),
        (message(rows=[{}] * 4), "device.rows"),
        (message(rows=[ROW, ROW]), "device.rows"),
        (message(rows=[{"epoch": 1}]), "device.rows"),
        (message(rows=[{"position_max": 1}]), "device.rows"),
        (message(rows=[{"begins": True}]), "device.rows"),
        (message(rows=[ROW | {"position_max": 4}]), "device.rows.position_min"),
        (message(rows=[ROW | {"position_max": limits.POSITION_MAX + 1}]), "device.rows.position_max"),
        (message(extends=[pb.DeviceExtend(**EXTEND | {"num_rows": 0})]), "device.extends.num_rows"),
        (message(extends=[pb.DeviceExtend(**EXTEND | {"num_rows": 17})]), "device.extends.num_rows"),
        (message(extends=[pb.DeviceExtend(**EXTEND | {"row_start": 11})]), "device.extends.row_start"),
        (message(extends=[pb.DeviceExtend(**EXTEND | {"position": 2**32 - 1})]), "device.extends.position"),
        (message(extends=[pb.DeviceExtend(**EXTEND)] * 1025), "device.extends"),
        (pb.DraftRequest(extends=[pb.ExtendSession()]), "extends"),
        (pb.DraftRequest(drafts=[pb.DraftBlock()]), "drafts"),
        (pb.DraftRequest(captured=tensor_pb2.Tensor()), "captured"),
    ],
)
def test_what_cannot_be_is_refused_by_name(request_: pb.DraftRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        decode_device_step(request_, RING, 3)
    assert error.value.field == field


numbers = st.integers(0, 2**32 - 1) | st.integers(0, 20)


@given(
    rows=st.lists(
        st.builds(
            pb.DeviceRow, session_id=st.integers(0, 3), epoch=numbers, position_min=numbers,
            position_max=numbers, begins=st.booleans(),
        ), max_size=4,
    ),
    extends=st.lists(
        st.builds(
            pb.DeviceExtend, session_id=numbers, epoch=numbers, position=numbers, row_start=numbers,
            num_rows=numbers,
        ), max_size=2,
    ),
)  # fmt: skip
def test_a_step_that_is_read_names_no_row_outside_the_ring(
    rows: list[pb.DeviceRow], extends: list[pb.DeviceExtend]
) -> None:
    device = pb.DeviceStep(sequence=9, rows=rows, extends=extends)
    try:
        step = decode_device_step(pb.DraftRequest(device=device), RING, 0)
    except InvalidRequest:
        return
    assert step is not None and len(step.rows) <= RING.num_rows
    for extend in step.extends:
        assert 0 <= extend.row_start < extend.row_stop <= RING.extend_rows_max
        assert extend.position + extend.num_rows <= limits.POSITION_MAX
    for row in step.rows:
        assert row is None or 0 <= row.position_min <= row.position_max <= limits.POSITION_MAX
