"""A target's connection through the hand-off ring: its flags, and the steps of it that are in flight.

Facts and two interfaces; no rules. Must not know streams, sessions or CUDA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from common.errors import TandemError
    from common.handoff.ring import Ring
    from services.drafter.device_runner import Launched


class Mark(Protocol):
    """A place in the engine's stream; torch.cuda.Event is one."""

    def query(self) -> bool:
        """Whether the device has come to it. Never waits; from any thread."""


class RingFlags(Protocol):
    """A connection's two words in the ring. The first two are for the engine's thread."""

    def await_ready(self, sequence: int) -> Mark:
        """Let later work of the engine's stream wait until the target's states of this sequence are there.
        The mark stands behind the wait."""

    def write_done(self, sequence: int) -> Mark:
        """After the earlier work of the engine's stream, tell the target so. The mark stands behind."""

    def release(self) -> None:
        """The target is lost: end the waits that are on the stream, and those that are just being put there.
        From any thread, at once; again does no harm."""


@dataclass(eq=False)
class DeviceLink:
    """One connection.

    The engine's thread changes last_sequence and in_flight (oldest first). The rest is the event loop's:
    end_stream ends the stream that has claimed the link, None before; step_began_s: since when (monotonic)
    the device is at the oldest step, None when it waits or is idle; is_lost is set once, after which nothing
    is launched.
    """

    target_instance_id: str
    ring: Ring
    flags: RingFlags
    last_sequence: int = 0
    in_flight: deque[Launched] = field(default_factory=deque)
    end_stream: Callable[[TandemError], None] | None = None
    step_began_s: float | None = None
    is_lost: bool = False
