"""What the target says at the handshake, and whether it can live with the answer.

Knows the messages and the contract; nothing of channels or streams.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common import limits
from common.contract import PROTOCOL_VERSION, DraftContract, Mismatch, TargetContract, mismatches, unfit
from common.handoff.ring_offer import RingOffer, encode_ring_offer
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.wire import decode_draft_contract, decode_target_contract, dtype_from_name, encode_target_contract
from services.target.core.ring_owner import OfferedRing

# The form of Mismatch's text, in which the drafter names what it refuses.
_VIOLATION = re.compile(r"(?P<field>\w+): ours (?P<ours>.*?), theirs (?P<theirs>.*?)(?:; |\n|$)")
_VIOLATIONS_MAX = 32


@dataclass(frozen=True)
class Agreement:
    """What holds for one connection to one life of a drafter."""

    drafter_instance_id: str
    draft: DraftContract
    num_sessions_max: int
    ring: OfferedRing | None = None
    """Where steps are handed over on the device; None: inline."""

    @property
    def transport(self) -> str:
        """`inline` or `device`."""
        return "inline" if self.ring is None else "device"


class ContractsDiffer(Exception):
    """The two sides cannot work together; `differences` is never empty."""

    def __init__(self, differences: list[Mismatch]) -> None:
        super().__init__("; ".join(map(str, differences)))
        self.differences = differences


def hello(
    target: TargetContract, instance_id: str, offer: RingOffer | None = None
) -> pb.HandshakeRequest:
    """The target's side: inline, or on the device with an offer."""
    return pb.HandshakeRequest(
        protocol_version=PROTOCOL_VERSION,
        target_instance_id=instance_id,
        target=encode_target_contract(target),
        transport=pb.TRANSPORT_INLINE if offer is None else pb.TRANSPORT_DEVICE,
        ring=None if offer is None else encode_ring_offer(offer),
    )


def agree(
    target: TargetContract, response: pb.HandshakeResponse, ring: OfferedRing | None = None
) -> Agreement:
    """Check the drafter's answer to the hello with that ring, whatever the drafter itself thinks of it.
    Raises ContractsDiffer."""
    draft = decode_draft_contract(response.draft)
    wrong = _facts_that_differ(response, pb.TRANSPORT_INLINE if ring is None else pb.TRANSPORT_DEVICE)
    wrong += mismatches(target, decode_target_contract(response.target))
    wrong += unfit(target, draft)
    row_bytes = len(draft.captured_layer_ids) * target.hidden_size * dtype_from_name(target.dtype).itemsize
    if row_bytes > limits.TENSOR_BYTES_MAX:
        limit = f"at most {limits.TENSOR_BYTES_MAX} bytes a captured row"
        wrong.append(Mismatch("captured_layer_ids", limit, row_bytes))
    if wrong:
        raise ContractsDiffer(wrong)
    return Agreement(response.drafter_instance_id, draft, response.num_sessions_max, ring)


def refusal(text: str) -> list[Mismatch]:
    """The fields that a drafter named when it refused; its `ours` is our `theirs`."""
    found = [
        Mismatch(m["field"], m["theirs"], m["ours"])
        for _, m in zip(range(_VIOLATIONS_MAX), _VIOLATION.finditer(text), strict=False)
    ]
    return found or [Mismatch("contract", "as configured", "refused without naming a field")]


def _facts_that_differ(response: pb.HandshakeResponse, transport: pb.Transport) -> list[Mismatch]:
    wrong = []
    if response.protocol_version != PROTOCOL_VERSION:
        wrong.append(Mismatch("protocol_version", PROTOCOL_VERSION, response.protocol_version))
    if response.transport != transport:
        wrong.append(Mismatch("transport", transport, response.transport))
    num_chars = len(response.drafter_instance_id)
    if not 1 <= num_chars <= limits.INSTANCE_ID_CHARS_MAX:
        limit = f"1 to {limits.INSTANCE_ID_CHARS_MAX} characters"
        wrong.append(Mismatch("drafter_instance_id", limit, f"{num_chars} characters"))
    return wrong
