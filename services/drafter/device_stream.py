"""One Draft stream with TRANSPORT_DEVICE: the next message is launched while earlier ones are in flight.

Two things go on side by side: launching what arrives, and answering in the same order what the device has
done. Both are bounded. A stream that ends, however it does, loses its link. Must not know sessions or
tensors.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

from common.errors import TandemError
from common.pb.tandem.v1 import drafter_pb2
from services.drafter.arrivals import Arrivals
from services.drafter.desk import DrafterDesk, InFlight
from services.drafter.device_link import DeviceLink
from services.drafter.device_links import DeviceLinks
from services.drafter.engine_thread import EngineThread
from services.drafter.launch_control import LAUNCHES_IN_FLIGHT_MAX

# How often the device is asked whether it is done. No draft waits for a reply, so a millisecond late is in
# time; the event loop's clock has no finer ticks anyway.
_POLL_S = 0.001


class DeviceStream:
    """Messages of one stream, in and out."""

    def __init__(
        self,
        desk: DrafterDesk,
        engine_thread: EngineThread,
        links: DeviceLinks,
        link: DeviceLink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Claims the link, which nobody else has, and loses it to `links` at the end."""
        self._desk = desk
        self._engine_thread = engine_thread
        self._links = links
        self._link = link
        self._clock = clock
        self._arrivals = Arrivals(clock)
        self._launched: asyncio.Queue[InFlight | None] = asyncio.Queue()
        # A launch keeps its place until its reply is on the way: so a target that reads no replies is held
        # back, too.
        self._places = asyncio.Semaphore(LAUNCHES_IN_FLIGHT_MAX)
        link.end_stream = self.end

    @property
    def num_waiting(self) -> int:
        """Messages that have arrived and are not launched yet."""
        return self._arrivals.num_waiting

    def end(self, error: TandemError) -> None:
        """End the stream with an error, also while a step is in flight."""
        self._arrivals.end(error)

    async def replies(
        self, requests: AsyncIterator[drafter_pb2.DraftRequest]
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        """A response for each request, in order. Raises what reading or a launch raised, or what `end` was
        given."""
        reading = asyncio.create_task(self._arrivals.read(requests))
        launching = asyncio.create_task(self._launch_all())
        # Whoever ends the stream earlier than its launches did is not interested in how they ended.
        launching.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            while (oldest := await self._launched.get()) is not None:
                await self._until_done(oldest)
                yield await self._engine_thread.run(self._desk.finish, oldest)
                self._places.release()
            await launching
        finally:
            reading.cancel()
            launching.cancel()
            self._arrivals.num_waiting = 0
            self._link.step_began_s = None
            self._links.lose(self._link)

    async def _launch_all(self) -> None:
        try:
            while (arrival := await self._arrivals.next()) is not None:
                await self._places.acquire()
                self._launched.put_nowait(
                    await self._engine_thread.run(
                        self._desk.launch, self._link, arrival.request, arrival.arrived_s
                    )
                )
        finally:
            self._launched.put_nowait(None)

    async def _until_done(self, oldest: InFlight) -> None:
        """Wait, without the engine's thread, until the device has done the oldest step in flight.

        A step whose turn has come is timed, for a device that hangs; one that waits for the target's states
        is not: the target may take its time.
        """
        self._link.step_began_s = None
        while not oldest.is_done:
            self._arrivals.check()
            if self._link.step_began_s is None and oldest.has_begun:
                self._link.step_began_s = self._clock()
            await asyncio.sleep(_POLL_S)
        self._link.step_began_s = None
