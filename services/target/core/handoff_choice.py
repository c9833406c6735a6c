"""How steps shall travel to the drafter, and why they may travel otherwise. No torch, no grpc."""

from __future__ import annotations

import enum

# Labels of handoff_fallbacks_total: why steps go inline although the device was asked for. The first three
# are the target's: no driver or no support in it, no memory, no directory for the socket. Then the
# drafter's: no device there, another GPU, taken by another target, the socket not reached, another refusal.
FALLBACKS = (
    "unsupported", "no_memory", "no_socket",
    "no_device", "other_gpu", "taken", "unreachable", "refused",
)  # fmt: skip


class HandoffChoice(enum.Enum):
    """What the operator wants. AUTO goes inline when the device cannot be had; DEVICE then does not draft."""

    AUTO = "auto"
    INLINE = "inline"
    DEVICE = "device"
