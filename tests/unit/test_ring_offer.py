"""An offer of the ring survives the wire, and nothing in it is believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from common import limits
from common.errors import InvalidRequest
from common.handoff.ring import RingShape
from common.handoff.ring_offer import RingOffer, decode_ring_offer, encode_ring_offer
from common.pb.tandem.v1 import drafter_pb2 as pb

SHAPE = RingShape(4, 4, 3, 96, torch.bfloat16, 32)

def offer(**changes: Any) -> RingOffer:
    return RingOffer(
        **{
            "socket_path": "/run/tandem/x/ring", "token": b"t" * 32, "ring_id": b"r" * 16,
            "gpu_uuid": b"g" * 16, "num_bytes": 2 << 20, "shape": SHAPE, "flag_slot": 63,
            **changes,
        }
    )  # fmt: skip


def test_an_offer_survives_the_wire() -> None:
    sent = pb.RingOffer.FromString(encode_ring_offer(offer()).SerializeToString())
    assert decode_ring_offer(sent) == offer()


def test_an_offers_text_does_not_tell_its_token() -> None:
    assert "ttt" not in repr(offer())


def set_field(name: str, value: Any) -> Callable[[pb.RingOffer], None]:
    return lambda message: setattr(message, name, value)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (set_field("socket_path", ""), "socket_path"),
        (set_field("socket_path", "run/ring"), "socket_path"),
        (set_field("socket_path", "/run\0/ring"), "socket_path"),
        (set_field("socket_path", "/" + "é" * 60), "socket_path bytes"),
        (set_field("token", b"t" * 31), "token"),
        (set_field("ring_id", b""), "ring_id"),
        (set_field("gpu_uuid", b"g" * 17), "gpu_uuid"),
        (set_field("num_bytes", SHAPE.num_bytes - 1), "num_bytes"),
        (set_field("num_bytes", limits.RING_BYTES_MAX + 1), "num_bytes"),
        (set_field("num_bytes", 2**64 - 1), "num_bytes"),
        (set_field("num_rows", 0), "num_rows"),
        (set_field("num_rows", 2**32 - 1), "num_rows"),
        (set_field("block_size", 2**32 - 1), "block_size"),
        (set_field("num_draft_tokens", 4), "num_draft_tokens"),
        (set_field("captured_width", 2**32 - 1), "captured_width"),
        (set_field("dtype", 0), "ring dtype"),
        (set_field("dtype", 4), "dtype"),
        (set_field("dtype", 77), "ring dtype"),
        (set_field("extend_rows_max", 0), "extend_rows_max"),
        (set_field("flag_slot", 64), "flag_slot"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: Callable[[pb.RingOffer], None], field: str) -> None:
    message = encode_ring_offer(offer())
    change(message)
    with pytest.raises(InvalidRequest) as error:
        decode_ring_offer(message)
    assert error.value.field == field
