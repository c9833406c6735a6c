"""Messages of one stream that have arrived and are not begun: a bounded queue in front of the engine.

A full queue stops the reading, so gRPC's flow control holds the target back. Must not know what a message
asks for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from common import limits
from common.errors import TandemError
from common.pb.tandem.v1 import drafter_pb2


@dataclass(frozen=True)
class Arrival:
    """A message, and when it came."""

    request: drafter_pb2.DraftRequest
    arrived_s: float


class Arrivals:
    """What is read and not begun, and what the stream has to end with."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # None: nothing more arrives.
        self._queue: asyncio.Queue[Arrival | None] = asyncio.Queue(limits.DRAFT_QUEUE_MAX)
        self._fault: BaseException | None = None
        self.num_waiting = 0

    async def read(self, requests: AsyncIterator[drafter_pb2.DraftRequest]) -> None:
        """Queue what arrives, to the end of the stream."""
        try:
            async for request in requests:
                self.num_waiting += 1
                await self._queue.put(Arrival(request, self._clock()))
        except Exception as error:
            # Raised again by `next`, which is where the stream's caller looks.
            self._fault = error
        await self._queue.put(None)

    async def next(self) -> Arrival | None:
        """The oldest message; None after the last. Raises what reading raised, or what `end` was given."""
        arrival = await self._queue.get()
        self.check()
        self.num_waiting -= arrival is not None
        return arrival

    def end(self, error: TandemError) -> None:
        """Let the stream end with this error, whatever still waits."""
        self._fault = self._fault or error
        if self._queue.empty():
            self._queue.put_nowait(None)

    def check(self) -> None:
        """Raise what the stream has to end with, if anything."""
        if self._fault is not None:
            raise self._fault
