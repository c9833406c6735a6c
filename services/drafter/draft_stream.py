"""One Draft stream: a bounded queue between what arrives and the engine, replies in order.

A full queue stops the reading, so gRPC's flow control holds the target back; meanwhile context is
appended without drafting, which keeps the wait short. Must not know sessions or tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from common import limits
from common.errors import TandemError
from common.pb.tandem.v1 import drafter_pb2
from services.drafter.desk import DrafterDesk
from services.drafter.engine_thread import EngineThread


@dataclass(frozen=True)
class _Arrival:
    request: drafter_pb2.DraftRequest
    arrived_s: float


class DraftStream:
    """Messages of one stream, in and out."""

    def __init__(
        self, desk: DrafterDesk, engine_thread: EngineThread, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._desk = desk
        self._engine_thread = engine_thread
        self._clock = clock
        # None: nothing more arrives.
        self._queue: asyncio.Queue[_Arrival | None] = asyncio.Queue(limits.DRAFT_QUEUE_MAX)
        self._num_waiting = 0
        self._fault: BaseException | None = None

    @property
    def num_waiting(self) -> int:
        """Messages that have arrived and are not being answered yet."""
        return self._num_waiting

    def end(self, error: TandemError) -> None:
        """End the stream with an error after the message that is being answered."""
        self._fault = self._fault or error
        if self._queue.empty():
            self._queue.put_nowait(None)

    async def replies(
        self, requests: AsyncIterator[drafter_pb2.DraftRequest]
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        """A response for each request, in order. Raises what reading raised, or what `end` was given."""
        reading = asyncio.create_task(self._read(requests))
        try:
            while (arrival := await self._queue.get()) is not None and self._fault is None:
                self._num_waiting -= 1
                yield await self._engine_thread.run(
                    self._desk.answer, arrival.request, arrival.arrived_s, self._newer_waits
                )
            if self._fault is not None:
                raise self._fault
        finally:
            reading.cancel()
            self._num_waiting = 0

    def _newer_waits(self) -> bool:
        return self._num_waiting > 0

    async def _read(self, requests: AsyncIterator[drafter_pb2.DraftRequest]) -> None:
        try:
            async for request in requests:
                self._num_waiting += 1
                await self._queue.put(_Arrival(request, self._clock()))
        except Exception as error:
            # Raised again by `replies`, which is where the stream's caller looks.
            self._fault = error
        await self._queue.put(None)
