"""Lets a GPU stream go on that waits for a peer which is late or gone.

A thread with one armed deadline: when the peer does not hand over in time, or is known to be lost, it calls
the release function. Knows no CUDA; time, and whether the peer's turn has come, are asked of functions that
it is given.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

# Looks per deadline: the release comes this fraction late at most, and a step that is in time costs nothing.
LOOKS_PER_DEADLINE = 8


@dataclass
class _Armed:
    """A wait that is on the stream. The deadline starts when the peer's turn has come."""

    sequence: int
    is_due: Callable[[], bool]
    due_since: float | None = None


class Watchdog:
    """Watches the waits of one connection, of which only the last can be outstanding.

    Once it has let the stream go, it does so for every later wait at once, since the peer is given up.
    """

    def __init__(
        self,
        release: Callable[[int], None],
        deadline_s: float,
        on_missed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """release(sequence) must let the wait for that sequence end; it and on_missed (called once, after
        it, when a deadline passed) are called on the watchdog's thread or on that which trips it."""
        self._release = release
        self._deadline_s = deadline_s
        self._on_missed = on_missed
        self._clock = clock
        self._changed = threading.Condition()
        self._armed: _Armed | None = None
        self._has_tripped = False
        self._is_closed = False
        # Whether the thread waits without a time, for want of anything armed.
        self._sleeps = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    @property
    def has_tripped(self) -> bool:
        """Whether the peer is given up."""
        with self._changed:
            return self._has_tripped

    def arm(self, sequence: int, is_due: Callable[[], bool]) -> None:
        """A wait for `sequence` is on the stream. is_due() says, without waiting, whether the stream has
        come to it, so that the peer and nobody else keeps it waiting."""
        with self._changed:
            if self._has_tripped:
                self._release(sequence)
                return
            self._armed = _Armed(sequence, is_due)
            # Otherwise the thread looks by itself soon enough: waking it each step would cost the step.
            if self._sleeps:
                self._changed.notify()

    def disarm(self, sequence: int) -> None:
        """The wait for `sequence`, and all before it, are over."""
        with self._changed:
            if self._armed is not None and self._armed.sequence <= sequence:
                self._armed = None

    def trip(self) -> None:
        """The peer is lost: let go what waits, and whatever will. From any thread; again changes nothing."""
        with self._changed:
            self._trip()

    def close(self) -> None:
        """Let go what waits, and stop looking."""
        with self._changed:
            self._trip()
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(self._deadline_s)

    def look(self) -> bool:
        """Let go what is overdue; whether it did now. The thread calls this again and again."""
        with self._changed:
            armed = self._armed
            if armed is None or self._has_tripped:
                return False
            now = self._clock()
            if armed.due_since is None:
                armed.due_since = now if armed.is_due() else None
                return False
            if now - armed.due_since < self._deadline_s:
                return False
            self._trip()
        return True

    def _trip(self) -> None:
        """Under the lock, so that a wait armed meanwhile is not missed."""
        if self._has_tripped:
            return
        self._has_tripped = True
        armed, self._armed = self._armed, None
        if armed is not None:
            self._release(armed.sequence)

    def _run(self) -> None:
        pause_s = self._deadline_s / LOOKS_PER_DEADLINE
        while True:
            with self._changed:
                if self._is_closed or self._has_tripped:
                    return
                self._sleeps = self._armed is None
                self._changed.wait(None if self._sleeps else pause_s)
                self._sleeps = False
            if self.look():
                self._on_missed()
