"""Lets a GPU stream go on that waits for a peer which is late or gone.

A thread with the waits that are on the stream, of which the stream can only be at the oldest: when the peer
does not end that in time, or is known to be lost, the thread calls the release function, and again until the
stream is past all of them: a peer that was only late may still write its own, lower value over the release.
Knows no CUDA; time, and how far the stream has come, are asked of functions that it is given.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# Looks per deadline. The release comes up to two looks early, so that the stream never waits longer than the
# deadline; a step that is in time costs nothing.
LOOKS_PER_DEADLINE = 16
# How soon a release that was written over is made again; less than a step.
RELEASE_PAUSE_S = 0.002


@dataclass
class _Wait:
    """A wait that is on the stream. The deadline starts when the peer's turn has come."""

    sequence: int
    is_due: Callable[[], bool]
    has_passed: Callable[[], bool]
    due_since: float | None = None


class Watchdog:
    """Watches the waits of one connection. A release of the last is a release of all before it.

    Once it has let the stream go, the peer is given up and nothing waits for it any more.
    """

    def __init__(
        self,
        release: Callable[[int], None],
        deadline_s: float,
        on_missed: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """release(sequence) must let the wait for that sequence end, if the stream is or comes there now.
        on_missed is called once, after the release, when a deadline passed; on the watchdog's thread."""
        self._release = release
        self._deadline_s = deadline_s
        self._look_s = deadline_s / LOOKS_PER_DEADLINE
        self._on_missed = on_missed
        self._clock = clock
        self._changed = threading.Condition()
        self._waits: deque[_Wait] = deque()
        self._has_tripped = False
        # Whether the thread sleeps without a time, for want of anything to watch.
        self._sleeps = False
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look. The thread ends when the peer is given up and the stream past its last wait."""
        self._thread.start()

    @property
    def has_tripped(self) -> bool:
        """Whether the peer is given up."""
        with self._changed:
            return self._has_tripped

    def watch(
        self, sequence: int, is_due: Callable[[], bool], enqueue_wait: Callable[[], Callable[[], bool]]
    ) -> None:
        """Put a wait for `sequence` on the stream, and watch it; or not, when the peer is given up.

        enqueue_wait() returns what says whether the stream is past the wait. is_due() says whether the
        stream has come to it, so that the peer and nobody else keeps it waiting. Neither waits.
        """
        with self._changed:
            if self._has_tripped:
                return
            self._waits.append(_Wait(sequence, is_due, enqueue_wait()))
            # Otherwise the thread looks by itself soon enough: waking it each step would cost the step.
            if self._sleeps:
                self._changed.notify()

    def disarm(self, sequence: int) -> None:
        """The wait for `sequence`, and all before it, are over."""
        with self._changed:
            while self._waits and self._waits[0].sequence <= sequence:
                self._waits.popleft()

    def trip(self) -> None:
        """The peer is lost: let go what waits. From any thread; again changes nothing. Does not wait."""
        with self._changed:
            self._trip()

    def look(self) -> bool:
        """Let go what is overdue; whether it did now. The thread calls this again and again."""
        with self._changed:
            while self._waits and self._waits[0].has_passed():
                self._waits.popleft()
            if not self._waits:
                return False
            if self._has_tripped:
                self._release(self._waits[-1].sequence)
                return False
            oldest, now = self._waits[0], self._clock()
            if oldest.due_since is None:
                # Perhaps since right after the look before this one.
                oldest.due_since = now - self._look_s if oldest.is_due() else None
                return False
            if now + self._look_s - oldest.due_since < self._deadline_s:
                # The next look is in time.
                return False
            self._trip()
        return True

    def _trip(self) -> None:
        if self._has_tripped:
            return
        self._has_tripped = True
        if self._waits:
            self._release(self._waits[-1].sequence)
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._has_tripped and not self._waits:
                    return
                self._sleeps = not self._waits
                self._changed.wait(self._pause_s)
                self._sleeps = False
            if self.look():
                self._on_missed()

    @property
    def _pause_s(self) -> float | None:
        if self._has_tripped:
            return RELEASE_PAUSE_S
        return self._look_s if self._waits else None
