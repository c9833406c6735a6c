"""How target and drafter come to terms: contracts first, then the transport.

The first handshake is inline and tells what the draft asks for; a second one offers the ring. Knows the
stub's Handshake and its status codes; nothing of streams.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import grpc

from common import limits
from common.contract import DraftContract, Mismatch, TargetContract
from common.handoff.transport import PeerFault
from common.log import get_log
from services.target.core.drafter_handshake import Agreement, ContractsDiffer, agree, hello, refusal
from services.target.core.handoff_choice import HandoffChoice
from services.target.core.ring_owner import Offering, RingUnavailable

log = get_log("drafter_negotiation")

# The reason for the field that a drafter names first.
_BY_FIELD = {
    "transport": "no_device", "gpu_uuid": "other_gpu", "target_instance_id": "taken",
    "socket_path": "unreachable",
}  # fmt: skip


class RingOffers(Protocol):
    """Offers a ring; see RingOwner."""

    def offering(self, draft: DraftContract) -> AbstractAsyncContextManager[Offering]: ...


class _DeviceRefused(Exception):
    """The device cannot be had, for a reason of FALLBACKS."""

    def __init__(self, reason: str, differences: list[Mismatch]) -> None:
        super().__init__(reason)
        self.reason, self.differences = reason, differences


class Negotiation:
    """Comes to terms with one drafter after the other."""

    def __init__(
        self,
        target: TargetContract,
        instance_id: str,
        choice: HandoffChoice = HandoffChoice.INLINE,
        rings: RingOffers | None = None,
        on_fallback: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """rings: needed unless the choice is INLINE. on_fallback hears the reason each time that AUTO goes
        inline."""
        assert rings is not None or choice is HandoffChoice.INLINE
        self._target = target
        self._instance_id = instance_id
        self._choice = choice
        self._rings = rings
        self._on_fallback = on_fallback

    async def agree(self, stub: Any) -> Agreement:
        """Shake hands. Raises ContractsDiffer, AioRpcError, or PeerFault when two answers contradict."""
        response = await stub.Handshake(
            hello(self._target, self._instance_id), timeout=limits.HANDSHAKE_DEADLINE_S
        )
        inline = agree(self._target, response)
        if self._choice is HandoffChoice.INLINE or self._rings is None:
            return inline
        try:
            return await self._agree_on_device(stub, self._rings, inline)
        except _DeviceRefused as refused:
            if self._choice is HandoffChoice.DEVICE:
                raise ContractsDiffer(refused.differences) from refused
            differences = [str(difference) for difference in refused.differences]
            log.warning("handoff_falls_back_to_inline", reason=refused.reason, mismatches=differences)
            self._on_fallback(refused.reason)
            return inline

    async def _agree_on_device(self, stub: Any, rings: RingOffers, inline: Agreement) -> Agreement:
        try:
            async with rings.offering(inline.draft) as offering:
                response = await stub.Handshake(
                    hello(self._target, self._instance_id, offering.offer),
                    timeout=limits.DEVICE_HANDSHAKE_DEADLINE_S,
                )
        except RingUnavailable as error:
            difference = Mismatch("transport", f"device, but {error.reason}", "not asked")
            raise _DeviceRefused(error.reason, [difference]) from error
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                # Also when no answer came in time: a drafter that is busy with the ring has it ready when
                # the next probe asks, and could not draft inline meanwhile.
                raise
            differences = refusal(error.details() or "")
            reason = _BY_FIELD.get(differences[0].field, "refused")
            raise _DeviceRefused(reason, differences) from error
        agreement = agree(self._target, response, offering.offered)
        if (agreement.drafter_instance_id, agreement.draft) != (inline.drafter_instance_id, inline.draft):
            raise PeerFault("another drafter answered the second handshake")
        return agreement
