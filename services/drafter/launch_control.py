"""A launch's numbers on their way to the device, its results and times on their way back.

Knows the layout of a launch; nothing of models or graphs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import NamedTuple

import torch

from common.handoff.transport import Outcome
from common.pinned_ring import PinnedRing
from services.drafter.draft_work import DraftResults, DraftWork, LaneResult

# Launches whose results were not read yet, at most: as many as messages wait in the drafter's queue.
LAUNCHES_IN_FLIGHT_MAX = 8
_HEADER_WORDS = 4
_APPEND_WORDS = 4
_ENTRY_WORDS = 3
_BEGUN, _INGESTED, _DRAFTED = range(3)


@dataclass(frozen=True)
class Ticket:
    """Names a launch until its results are read; also the shape of those."""

    number: int
    num_rows: int
    num_appends: int


class LaunchTimes(NamedTuple):
    """Seconds of the device, from when it came to the launch: storing context, drafting."""

    ingest_s: float
    draft_s: float


class LaunchControl:
    """Views of the device's copy, all int32; a launch's are those of the last upload.

    num_entries, wanted `[1]`; row_lanes, begins `[num_rows_max]`; appends `[num_lanes, 4]`; entries
    `[num_pages, 3]`; row_results `[num_rows_max, 2]`, append_results `[num_lanes, 2]`: see
    common.kernels.draft_lanes and draft_appends.
    """

    def __init__(self, num_rows_max: int, num_lanes: int, num_pages: int, device: torch.device) -> None:
        self._num_rows_max, self._sentinel = num_rows_max, num_lanes
        self._first_append = _HEADER_WORDS + 2 * num_rows_max
        self._first_entry = self._first_append + num_lanes * _APPEND_WORDS
        num_words = self._first_entry + num_pages * _ENTRY_WORDS
        self._control = PinnedRing(num_words, LAUNCHES_IN_FLIGHT_MAX, device)
        self._device = self._control.device
        self.num_entries, self.wanted = self._device[0:1], self._device[1:2]
        self.row_lanes = self._device[_HEADER_WORDS : _HEADER_WORDS + num_rows_max]
        self.begins = self._device[_HEADER_WORDS + num_rows_max : self._first_append]
        self.appends = self._device[self._first_append : self._first_entry].view(-1, _APPEND_WORDS)
        self.entries = self._device[self._first_entry :].view(-1, _ENTRY_WORDS)
        self._results = PinnedRing(2 * (num_rows_max + num_lanes), LAUNCHES_IN_FLIGHT_MAX, device)
        results = self._results.device.view(-1, 2)
        self.row_results, self.append_results = results.split([num_rows_max, num_lanes])
        self._in_flight = [_InFlight(device.type == "cuda") for _ in range(LAUNCHES_IN_FLIGHT_MAX)]
        self._number = 0

    def reset(self) -> None:
        """Let the device see padding only."""
        self._device.zero_()
        self.row_lanes.fill_(self._sentinel)

    def upload(self, work: DraftWork) -> Ticket:
        """Write a launch and enqueue its copy to the device."""
        ticket = Ticket(self._number, len(work.lanes), len(work.appends))
        self._number += 1
        place = self._place_of(ticket)
        assert place.ticket is None, f"results of launch {ticket.number - LAUNCHES_IN_FLIGHT_MAX} are unread"
        place.ticket = ticket
        words = self._control.words(ticket.number)
        words[:2] = len(work.pages), work.blocks
        words[_HEADER_WORDS : self._first_append] = 0
        row_lanes = words[_HEADER_WORDS : _HEADER_WORDS + self._num_rows_max]
        row_lanes[:] = self._sentinel
        row_lanes[: len(work.lanes)] = work.lanes
        first = _HEADER_WORDS + self._num_rows_max
        words[first : first + len(work.lanes)] = work.begins
        appends = words[self._first_append : self._first_entry]
        appends[:] = 0
        if work.appends:
            appends[: len(work.appends) * _APPEND_WORDS].reshape(-1, _APPEND_WORDS)[:] = work.appends
        stop = self._first_entry + len(work.pages) * _ENTRY_WORDS
        if work.pages:
            words[self._first_entry : stop].reshape(-1, _ENTRY_WORDS)[:] = work.pages
        self._control.upload(ticket.number, stop)
        return ticket

    def mark_begun(self, ticket: Ticket) -> None:
        """The times begin here."""
        self._place_of(ticket).mark(_BEGUN)

    def mark_ingested(self, ticket: Ticket) -> None:
        """What is enqueued from here on drafts."""
        self._place_of(ticket).mark(_INGESTED)

    def download(self, ticket: Ticket) -> None:
        """Enqueue the copy of the results to the host. The times end here."""
        self._results.download(ticket.number, self._results.device.shape[0])
        self._place_of(ticket).mark(_DRAFTED)

    def results_to_host(self, ticket: Ticket) -> tuple[DraftResults, LaunchTimes]:
        """Waits, without the interpreter's lock, until the launch is done. Once for each ticket."""
        place = self._place_of(ticket)
        assert place.ticket == ticket, f"launch {ticket.number} was read before"
        place.wait()
        place.ticket = None
        found = self._results.words(ticket.number).reshape(-1, 2).tolist()
        rows = found[: ticket.num_rows]
        appends = found[self._num_rows_max : self._num_rows_max + ticket.num_appends]
        times = LaunchTimes(
            place.seconds_between(_BEGUN, _INGESTED), place.seconds_between(_INGESTED, _DRAFTED)
        )
        return DraftResults(_lane_results(appends), _lane_results(rows)), times

    def _place_of(self, ticket: Ticket) -> _InFlight:
        return self._in_flight[ticket.number % LAUNCHES_IN_FLIGHT_MAX]


def _lane_results(words: list[list[int]]) -> list[LaneResult]:
    return [LaneResult(Outcome(outcome), context_len) for outcome, context_len in words]


class _InFlight:
    """A launch in flight and the moments it passed. ticket: whose place it is; None when free."""

    def __init__(self, is_cuda: bool) -> None:
        self.ticket: Ticket | None = None
        # Blocking: whoever waits sleeps, for the drafter's cores have other work.
        self._events = [torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(3 * is_cuda)]
        self._times_s = [0.0, 0.0, 0.0]

    def mark(self, moment: int) -> None:
        if self._events:
            self._events[moment].record()
        else:
            self._times_s[moment] = time.monotonic()

    def wait(self) -> None:
        if self._events:
            self._events[_DRAFTED].synchronize()

    def seconds_between(self, first: int, second: int) -> float:
        if self._events:
            return self._events[first].elapsed_time(self._events[second]) / 1e3
        return self._times_s[second] - self._times_s[first]
