"""Which target's ring the engine works over, from the handshake to the end of its stream: one at a time.

Lives on the event loop. A link that is lost is never waited for on the device's side: its waits are released
first, then what was launched is let run out, then its sessions end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from common import limits
from common.contract import Mismatch
from common.errors import Unavailable
from common.log import get_log
from services.drafter.desk import DrafterDesk
from services.drafter.device_link import DeviceLink
from services.drafter.engine_thread import EngineThread
from services.drafter.ring_mapping import MappedRing, RingRefused

if TYPE_CHECKING:
    from common.handoff.ring_offer import RingOffer

log = get_log("device_links")

# How often a lost link's work is looked at, and its waits are released again: a target that still lives may
# write its own, lower value over a release.
_RUN_OUT_POLL_S = 0.01
# One target at a time works over a ring; another may go on by messages.
RING_TAKEN = Mismatch("target_instance_id", "the target that streams", "another one")
RING_TOO_LARGE = Mismatch("ring", "graphs that fit the GPU", "one whose graphs do not")


class RingSource(Protocol):
    """What links need of ring_mapping.RingMapping, which says how. One thread at a time."""

    def map(self, offer: RingOffer) -> MappedRing: ...

    def unmap(self) -> None: ...


class DeviceLinks:
    """The present link, and the lost ones whose work still runs out."""

    def __init__(
        self,
        desk: DrafterDesk,
        engine_thread: EngineThread,
        mapping: RingSource | None,
        on_failure: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """mapping: None where the engine works over no ring, and nobody attaches one. on_failure is called
        when lost work does not run out: the device hangs."""
        self._desk = desk
        self._engine_thread = engine_thread
        self._mapping = mapping
        self._on_failure = on_failure
        self._clock = clock
        self._link: DeviceLink | None = None
        self._ring_of: str | None = None
        self._changes: set[asyncio.Task[None]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    async def attach(self, target_instance_id: str, offer: RingOffer) -> None:
        """Map a target's ring and let the engine work over it, for the next stream of that target. Sessions
        that the target holds end. Takes seconds when graphs have to be captured over a ring that is new.

        An earlier link of the same target ends, with its stream. Raises RingRefused, also while a stream of
        another target has the engine, or when the GPU has no memory for the graphs.
        """
        await self._to_its_end(self._attach(target_instance_id, offer))

    async def _attach(self, target_instance_id: str, offer: RingOffer) -> None:
        assert self._mapping is not None, "an offer is refused where there is no ring"
        async with self._turn:
            held = self._link
            if held is not None:
                if held.end_stream is not None:
                    if held.target_instance_id != target_instance_id:
                        raise RingRefused(RING_TAKEN)
                    held.end_stream(Unavailable("a newer connection of this target has taken over"))
                self.lose(held)
            await self._all_run_out()
            self._ring_of = target_instance_id
            # Mapping waits for all of the device's work, so nothing of it may wait for a target.
            mapped = await asyncio.to_thread(self._mapping.map, offer)
            link = DeviceLink(target_instance_id, mapped.ring, mapped.flags)
            if not await self._engine_thread.run(self._desk.attach, link):
                self._mapping.unmap()
                self._ring_of = None
                raise RingRefused(RING_TOO_LARGE)
            self._link = link

    def unclaimed(self, target_instance_id: str) -> DeviceLink | None:
        """The link for a stream of this target that begins now; None when there is none, or another stream
        has it."""
        link = self._link
        if link is None or link.target_instance_id != target_instance_id or link.end_stream is not None:
            return None
        return link

    def drop_unclaimed(self, target_instance_id: str) -> None:
        """The target has shaken hands for messages alone: its next stream is none of the device."""
        link = self.unclaimed(target_instance_id)
        if link is not None:
            self.lose(link)

    def lose(self, link: DeviceLink) -> None:
        """The link is over. Returns at once; again changes nothing."""
        if link.is_lost:
            return
        link.is_lost = True
        if self._link is link:
            self._link = None
        ending = asyncio.create_task(self._run_out(link))
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def forget_the_dead(self, is_living: Callable[[str], bool]) -> None:
        """Let go of the ring of a target life that is over: its memory would stay mapped."""
        if self._ring_of is None or is_living(self._ring_of):
            return
        await self._to_its_end(self._forget_the_dead(is_living))

    async def _forget_the_dead(self, is_living: Callable[[str], bool]) -> None:
        async with self._turn:
            # Whoever had the turn may have attached the ring of another.
            if self._ring_of is None or is_living(self._ring_of):
                return
            if self._link is not None:
                self.lose(self._link)
            await self._all_run_out()
            await self._engine_thread.run(self._desk.detach)
            if self._mapping is not None:
                self._mapping.unmap()
            self._ring_of = None

    @property
    def step_age_s(self) -> float:
        """How long the device has been at a step whose states are there; 0 when it waits for some."""
        began_s = self._link.step_began_s if self._link is not None else None
        return 0.0 if began_s is None else self._clock() - began_s

    async def close(self) -> None:
        """End the link; return when nothing of it runs any more."""
        for change in self._changes:
            change.cancel()
        if self._link is not None:
            self.lose(self._link)
        await self._all_run_out()

    async def _to_its_end(self, change: Coroutine[Any, Any, None]) -> None:
        """Wait for a change of the ring. It goes on though the handshake may be given up: the next one must
        not map while this one captures."""
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(task)

    async def _all_run_out(self) -> None:
        # Whoever waits here may be cancelled, and `gather` would cancel the endings then.
        if self._endings:
            await asyncio.wait(self._endings)

    async def _run_out(self, link: DeviceLink) -> None:
        # An engine that failed has ended the service already.
        with contextlib.suppress(Unavailable):
            try:
                async with asyncio.timeout(limits.RUN_OUT_DEADLINE_S):
                    link.flags.release()
                    while not await self._engine_thread.run(self._desk.is_idle, link):
                        await asyncio.sleep(_RUN_OUT_POLL_S)
                        link.flags.release()
            except TimeoutError:
                log.error("device_hangs", deadline_s=limits.RUN_OUT_DEADLINE_S)
                self._on_failure("device")
                return
            await self._engine_thread.run(self._desk.end_link, link)
