"""The core: a thread that runs the step loop, and the in-memory channel by which the front talks to it.

All methods may be called from any thread. No grpc, no torch: the step loop brings what it needs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from common import limits
from common.errors import Overloaded, Unavailable
from common.log import get_log
from services.target.core.report import CoreStats
from services.target.core.request import Event, Request, TokensCommitted
from services.target.core.request_loop import RequestLoop
from services.target.core.roster import Roster

log = get_log("core")

# How long an idle core sleeps before it looks at drafter and stop flag again.
_IDLE_WAIT_S = 0.05


class Closable(Protocol):
    """The drafter as the core sees it: its loop talks to it, and the core ends it."""

    def close(self) -> None: ...


class Core:
    """Runs requests. `submit` and `abort` never block; events leave through each request's `emit`."""

    def __init__(
        self, roster: Roster, loop: RequestLoop, drafter: Closable, *,
        num_known_max: int, on_failure: Callable[[], None], prepare: Callable[[], None],
    ) -> None:  # fmt: skip
        """num_known_max bounds waiting and running requests together. On the core's thread, prepare is
        called once before the first step, and on_failure once when the step loop died and every request
        was failed."""
        self._roster = roster
        self._loop = loop
        self._drafter = drafter
        self._num_known_max = num_known_max
        self._on_failure = on_failure
        self._prepare = prepare
        self._inbox: queue.Queue[Request | str] = queue.Queue(maxsize=limits.CORE_INBOX_MAX)
        self._lock = threading.Lock()
        self._known: dict[str, Request] = {}
        self._refusal: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="core", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Admit a request, or raise Overloaded or Unavailable and keep nothing of it."""
        inner = request.emit

        def emit(event: Event) -> None:
            if not isinstance(event, TokensCommitted):
                with self._lock:
                    self._known.pop(request.request_id, None)
            inner(event)

        with self._lock:
            if self._refusal is not None:
                raise Unavailable(self._refusal)
            if len(self._known) >= self._num_known_max:
                raise Overloaded(
                    "requests waiting and running", limit=self._num_known_max, given=len(self._known)
                )
            assert request.request_id not in self._known, "the front refuses duplicate ids"
            request.emit = emit
            self._put(request)
            self._known[request.request_id] = request

    def abort(self, request_id: str) -> None:
        """Ask for a request's early end; it then emits its terminal event. Unknown ids are ignored;
        Overloaded when too many commands wait."""
        with self._lock:
            if request_id not in self._known:
                return
            # Under the lock: it must not come to the inbox behind a later request of the same id.
            self._put(request_id)

    def is_known(self, request_id: str) -> bool:
        """Whether the request waits or runs."""
        with self._lock:
            return request_id in self._known

    @property
    def idle(self) -> bool:
        """Nothing waits or runs."""
        with self._lock:
            return not self._known

    def stats(self) -> CoreStats:
        """As of the last step, or later; never older than the last event that a caller has seen."""
        return self._loop.stats()

    def drain(self) -> None:
        """Refuse new requests from now on; those known go on."""
        with self._lock:
            self._refusal = self._refusal or "service is draining"

    def stop(self) -> None:
        """Fail what is left and join the thread; TimeoutError when its step hangs."""
        self.drain()
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(limits.CORE_STOP_DEADLINE_S)
        if self._thread.is_alive():
            raise TimeoutError("the core hangs in a step")

    def _put(self, command: Request | str) -> None:
        try:
            self._inbox.put_nowait(command)
        except queue.Full:
            raise Overloaded("core inbox", limit=limits.CORE_INBOX_MAX, given=self._inbox.qsize()) from None

    def _run(self) -> None:
        try:
            self._prepare()
            while not self._stopping.is_set():
                self._take_commands()
                # An idle step hands ended sessions over and lets the drafter's link settle.
                self._loop.step()
            self._end("service stopped before the request was done", "unavailable")
        except Exception:
            # A bug or a device error: nothing that the batch held can be trusted any more.
            log.exception("core_failed")
            with self._lock:
                self._refusal = "service failed"
            self._end("service failed", "internal")
            self._on_failure()
        finally:
            self._drafter.close()

    def _take_commands(self) -> None:
        """Apply all commands; wait a moment for one when there is nothing else to do."""
        try:
            self._apply(self._inbox.get(timeout=0 if self._loop.has_work else _IDLE_WAIT_S))
            while True:
                self._apply(self._inbox.get_nowait())
        except queue.Empty:
            return

    def _apply(self, command: Request | str) -> None:
        if isinstance(command, Request):
            self._roster.add(command)
        else:
            self._loop.abort(command)

    def _end(self, text: str, reason: str) -> None:
        error = Unavailable(text)
        self._loop.fail_all(error, reason)
        # Nothing new comes any more. What is still known waits in the inbox, or was lost between two
        # lines of a step that raised.
        with self._lock:
            left = list(self._known.values())
        for request in left:
            self._loop.fail(request, error, reason)
