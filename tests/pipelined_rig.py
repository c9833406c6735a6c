"""A pipelined step loop in the test's own thread, over a device without tensors and drafters that err.

The drafters hold the loop to its side of the hand-off: what they are told is exactly what lies in the ring
or comes with the message, contexts have no gap, bounds hold, and nothing is written over before it was read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.contract import DraftContract, Mismatch
from common.paged_kv import PagePool
from services.target.core.draft_source import Drafts, DraftSource, HandOff, PlainReason
from services.target.core.lanes_scheduler import LanesScheduler
from services.target.core.pipelined_source import NoPipelinedDrafter, PipelinedDrafter, PostedStep
from services.target.core.pipelined_step import PipelinedStepLoop
from services.target.core.request import Phase, Request, SamplingParams
from tests.core_rig import Ask, RecordedObserver, Tape
from tests.fakes_device import VOCAB_ROWS, FakeDeviceEngine, FakeRing, Oracle, build_contract, cell


@dataclass
class Habits:
    """How a drafter errs. Probabilities: spoil, hostile and absent a block, the rest a step."""

    spoil: float = 0.0
    hostile: float = 0.0
    absent: float = 0.0
    lose: float = 0.0
    vanish: float = 0.0
    come_back: float = 0.3
    block_sizes: tuple[int, ...] = (4,)


class PipelinedRig:
    """Submit asks, run steps, look at the tapes."""

    def __init__(
        self,
        rng: random.Random,
        drafter: Callable[[PipelinedRig], PipelinedDrafter] | None = None,
        *,
        nan_share: float = 0.0,
        num_pages: int = 64,
        page_size: int = 4,
        num_running_max: int = 4,
        extend_rows_max: int = 16,
        extends_max: int = 4,
        max_len: int = 64,
    ) -> None:
        self.oracle = Oracle(nan_share)
        self.engine = FakeDeviceEngine(
            self.oracle, rng, num_pages, page_size, num_running_max, max_len, extend_rows_max, extends_max
        )
        self.pool = PagePool(num_pages, page_size)
        rng.shuffle(self.pool._free)
        self.scheduler = LanesScheduler(
            self.pool, num_running_max=num_running_max, extend_rows_max=extend_rows_max,
            extends_max=extends_max,
        )  # fmt: skip
        self.drafter = NoPipelinedDrafter() if drafter is None else drafter(self)
        self.observer = RecordedObserver()
        self.loop = PipelinedStepLoop(
            self.scheduler, self.engine, self.drafter, self.observer  # type: ignore[arg-type]
        )  # fmt: skip
        self.tapes: list[Tape] = []
        self.by_session: dict[int, Request] = {}

    def submit(self, ask: Ask) -> Tape:
        tape = Tape(ask)
        tape.request = Request(
            f"r{len(self.tapes)}", list(ask.prompt), ask.sampling, ask.max_new_tokens, ask.stop_token_ids,
            ask.drafting, tape.record,
        )  # fmt: skip
        self.tapes.append(tape)
        self.scheduler.add(tape.request)
        return tape

    def step(self) -> None:
        self.loop.step()
        self.check()

    def run(self, asks: Sequence[Ask] = (), each_step: Callable[[], None] = lambda: None) -> list[Tape]:
        """Submit, step until nothing is left, and check that everything was given back."""
        for ask in asks:
            self.submit(ask)
        work = sum(len(t.ask.prompt) + t.ask.max_new_tokens for t in self.tapes)
        for _ in range(20 * work + 100):
            if not self.loop.has_work:
                break
            self.step()
            each_step()
        self.step()
        self.check_idle()
        return self.tapes

    def note_sessions(self) -> None:
        """Remember who is who; a drafter asks at each post."""
        self.by_session.update({request.session_id: request for request in self.scheduler.running})

    def check(self) -> None:
        """I3: each page and each lane is free or one request's."""
        running = self.scheduler.running
        owned = [page for r in running if r.page_table for page in r.page_table.pages]
        assert len(set(owned)) == len(owned)
        assert len(owned) + self.pool.num_free == self.pool.num_pages
        assert 0 not in owned
        lanes = [r.ride.lane for r in running if r.ride is not None]
        assert len(set(lanes)) == len(lanes) == len(running)
        assert not set(lanes) & set(self.scheduler._free_lanes)
        assert self.scheduler.num_lanes_unaccounted == self.scheduler.num_pages_unaccounted == 0
        assert self.engine.num_unread <= 1
        for request in running:
            assert request.ride is not None and not request.ride.is_over
            assert request.ride.num_in_flight or request.ride.num_tokens_max == 0
        for tape in self.tapes:
            assert (tape.terminal is None) == (tape.request.phase is not Phase.FINISHED)

    def check_idle(self) -> None:
        assert not self.loop.has_work, "requests are left that never end"
        assert self.pool.num_free == self.pool.num_pages
        assert self.engine.num_unread == 0
        assert all(tape.terminal is not None for tape in self.tapes)


class Contexts:
    """What a drafter holds of each session: the cells from a start on. Drafts with the target's own model
    where it holds all of them, which is right only if what it was given is."""

    def __init__(self, rig: PipelinedRig, rng: random.Random, habits: Habits) -> None:
        self._rig, self._rng, self._habits = rig, rng, habits
        self._held: dict[int, tuple[int, list[int]]] = {}
        self.num_drafts = 0

    def append(self, session_id: int, position: int, cells: Sequence[int]) -> None:
        start, held = self._held.get(session_id, (position, []))
        if position < start:
            start, held = position, []
        assert position <= start + len(held), "context has a gap"
        self._held[session_id] = (start, held[: position - start] + list(cells))

    def end(self, session_id: int) -> None:
        self._held.pop(session_id, None)

    def forget_all(self) -> None:
        self._held.clear()

    def draft(self, session_id: int, position: int, anchor: int, count: int) -> list[int]:
        """The context ends where the anchor stands."""
        start, held = self._held[session_id]
        assert start + len(held) == position
        self.num_drafts += 1
        draft = self._right(held, position, anchor, count, self._rig.by_session[session_id].sampling)
        if start > 0 or self._rng.random() < self._habits.hostile:
            draft = [self._rng.randint(-3, VOCAB_ROWS + 3) for _ in range(count)]
        elif self._rng.random() < self._habits.spoil:
            draft[self._rng.randrange(count)] = self._rng.randrange(VOCAB_ROWS)
        return draft

    def _right(
        self, held: list[int], position: int, anchor: int, count: int, sampling: SamplingParams
    ) -> list[int]:
        cells, draft = [*held, cell(position, anchor)], []
        for i in range(count):
            token = self._rig.oracle.choose(cells, sampling)
            draft.append(0 if token is None else token)
            cells.append(cell(position + 1 + i, draft[-1]))
        return draft


class _Connection:
    """Whether a drafter is there, and which."""

    def __init__(self, rig: PipelinedRig, rng: random.Random, habits: Habits) -> None:
        self.rig, self.rng, self.habits = rig, rng, habits
        self.contexts = Contexts(rig, rng, habits)
        self.draft: DraftContract | None = None
        self.ring: FakeRing | None = None
        self.ended: set[int] = set()
        self._connect()

    def _connect(self) -> None:
        draft = build_contract(self.rng.choice(self.habits.block_sizes))
        if draft != self.draft or self.ring is None or self.rng.random() < 0.5:
            self.ring = FakeRing(draft, self.rig.engine.num_lanes, self.rig.engine.extend_rows_max)
        self.draft = draft

    def changes(self) -> bool:
        """Come and go as the habits say; what was held is then gone."""
        chance = self.habits.vanish if self.draft else self.habits.come_back
        if self.rng.random() >= chance:
            return False
        if self.draft is None or self.rng.random() < 0.3:
            self._connect()
        else:
            self.draft = None
        self.contexts.forget_all()
        return True

    def renew(self) -> None:
        self._connect()
        self.contexts.forget_all()

    def refuse(self) -> None:
        """What it asks for cannot be had; another may come."""
        self.draft = None
        self.contexts.forget_all()

    def take_ended(self, ended: list[int]) -> None:
        assert not self.ended & set(ended), "a session ended twice"
        self.ended |= set(ended)
        for session_id in ended:
            self.contexts.end(session_id)


@dataclass(eq=False)
class _Work:
    """A posted step that the drafter has still to do."""

    step: PostedStep
    draft: DraftContract
    ring: FakeRing
    ring_number: int


class RingDrafter:
    """A PipelinedDrafter that reads and writes the ring when the device lets it, or has to wait for it."""

    inline: DraftSource | None = None

    def __init__(self, rig: PipelinedRig, rng: random.Random, habits: Habits | None = None) -> None:
        self._rig, self._rng, self.habits = rig, rng, habits or Habits()
        self._connection = _Connection(rig, rng, self.habits)
        self._work: list[_Work] = []
        self._ready_number = -1
        self._rows: dict[int, int] = {}
        self.mismatches: list[Mismatch] = []
        self.posted: list[PostedStep] = []
        self.completed: list[int] = []
        self.invalid: list[int] = []

    @property
    def draft(self) -> DraftContract | None:
        return self._connection.draft

    @property
    def ring(self) -> FakeRing | None:
        return self._connection.ring if self.draft else None

    @property
    def ended(self) -> set[int]:
        return self._connection.ended

    @property
    def num_drafts(self) -> int:
        return self._connection.contexts.num_drafts

    def settle(self) -> None:
        if self._connection.changes():
            self._forget_steps()
        if self._rng.random() < 0.5:
            self._do(self._work)

    def refuse(self, mismatch: Mismatch) -> None:
        self.mismatches.append(mismatch)
        self._connection.refuse()
        self._forget_steps()

    def lost_sessions(self) -> set[int]:
        running = [r.session_id for r in self._rig.scheduler.running if r.drafting]
        return {session_id for session_id in running if self._rng.random() < self.habits.lose}

    def draft_rows(self, session_ids: list[int]) -> list[int]:
        assert self.draft is not None
        assert not set(session_ids) & self.ended
        return [
            -1 if self._rng.random() < self.habits.absent else self._rows.get(session_id, -1)
            for session_id in session_ids
        ]

    def why_plain(self, session_id: int) -> PlainReason:
        return PlainReason.RESYNC if self.draft else PlainReason.UNAVAILABLE

    def await_drafts(self) -> None:
        posted = list(self._work)
        self._rig.engine.enqueue(lambda: self._do(posted, must=True))

    def mark_ready(self) -> None:
        number = self._rig.engine.num_launches - 1

        def mark() -> None:
            self._ready_number = number

        self._rig.engine.enqueue(mark)

    def post(self, step: PostedStep) -> None:
        self._rig.note_sessions()
        self.posted.append(step)
        named = {e.session_id for e in step.extends} | {row.session_id for row in step.rows if row}
        assert not named & self.ended and not named & set(step.ended)
        assert all(self._rig.by_session[session_id].drafting for session_id in named)
        self._connection.take_ended(step.ended)
        self._rows = {row.session_id: i for i, row in enumerate(step.rows) if row is not None}
        if step.extends or step.rows:
            assert self.draft is not None and self.ring is not None
            self._work.append(_Work(step, self.draft, self.ring, self._rig.engine.num_launches - 1))

    def observe_completed(self, step_number: int, invalid: Sequence[int] = ()) -> None:
        self.completed.append(step_number)
        self.invalid.extend(invalid)

    def close(self) -> None: ...

    def lose_connection(self) -> None:
        """Whoever is there, if anybody, is new."""
        self._connection.renew()
        self._forget_steps()

    def _forget_steps(self) -> None:
        self._work.clear()
        self._rows.clear()

    def _do(self, works: list[_Work], must: bool = False) -> None:
        """What is ready of these, which must be all of them."""
        for work in list(works):
            is_ready = work.ring_number <= self._ready_number
            assert is_ready or not must
            if is_ready and work in self._work:
                self._work.remove(work)
                self._read_and_draft(work)

    def _read_and_draft(self, work: _Work) -> None:
        ring, contexts = work.ring, self._connection.contexts
        assert ring.number == work.ring_number, "the ring was written over before it was read"
        for extend in work.step.extends:
            if extend.session_id not in self.ended:
                rows = ring.extend_captured[extend.row_start : extend.row_start + extend.num_rows]
                contexts.append(extend.session_id, extend.position, rows)
        for i, row in enumerate(work.step.rows):
            if row is None or row.session_id in self.ended:
                continue
            request = self._rig.by_session[row.session_id]
            base, position = ring.base[i], ring.base[i] + ring.count[i]
            last = len(request.prompt) + request.max_new_tokens - 1
            assert row.position_min <= base <= position
            assert position <= row.position_max or row.position_max == last
            first = i * work.draft.block_size
            contexts.append(row.session_id, base, ring.verify_captured[first : first + ring.count[i]])
            count = work.draft.num_draft_tokens
            ring.drafts[i] = contexts.draft(row.session_id, position, ring.anchor[i], count)


class MessageSource:
    """A DraftSource that is told what was committed."""

    def __init__(self, rig: PipelinedRig, rng: random.Random, habits: Habits | None = None) -> None:
        self._rig, self._rng, self.habits = rig, rng, habits or Habits()
        self._connection = _Connection(rig, rng, self.habits)
        self._answers: dict[int, list[int]] = {}
        self.mismatches: list[Mismatch] = []
        self.handoffs: list[HandOff] = []

    @property
    def draft(self) -> DraftContract | None:
        return self._connection.draft

    @property
    def ring(self) -> FakeRing | None:
        return self._connection.ring if self.draft else None

    @property
    def ended(self) -> set[int]:
        return self._connection.ended

    @property
    def num_drafts(self) -> int:
        return self._connection.contexts.num_drafts

    @property
    def captured_layer_ids(self) -> tuple[int, ...]:
        return self.draft.captured_layer_ids if self.draft else ()

    def collect(self) -> Drafts:
        drafts, answers = Drafts(), self._answers
        self._answers = {}
        for session_id, draft in answers.items():
            if self._rng.random() < self.habits.absent:
                drafts.plain[session_id] = PlainReason.DEADLINE
            elif not all(0 <= token < VOCAB_ROWS for token in draft):
                # Messages are checked where they are read.
                drafts.plain[session_id] = PlainReason.INVALID_DRAFT
            else:
                drafts.tokens[session_id] = draft
        # Those of a drafter that is gone may still be among them.
        self._connection.changes()
        return drafts

    def lost_sessions(self) -> set[int]:
        running = [r.session_id for r in self._rig.scheduler.running if r.drafting]
        return {session_id for session_id in running if self._rng.random() < self.habits.lose}

    def post(self, handoff: HandOff) -> None:
        self._rig.note_sessions()
        self.handoffs.append(handoff)
        assert self._rig.engine.num_unread == 0
        self._connection.take_ended(handoff.ended)
        contexts = self._connection.contexts
        for rows in handoff.appends:
            assert self.draft is not None and handoff.captured is not None
            assert rows.session_id not in self.ended
            contexts.append(rows.session_id, rows.position, handoff.captured[rows.row_start : rows.row_stop])
        # In an order that is the same whatever the order of the batch.
        for block in sorted(handoff.wanted, key=lambda block: block.session_id):
            request = self._rig.by_session[block.session_id]
            assert request.drafting and block.session_id not in self.ended
            assert (block.position, block.anchor) == (request.committed_len - 1, request.tokens[-1])
            if self.draft is not None and handoff.captured is not None:
                self._answers[block.session_id] = contexts.draft(
                    block.session_id, block.position, block.anchor, self.draft.num_draft_tokens
                )
        self._connection.changes()

    def close(self) -> None: ...

    def refuse(self, mismatch: Mismatch) -> None:
        self.mismatches.append(mismatch)
        self._connection.refuse()
        self._answers = {}

    def lose_connection(self) -> None:
        """Whoever is there is new."""
        self._connection.renew()
        self._answers = {}


class MessageDrafter(NoPipelinedDrafter):
    """A PipelinedDrafter that is a MessageSource."""

    def __init__(self, rig: PipelinedRig, rng: random.Random, habits: Habits | None = None) -> None:
        self.source = MessageSource(rig, rng, habits)

    @property
    def inline(self) -> DraftSource:  # type: ignore[override]
        return self.source  # type: ignore[return-value]

    def refuse(self, mismatch: Mismatch) -> None:
        self.source.refuse(mismatch)

    @property
    def draft(self) -> DraftContract | None:  # type: ignore[override]
        return self.source.draft

    @property
    def ring(self) -> FakeRing | None:  # type: ignore[override]
        return self.source.ring


class ChangingDrafter:
    """A PipelinedDrafter that is reached through the ring for a while, then by messages, and so on."""

    def __init__(self, rig: PipelinedRig, rng: random.Random, habits: Habits | None = None) -> None:
        self._rng = rng
        self._through_ring, self._by_messages = RingDrafter(rig, rng, habits), MessageSource(rig, rng, habits)
        self._is_inline = False

    @property
    def inline(self) -> MessageSource | None:
        return self._by_messages if self._is_inline else None

    @property
    def draft(self) -> DraftContract | None:
        return (self._by_messages if self._is_inline else self._through_ring).draft

    @property
    def ring(self) -> FakeRing | None:
        return (self._by_messages if self._is_inline else self._through_ring).ring

    def settle(self) -> None:
        if self._rng.random() < 0.1:
            self._is_inline = not self._is_inline
            # A connection takes over from another that is closed.
            self._through_ring.lose_connection()
            self._by_messages.lose_connection()
        if not self._is_inline:
            self._through_ring.settle()

    def refuse(self, mismatch: Mismatch) -> None:
        (self._by_messages if self._is_inline else self._through_ring).refuse(mismatch)

    def lost_sessions(self) -> set[int]:
        return self._through_ring.lost_sessions()

    def draft_rows(self, session_ids: list[int]) -> list[int]:
        return self._through_ring.draft_rows(session_ids)

    def why_plain(self, session_id: int) -> PlainReason:
        return self._through_ring.why_plain(session_id)

    def await_drafts(self) -> None:
        self._through_ring.await_drafts()

    def mark_ready(self) -> None:
        self._through_ring.mark_ready()

    def post(self, step: PostedStep) -> None:
        self._through_ring.post(step)

    def observe_completed(self, step_number: int, invalid: Sequence[int] = ()) -> None:
        self._through_ring.observe_completed(step_number, invalid)

    def close(self) -> None: ...
