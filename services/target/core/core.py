"""The core: a thread that runs the step loop, and the verbs by which a front talks to it.

All methods may be called from any thread. No grpc, no torch: the step loop brings what it needs.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Protocol

from common import limits
from common.errors import InvalidRequest, Overloaded, Unavailable
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
        announce: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """num_known_max bounds waiting and running requests together. On the core's thread, prepare is
        called once before the first step, announce after each step, when its events have been emitted,
        and on_failure once when the step loop died and every request was failed."""
        self._roster = roster
        self._loop = loop
        self._drafter = drafter
        self._num_known_max = num_known_max
        self._on_failure = on_failure
        self._prepare = prepare
        self._announce = announce
        self._inbox: queue.Queue[Request] = queue.Queue(maxsize=limits.CORE_INBOX_MAX)
        self._to_abort: set[Request] = set()
        self._lock = threading.Lock()
        self._known: dict[str, Request] = {}
        self._refusal: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="core", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Admit a request, or raise InvalidRequest (its id is in use), Overloaded or Unavailable and keep
        nothing of it."""
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
            if request.request_id in self._known:
                raise InvalidRequest(
                    "request_id", limit="unique among running requests", given=request.request_id
                )
            request.emit = emit
            self._put(request)
            self._known[request.request_id] = request

    def abort(self, request: Request) -> None:
        """Ask for an admitted request's early end; it then emits its terminal event. One that has ended
        is ignored."""
        with self._lock:
            if self._known.get(request.request_id) is request:
                self._to_abort.add(request)

    async def abort_named(self, request_id: str) -> bool:
        """The same by id; whether such a request waits or runs. Awaitable, as a front in another process
        has to ask."""
        with self._lock:
            request = self._known.get(request_id)
            if request is not None:
                self._to_abort.add(request)
            return request is not None

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

    def _put(self, request: Request) -> None:
        try:
            self._inbox.put_nowait(request)
        except queue.Full:
            raise Overloaded("core inbox", limit=limits.CORE_INBOX_MAX, given=self._inbox.qsize()) from None

    def _run(self) -> None:
        try:
            self._prepare()
            while not self._stopping.is_set():
                self._take_commands()
                # An idle step hands ended sessions over and lets the drafter's link settle.
                self._loop.step()
                self._announce()
            self._end("service stopped before the request was done", "unavailable")
        except Exception:
            # A bug or a device error: nothing that the batch held can be trusted any more.
            log.exception("core_failed")
            with self._lock:
                self._refusal = "service failed"
            try:
                self._end("service failed", "internal")
            finally:
                self._on_failure()
        finally:
            self._drafter.close()

    def _take_commands(self) -> None:
        """Apply all commands; wait a moment for one when there is nothing else to do."""
        with contextlib.suppress(queue.Empty):
            self._roster.add(self._inbox.get(timeout=0 if self._loop.has_work else _IDLE_WAIT_S))
        with self._lock:
            # Before the rest of the inbox: whoever is to be aborted came into it earlier.
            to_abort, self._to_abort = self._to_abort, set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._roster.add(self._inbox.get_nowait())
        for request in to_abort:
            with self._lock:
                # It may have ended since, and its id be another's.
                known = self._known.get(request.request_id) is request
            if known:
                self._loop.abort(request.request_id)

    def _end(self, text: str, reason: str) -> None:
        error = Unavailable(text)
        self._loop.fail_all(error, reason)
        # Nothing new comes any more. What is still known waits in the inbox, or was lost between two
        # lines of a step that raised.
        with self._lock:
            left = list(self._known.values())
        for request in left:
            self._loop.fail(request, error, reason)
        self._announce()
