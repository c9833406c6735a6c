"""When to stop asking the drafter, and when to look for it again. No grpc, no torch, no threads.

Its owner tells it what happened; it keeps the state and the time of the last probe.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from common import limits


class BreakerState(enum.Enum):
    """CLOSED asks each step; OPEN asks nothing and probes; HALF_OPEN asks, and one miss opens it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class _Event(enum.Enum):
    ANSWERED = "answered"
    MISSED_TOO_OFTEN = "missed too often"
    LOST = "lost"
    CONNECTED = "connected"


TRANSITIONS = {
    (BreakerState.CLOSED, _Event.ANSWERED): BreakerState.CLOSED,
    (BreakerState.CLOSED, _Event.MISSED_TOO_OFTEN): BreakerState.OPEN,
    (BreakerState.CLOSED, _Event.LOST): BreakerState.OPEN,
    (BreakerState.OPEN, _Event.CONNECTED): BreakerState.HALF_OPEN,
    (BreakerState.OPEN, _Event.LOST): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, _Event.ANSWERED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, _Event.MISSED_TOO_OFTEN): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, _Event.LOST): BreakerState.OPEN,
}


class Breaker:
    """Starts OPEN with a probe due at once: nothing is known of the drafter yet."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._state = BreakerState.OPEN
        self._num_missed = 0
        self._pause_s = limits.PROBE_INTERVAL_S
        self._next_probe_at = clock()

    @property
    def state(self) -> BreakerState:
        return self._state

    @property
    def probe_in_s(self) -> float:
        """Seconds until the next probe is due; 0 when it is."""
        return max(0.0, self._next_probe_at - self._clock())

    def probing(self) -> None:
        """A probe starts now."""
        self._next_probe_at = self._clock() + limits.PROBE_INTERVAL_S

    def connected(self) -> None:
        """The probe's handshake succeeded."""
        self._move(_Event.CONNECTED)

    def answered(self) -> None:
        """A reply came in time."""
        self._num_missed = 0
        self._pause_s = limits.PROBE_INTERVAL_S
        self._move(_Event.ANSWERED)

    def missed(self) -> None:
        """A reply did not come by its deadline."""
        self._num_missed += 1
        misses_max = 1 if self._state is BreakerState.HALF_OPEN else limits.BREAKER_MISSES_MAX
        if self._num_missed >= misses_max:
            # A drafter that still answers handshakes would otherwise cost another deadline at once.
            self._next_probe_at = self._clock() + limits.PROBE_INTERVAL_S
            self._move(_Event.MISSED_TOO_OFTEN)

    def lost(self) -> None:
        """The connection is gone or a probe failed."""
        self._move(_Event.LOST)

    def gave_up(self) -> None:
        """The device was kept waiting for a whole deadline. Each time in a row doubles the pause until the
        next probe, whose connection would cost another one."""
        self._next_probe_at = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, limits.GIVEN_UP_PAUSE_MAX_S)
        self._move(_Event.LOST)

    def _move(self, event: _Event) -> None:
        self._state = TRANSITIONS[self._state, event]
        if self._state is BreakerState.OPEN:
            self._num_missed = 0
