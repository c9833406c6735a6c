"""Which requests take part in a launch whose predecessor's results nobody has seen yet. No torch.

A running request has a lane. It extends while the host knows tokens whose K/V is not stored, and then
decodes: from there the device alone knows its anchor, and the host knows bounds. Pages are reserved for
the highest position that the launch may reach, though not past the last one whose K/V is ever read: rows
beyond it fall on the sentinel page, and what is chosen there is never committed.

When pages run out, what is only a guess is worth nobody's: first the draft is left out, then a request
whose position is a bound sits out until it is known. Where a known token asks, the youngest request is
preempted: it gives lane and pages back, what is still in flight for it is committed all the same, and
then it recomputes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from common.paged_kv import PageEntry, PagePool
from services.target.core.request import Phase, Request
from services.target.core.roster import Roster


@dataclass(eq=False, slots=True)
class Ride:
    """One stay of a request on a lane; a new one begins where it computes its tokens anew.

    Launches in flight for it commit at least a token each, and num_tokens_max together at most.
    """

    request: Request
    lane: int
    decodes: bool = False
    """Whether all tokens that the host knows were launched, so that the device has the anchor."""
    is_over: bool = False
    """What is still in flight is then discarded."""
    num_in_flight: int = 0
    num_tokens_max: int = 0

    @property
    def position_min(self) -> int:
        """A bound of the anchor's position once everything launched is done."""
        return len(self.request.tokens) - 1 + self.num_in_flight

    @property
    def position_max(self) -> int:
        """The other bound."""
        return len(self.request.tokens) - 1 + self.num_tokens_max

    @property
    def room_max(self) -> int:
        """Tokens that may still be committed by launches to come."""
        return self.request.len_max - len(self.request.tokens) - self.num_in_flight

    def launched(self, num_tokens_max: int) -> None:
        """One more launch chooses tokens for it, so many at most."""
        self.num_in_flight += 1
        self.num_tokens_max += num_tokens_max

    def read(self, num_tokens_max: int) -> None:
        """The results of the oldest such launch were read."""
        self.num_in_flight -= 1
        self.num_tokens_max -= num_tokens_max


@dataclass(frozen=True, slots=True)
class Extend:
    """Tokens [start, stop) of a ride's request; samples: they are all it has, and the next is chosen."""

    ride: Ride
    start: int
    stop: int
    samples: bool

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start

    @property
    def is_published(self) -> bool:
        """Whether a launch that captures tells the drafter what was chosen."""
        return self.samples and self.ride.request.drafting


@dataclass(slots=True)
class Plan:
    """One launch. may_draft: for each decoding ride, whether it has pages for a draft. joined: rides whose
    lane is new to them."""

    extends: list[Extend] = field(default_factory=list)
    decodes: list[Ride] = field(default_factory=list)
    may_draft: list[bool] = field(default_factory=list)
    joined: list[Ride] = field(default_factory=list)
    pages: list[PageEntry] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.extends and not self.decodes

    @property
    def wants_drafts(self) -> bool:
        """Whether some request of it may be drafted for."""
        rides = (*self.decodes, *(extend.ride for extend in self.extends))
        return any(ride.request.drafting for ride in rides)


class LanesScheduler(Roster):
    """A roster whose running requests have lanes 0 … num_running_max - 1."""

    def __init__(
        self, pool: PagePool, *, num_running_max: int, extend_rows_max: int, extends_max: int
    ) -> None:
        """extend_rows_max, extends_max: prompt rows, and requests with prompt rows, in a launch."""
        super().__init__(pool, num_running_max)
        self._extend_rows_max = extend_rows_max
        self._extends_max = extends_max
        self._free_lanes = list(range(num_running_max - 1, -1, -1))

    @property
    def num_lanes_unaccounted(self) -> int:
        """Lanes that are neither free nor some running request's; 0 unless there is a bug."""
        return self._num_running_max - len(self._free_lanes) - self.num_running

    def next_launch(self, width: int) -> Plan:
        """Choose the rows of a launch in which each decoding request has `width` rows."""
        plan = Plan()
        budget = self._extend_rows_max
        for request in self.running:
            # A request earlier in the loop may have preempted this one.
            if request.phase is not Phase.RUNNING:
                continue
            ride = _ride(request)
            if ride.decodes:
                self._plan_decode(plan, ride, width)
            elif budget > 0 and len(plan.extends) < self._extends_max:
                budget -= self._plan_extend(plan, ride, budget)
        while budget > 0 and len(plan.extends) < self._extends_max and self._can_admit(width):
            request = self._waiting.popleft()
            self._admit(request)
            ride = _ride(request)
            plan.joined.append(ride)
            budget -= self._plan_extend(plan, ride, budget)
        return plan

    def restart(self, request: Request, cached_len: int) -> None:
        """Let a running request extend again from there on, on its lane and pages; what is in flight for it
        is discarded."""
        old = _ride(request)
        old.is_over = True
        request.ride = Ride(request, old.lane)
        request.cached_len = cached_len

    def rewind(self, request: Request) -> None:
        """See Roster.rewind."""
        self.restart(request, 0)

    def remove(self, request: Request) -> list[int]:
        """See Roster.remove."""
        if request.ride is not None:
            request.ride.is_over = True
        return super().remove(request)

    def _can_admit(self, width: int) -> bool:
        """Whether the first in the queue may start: what was in flight for it is read, and all of its tokens
        and its first block have pages, so that admission is not followed by preemption at once."""
        if not self._waiting or self.num_running == self._num_running_max:
            return False
        request = self._waiting[0]
        if request.ride is not None and request.ride.num_in_flight:
            return False
        num_tokens = min(request.committed_len + width, request.len_max - 1)
        return self.pool.pages_for(num_tokens) <= self.pool.num_free

    def _plan_decode(self, plan: Plan, ride: Ride, width: int) -> None:
        request = ride.request
        if ride.room_max <= 0:
            return
        position = ride.position_max
        may_draft = self._reserve(plan, ride, min(position + width, request.len_max - 1))
        if not may_draft and not self._reserve(plan, ride, min(position + 1, request.len_max - 1)):
            if ride.num_in_flight or not self._preempt_for(plan, ride, request.committed_len):
                return
        plan.decodes.append(ride)
        plan.may_draft.append(may_draft)

    def _plan_extend(self, plan: Plan, ride: Ride, budget: int) -> int:
        """Returns the number of rows."""
        request = ride.request
        start, num_tokens = request.cached_len, min(request.remaining_len, budget)
        stop = start + num_tokens
        if not self._reserve(plan, ride, stop) and not self._preempt_for(plan, ride, stop):
            return 0
        request.cached_len = stop
        ride.decodes = stop == request.committed_len
        plan.extends.append(Extend(ride, start, stop, samples=ride.decodes))
        return num_tokens

    def _reserve(self, plan: Plan, ride: Ride, num_tokens: int) -> bool:
        """Make room for positions 0 … num_tokens-1 if there are free pages enough."""
        table = ride.request.page_table
        assert table is not None
        if num_tokens <= table.capacity:
            return True
        if table.missing_for(num_tokens) > self.pool.num_free:
            return False
        first = table.num_pages
        table.reserve(num_tokens)
        plan.pages += [PageEntry(ride.lane, i, page) for i, page in enumerate(table.pages[first:], first)]
        return True

    def _preempt_for(self, plan: Plan, ride: Ride, num_tokens: int) -> bool:
        """Reserve, preempting others, youngest first; False when it was itself the youngest."""
        while not self._reserve(plan, ride, num_tokens):
            youngest = self._running[-1]
            self._preempt(youngest)
            if youngest is ride.request:
                return False
        return True

    def _admit(self, request: Request) -> None:
        super()._admit(request)
        request.ride = Ride(request, self._free_lanes.pop())

    def _release(self, request: Request) -> list[int]:
        self._free_lanes.append(_ride(request).lane)
        return super()._release(request)


def _ride(request: Request) -> Ride:
    assert request.ride is not None
    return request.ride
