"""One Draft stream with inline messages: answered one after another, in order.

While newer messages wait, context is appended without drafting, which keeps the wait short. Must not know
sessions or tensors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from common.errors import TandemError
from common.pb.tandem.v1 import drafter_pb2
from services.drafter.arrivals import Arrivals
from services.drafter.desk import DrafterDesk
from services.drafter.engine_thread import EngineThread


class DraftStream:
    """Messages of one stream, in and out."""

    def __init__(self, desk: DrafterDesk, engine_thread: EngineThread) -> None:
        self._desk = desk
        self._engine_thread = engine_thread
        self._arrivals = Arrivals()

    @property
    def num_waiting(self) -> int:
        """Messages that have arrived and are not being answered yet."""
        return self._arrivals.num_waiting

    def end(self, error: TandemError) -> None:
        """End the stream with an error after the message that is being answered."""
        self._arrivals.end(error)

    async def replies(
        self, requests: AsyncIterator[drafter_pb2.DraftRequest]
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        """A response for each request, in order. Raises what reading raised, or what `end` was given."""
        reading = asyncio.create_task(self._arrivals.read(requests))
        try:
            while (arrival := await self._arrivals.next()) is not None:
                yield await self._engine_thread.run(
                    self._desk.answer, arrival.request, arrival.arrived_s, self._newer_waits
                )
        finally:
            reading.cancel()
            self._arrivals.num_waiting = 0

    def _newer_waits(self) -> bool:
        return self._arrivals.num_waiting > 0
