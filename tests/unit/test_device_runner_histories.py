"""Random histories of device steps: the host ahead of the device, small pools, losses at any point.

A target's GPU is played here: it writes a step into the ring when the step before is done, and only then
knows where its requests' anchors are. What the drafter accepts must be drafted after the right context.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from common.handoff.transport import Close, DeviceRow, DeviceStep, Extend, Open, Outcome
from tests.ring_rig import BLOCK_SIZE, EXTEND_ROWS, NUM_ROWS, RingRig, draft_of, fill_row, owned_rows

IN_FLIGHT_MAX = 4


@dataclass(eq=False)
class Request:
    """What the target knows of a request, whose number is its session's id and the owner of its rows. at: the
    anchor's place on the device; lowest, highest: its bounds after all that was posted."""

    number: int
    prompt_len: int
    num_extended: int = 0
    at: int = 0
    lowest: int = 0
    highest: int = 0
    epoch: int = -1
    is_open: bool = False


@dataclass
class BatchRow:
    """A row of a step, and what the device made of it: the end of the context, the draft that is there."""

    request: Request
    ends_prompt: bool
    end: int = 0
    draft: list[int] = field(default_factory=list)


@dataclass
class Posted:
    step: DeviceStep
    extended: list[Request] = field(default_factory=list)
    rows: list[BatchRow | None] = field(default_factory=list)


class Target:
    """Requests that come and go, steps that are posted ahead, a GPU that follows."""

    def __init__(self, rig: RingRig, rng: random.Random) -> None:
        self.rig, self.rng = rig, rng
        self.requests: list[Request] = []
        self.posted: deque[Posted] = deque()
        self.num_started = self.num_requests = self.num_checked = 0
        self.outcomes: Counter[Outcome] = Counter()

    # --- the host --------------------------------------------------------------------------------------

    def post(self) -> None:
        rng = self.rng
        while len(self.requests) < NUM_ROWS and rng.random() < 0.7:
            self.num_requests += 1
            self.requests.append(Request(self.num_requests, rng.randint(1, 12)))
        posted = Posted(DeviceStep(self.rig.link.last_sequence + 1))
        for request in [r for r in self.requests if rng.random() < 0.1 or r.highest > 66]:
            self.requests.remove(request)
            # One that is forgotten stays open, and keeps its pages.
            if request.is_open and rng.random() < 0.9:
                posted.step.closes.append(Close(request.number, request.epoch))
        for request in self.requests:
            row = self._plan(posted, request)
            posted.rows.append(row)
            posted.step.rows.append(None if row is None else self._ask(posted.step, row))
        self.rig.runner.launch(self.rig.link, posted.step)
        self.posted.append(posted)

    def _plan(self, posted: Posted, request: Request) -> BatchRow | None:
        """The request's part in a step: a piece of its prompt; a batch row at the end of that, and after."""
        step = posted.step
        if request.num_extended == request.prompt_len:
            request.highest += BLOCK_SIZE
            return BatchRow(request, ends_prompt=False)
        used = sum(extend.num_rows for extend in step.extends)
        left = request.prompt_len - request.num_extended
        count = min(left, EXTEND_ROWS - used, self.rng.randint(1, 8))
        if count == 0:
            return None
        if request.num_extended == 0:
            self._open(step, request, 0)
        if request.is_open:
            posted.extended.append(request)
            step.extends.append(
                Extend(request.number, request.epoch, request.num_extended, used, used + count)
            )
        request.num_extended += count
        if count < left:
            return None
        request.at = request.lowest = request.highest = request.prompt_len
        return BatchRow(request, ends_prompt=True)

    def _ask(self, step: DeviceStep, row: BatchRow) -> DeviceRow:
        request, begins = row.request, not row.request.is_open
        if begins:
            self._open(step, request, request.lowest)
        asked = DeviceRow(request.number, request.epoch, request.lowest, request.highest, begins)
        request.lowest += not row.ends_prompt
        return asked

    def _open(self, step: DeviceStep, request: Request, position: int) -> None:
        request.epoch += 1
        request.is_open = True
        step.opens.append(Open(request.number, request.epoch, position))

    # --- its device ------------------------------------------------------------------------------------

    def run(self) -> None:
        """One step of the target's GPU, if the drafter has let it go on."""
        flags, ring = self.rig.flags, self.rig.ring
        if self.num_started == len(self.posted):
            return
        posted = self.posted[self.num_started]
        step = posted.step
        assert flags.done >= step.sequence - 1, "whatever becomes of a step, its done is written"
        self.num_started += 1
        for extend, request in zip(step.extends, posted.extended, strict=True):
            rows = owned_rows(request.number, extend.position, extend.num_rows)
            if self.rng.random() < 0.02:
                rows[-1, 0] = float("nan")
            ring.extend_captured[extend.row_start : extend.row_stop] = rows
        for i, row in enumerate(posted.rows):
            if row is None:
                continue
            request, asked = row.request, step.rows[i]
            count = 0 if row.ends_prompt else self.rng.randint(1, BLOCK_SIZE)
            is_finite = count == 0 or self.rng.random() < 0.98
            fill_row(ring, i, request.number, request.at, count, is_finite=is_finite)
            request.at += count
            row.end = request.at
            assert asked is not None and asked.position_min <= request.at <= asked.position_max
        flags.set_ready(step.sequence)
        for i, row in enumerate(posted.rows):
            if row is not None:
                row.draft = self.rig.drafts(i)

    # --- replies ---------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Take the oldest reply, if its step is done."""
        if not self.num_started:
            return
        posted = self.posted.popleft()
        self.num_started -= 1
        rows = {row.request.number: row for row in posted.rows if row is not None}
        for verdict in self.rig.finish().verdicts:
            self.outcomes[verdict.outcome] += 1
            row = rows.get(verdict.session_id)
            if verdict.outcome is Outcome.OK and row is not None:
                assert verdict.context_len == row.end
                assert row.draft == draft_of(row.request.number, row.end)
                self.num_checked += 1
            for request in self.requests:
                if (request.number, request.epoch) == (verdict.session_id, verdict.epoch):
                    request.is_open &= verdict.outcome is Outcome.OK

    def lose(self) -> None:
        """The link is lost with whatever is in flight, and a new one begins."""
        rig = self.rig
        rig.link.is_lost = True
        rig.flags.release()
        assert rig.runner.is_idle(rig.link)
        rig.runner.end(rig.link)
        assert rig.table.num_sessions == rig.table.num_pages_used == 0
        assert rig.engine.num_spoiled_cells == 0
        self.posted.clear()
        self.num_started = 0
        self.requests.clear()
        rig.link = rig.new_link()


def play(seed: int) -> Target:
    rng = random.Random(seed)
    rig = RingRig(num_pages=rng.choice([12, 24, 80]), num_sessions_max=rng.choice([2, 6, 12]))
    target = Target(rig, rng)
    for _ in range(300):
        match rng.choice(["post", "run", "finish", "any"]):
            case "post" if len(target.posted) < IN_FLIGHT_MAX:
                target.post()
            case "run":
                target.run()
            case "finish":
                target.finish()
            case "any" if rng.random() < 0.05:
                target.lose()
            case "any" if rng.random() < 0.05:
                # Forgotten sessions leave by their lease.
                rig.clock.now_s += rng.choice([1, 31])
                rig.table.expire()
        rig.check()
    target.lose()
    return target


def test_what_is_accepted_is_drafted_after_the_right_context_and_nothing_is_lost() -> None:
    outcomes: Counter[Outcome] = Counter()
    num_checked = 0
    for _ in range(36):
        seed = random.randrange(2**32)
        print(f"seed {seed}")
        target = play(seed)
        outcomes += target.outcomes
        num_checked += target.num_checked
    # A fifth of what is usual.
    assert num_checked > 400
    for met in (Outcome.OK, Outcome.NO_CAPACITY, Outcome.NEEDS_RESYNC, Outcome.NON_FINITE):
        assert outcomes[met], f"the histories never came to {met.name}"
