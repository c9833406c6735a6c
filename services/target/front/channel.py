"""One request's events on their way from the core to its stream on the event loop.

Deltas coalesce while the reader is behind, and what waits is bounded: a reader too slow for that
loses its own request and disturbs no other. Knows threads and asyncio; no grpc, no protobuf.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from common import limits
from common.errors import Overloaded
from services.target.core.request import Event, RequestFailed, TokensCommitted


class EventChannel:
    """`emit` on any thread, usually the core's; `receive` on the event loop that made the channel.

    on_overflow is called once, on the event loop, when more than `backlog_tokens_max` tokens wait; the
    reader then receives RequestFailed(Overloaded) and nothing else.
    """

    def __init__(
        self, on_overflow: Callable[[], None], backlog_tokens_max: int = limits.STREAM_BACKLOG_TOKENS_MAX
    ) -> None:
        self._on_overflow = on_overflow
        self._backlog_tokens_max = backlog_tokens_max
        self._loop = asyncio.get_running_loop()
        self._ready = asyncio.Event()
        self._lock = threading.Lock()
        self._token_ids: list[int] = []
        self._from_draft: list[bool] = []
        self._terminal: Event | None = None
        self._wake_posted = False

    @property
    def has_ended(self) -> bool:
        """Whether the terminal event is in, read or not: the core holds the request no more, or has
        been asked to drop it."""
        with self._lock:
            return self._terminal is not None

    def emit(self, event: Event) -> None:
        """Take an event in. Never blocks; after the terminal event nothing changes any more."""
        with self._lock:
            if self._terminal is not None:
                return
            overflowed = self._append(event)
            # One wake-up carries everything that arrives before the loop gets to it.
            wake = not self._wake_posted
            self._wake_posted = True
        if overflowed:
            self._loop.call_soon_threadsafe(self._on_overflow)
        if wake:
            self._loop.call_soon_threadsafe(self._wake)

    async def receive(self) -> Event:
        """All tokens that wait as one event, or else the terminal event. Not called again after that."""
        while True:
            self._ready.clear()
            event = self._take()
            if event is not None:
                return event
            await self._ready.wait()

    def _append(self, event: Event) -> bool:
        """Whether this was too much."""
        if not isinstance(event, TokensCommitted):
            self._terminal = event
            return False
        self._token_ids += event.token_ids
        self._from_draft += event.from_draft
        num_waiting = len(self._token_ids)
        if num_waiting <= self._backlog_tokens_max:
            return False
        self._token_ids, self._from_draft = [], []
        self._terminal = RequestFailed(
            Overloaded("tokens not yet read", limit=self._backlog_tokens_max, given=num_waiting)
        )
        return True

    def _take(self) -> Event | None:
        with self._lock:
            if self._token_ids:
                event = TokensCommitted(self._token_ids, self._from_draft)
                self._token_ids, self._from_draft = [], []
                return event
            return self._terminal

    def _wake(self) -> None:
        with self._lock:
            self._wake_posted = False
        self._ready.set()
