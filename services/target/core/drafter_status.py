"""What is known of the connection to the drafter: its state, its stream, its breaker.

The core's thread and the link's thread both report here and both read it; one lock keeps the three
consistent. No grpc, no asyncio.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Protocol

from common.contract import Mismatch
from common.log import get_log
from services.target.core.breaker import Breaker, BreakerState
from services.target.core.drafter_stream import DrafterStream

log = get_log("drafter_link")


class LinkState(enum.Enum):
    """UP has a connection; MISMATCH reached a drafter that does not fit; DOWN is all else."""

    DOWN = "down"
    UP = "up"
    MISMATCH = "mismatch"


class LinkObserver(Protocol):
    """Told of changes, on either thread, under the lock: must be quick and not call back."""

    def observe_drafter(self, up: bool, breaker: str) -> None: ...

    def observe_mismatches(self, fields: list[str]) -> None:
        """The fields that differ; none when the contracts fit (again)."""

    def observe_transport(self, transport: str | None) -> None:
        """How steps travel from now on, `inline` or `device`; None while there is no connection."""


class DrafterStatus:
    """Invariant: there is a stream exactly while the state is UP, and the breaker is OPEN exactly
    while it is not."""

    def __init__(self, observer: LinkObserver, clock: Callable[[], float]) -> None:
        self._observer = observer
        self._lock = threading.Lock()
        self._breaker = Breaker(clock)
        self._state = LinkState.DOWN
        self._mismatches: list[Mismatch] = []
        self._stream: DrafterStream | None = None
        self._was_connected = False
        self._tell_state()
        observer.observe_transport(None)

    # --- for anyone --------------------------------------------------------------------------------

    @property
    def stream(self) -> DrafterStream | None:
        """The connection in use."""
        with self._lock:
            return self._stream

    @property
    def state(self) -> LinkState:
        with self._lock:
            return self._state

    @property
    def mismatches(self) -> list[Mismatch]:
        """What does not fit, while the state is MISMATCH."""
        with self._lock:
            return list(self._mismatches)

    @property
    def breaker_is_open(self) -> bool:
        """Whether a drafter that was there is not asked any more."""
        with self._lock:
            return self._was_connected and self._breaker.state is BreakerState.OPEN

    # --- the core's thread -------------------------------------------------------------------------

    def answered(self, stream: DrafterStream) -> None:
        """The drafter replied in time on this stream."""
        self._report(stream, self._breaker.answered, "answered")

    def missed(self, stream: DrafterStream) -> None:
        """The drafter did not reply in time on this stream."""
        self._report(stream, self._breaker.missed, "deadlines missed")

    def drop(self, stream: DrafterStream, why: str) -> None:
        """What comes on this stream cannot be trusted any more."""
        self._report(stream, self._breaker.lost, why)

    def give_up(self, stream: DrafterStream, why: str) -> None:
        """The drafter kept the device waiting for a whole deadline on this stream. From any thread."""
        self._report(stream, self._breaker.gave_up, why)

    def refuse(self, stream: DrafterStream, mismatches: list[Mismatch]) -> None:
        """What this drafter's contract asks cannot be had here. It is looked at again as rarely as one that
        was given up."""
        with self._lock:
            if self._stream is not stream:
                return
            self._breaker.gave_up()
            self._withdraw()
            self._state = LinkState.MISMATCH
            self._set_mismatches(mismatches)
            self._tell_state()
        differences = [str(mismatch) for mismatch in mismatches]
        state = LinkState.MISMATCH.value
        log.warning("drafter_unusable", state=state, reason="no room", mismatches=differences)

    def _report(self, stream: DrafterStream, to_breaker: Callable[[], None], why: str) -> None:
        with self._lock:
            # A report on a connection that is gone says nothing of the one that is there.
            if self._stream is not stream:
                return
            before = self._breaker.state
            to_breaker()
            if self._breaker.state is before:
                return
            if self._breaker.state is BreakerState.OPEN:
                self._withdraw()
            log.info("drafter_breaker", state=self._breaker.state.value, reason=why)
            self._tell_state()

    # --- the link's thread -------------------------------------------------------------------------

    def probe_in_s(self) -> float:
        """Seconds until the next probe is due; 0 when it is, and then the caller must probe."""
        with self._lock:
            wait_s = self._breaker.probe_in_s
            if wait_s == 0:
                self._breaker.probing()
            return wait_s

    def connected(self, stream: DrafterStream) -> None:
        """The handshake succeeded; this stream is used from now on."""
        with self._lock:
            self._breaker.connected()
            self._stream, self._state, self._was_connected = stream, LinkState.UP, True
            self._set_mismatches([])
            self._tell_state()
            self._observer.observe_transport(stream.agreement.transport)
        agreement = stream.agreement
        log.info(
            "drafter_connected",
            drafter_instance_id=agreement.drafter_instance_id,
            block_size=agreement.draft.block_size,
            transport=agreement.transport,
        )

    def ended(self, why: str, mismatches: list[Mismatch] | None = None) -> None:
        """A probe or a connection ended; with what does not fit, when that is why."""
        mismatches = mismatches or []
        state = LinkState.MISMATCH if mismatches else LinkState.DOWN
        with self._lock:
            before = (self._state, [m.field for m in self._mismatches])
            self._withdraw()
            self._state = state
            self._breaker.lost()
            self._set_mismatches(mismatches)
            self._tell_state()
        # The same again each second would be noise.
        if before != (state, [m.field for m in mismatches]):
            differences = [str(mismatch) for mismatch in mismatches]
            log.warning("drafter_unusable", state=state.value, reason=why, mismatches=differences)

    def closed(self) -> None:
        """The target stops; nothing is wrong with the drafter."""
        with self._lock:
            self._withdraw()
            self._breaker.lost()
            self._tell_state()

    # --- under the lock ----------------------------------------------------------------------------

    def _withdraw(self) -> None:
        if self._stream is not None:
            self._stream.shut()
            self._stream = None
            self._observer.observe_transport(None)
        self._state = LinkState.DOWN

    def _tell_state(self) -> None:
        self._observer.observe_drafter(self._state is LinkState.UP, self._breaker.state.value)

    def _set_mismatches(self, mismatches: list[Mismatch]) -> None:
        if [m.field for m in mismatches] != [m.field for m in self._mismatches]:
            self._observer.observe_mismatches([m.field for m in mismatches])
        self._mismatches = mismatches
