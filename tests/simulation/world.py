"""A small world for the hand-off: real target loop, real sessions on both sides, made-up models and link.

Time is a number that only the test moves, and all chance comes from one seeded generator, so a seed
is a history. The models are arithmetic: the token at a position is a function of request and position,
a captured row is (request, position, token), and a drafter that is asked for a block first checks
that the context it holds is exactly the truth.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from common import limits
from common.contract import DraftContract, Mismatch, TargetContract
from common.handoff.transport import PeerFault
from common.paged_kv import PagePool
from common.pb.tandem.v1 import drafter_pb2 as pb
from services.drafter.engine import PlacedBlock
from services.drafter.messages import decode_captured, decode_step, encode_reply
from services.drafter.session import CloseReason
from services.drafter.session_table import SessionTable
from services.drafter.step import StepRunner
from services.target.core.drafter_handshake import Agreement
from services.target.core.drafter_status import DrafterStatus
from services.target.core.drafter_stream import DrafterStream
from services.target.core.engine import StepOutput
from services.target.core.scheduler import Batch

VOCAB_ROWS = 50_021
# A row is (request, position, token).
WIDTH = 3
TARGET = TargetContract(WIDTH, 4, VOCAB_ROWS, "float32", "world")
DRAFT = DraftContract((1,), 5, 4, VOCAB_ROWS - 1, 4096, "draft")
DEADLINE_S = 0.1
LEASE_S = 5.0
PAGE_SIZE = 4


def truth(request: int, position: int) -> int:
    """The target's token at a position; for the prompt, the caller's."""
    return (request * 7919 + position * 104_729 + 13) % (VOCAB_ROWS - 1)


class Clock:
    """Starts far below zero, so that no deadline ever lies ahead of the machine's own clock."""

    def __init__(self) -> None:
        self.now = -1e9

    def __call__(self) -> float:
        return self.now


@dataclass
class Chances:
    """Probabilities, each a step or a message."""

    kill: float = 0.0
    lose_stream: float = 0.0
    hang: float = 0.0
    mismatch: float = 0.0
    slow: float = 0.0
    repeat: float = 0.0
    spoil_reply: float = 0.0
    spoil_row: float = 0.0


@dataclass
class Ledger:
    """What must hold, written down where it happens and read by the test."""

    violations: list[str] = field(default_factory=list)
    drafts: dict[tuple[str, int, int], list[list[int]]] = field(default_factory=dict)
    """By (life, request, position of the anchor): the blocks that may be used there."""
    num_drafts_used: int = 0
    num_connections: int = 0
    resyncs: list[str] = field(default_factory=list)

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.violations.append(what)

    # DrafterObserver
    def observe_drafter(self, up: bool, breaker: str) -> None:
        self.require(up == (breaker != "open"), f"up {up} with a breaker that is {breaker}")

    def observe_mismatches(self, fields: list[str]) -> None:
        pass

    def observe_transport(self, transport: str | None) -> None:
        pass

    def observe_resync(self, kind: str) -> None:
        self.resyncs.append(kind)


class TargetEngine:
    """Chooses the truth, whatever the drafts say, and captures rows of the tokens that it was given."""

    def __init__(self, ledger: Ledger, link: SimulatedLink, rng: random.Random, chances: Chances) -> None:
        self._ledger, self._link, self._rng, self._chances = ledger, link, rng, chances

    def run(self, batch: Batch, captured_layer_ids: tuple[int, ...]) -> StepOutput:
        chosen: list[list[int] | None] = []
        rows: list[tuple[float, float, float]] = []
        for s in batch.scheduled:
            request = int(s.request.request_id)
            if s.draft:
                self._check_draft(request, s.start + s.num_tokens - 1, s.draft)
            count = 1 + len(s.draft) if s.samples else 0
            chosen.append([truth(request, p) for p in range(s.stop - count + 1, s.stop + 1)])
            rows += [(request, s.start + i, token) for i, token in enumerate(s.row_ids)]
        if not captured_layer_ids:
            return StepOutput(chosen, None)
        captured = torch.tensor(rows, dtype=torch.float32)
        if self._rng.random() < self._chances.spoil_row:
            captured[self._rng.randrange(len(rows)), 0] = math.nan
        return StepOutput(chosen, captured)

    def zero_pages(self, pages: list[int]) -> None:
        raise AssertionError("the truth is always finite")

    def _check_draft(self, request: int, position: int, draft: list[int]) -> None:
        """I6: it was drafted for this position, by the life that the step was posted to."""
        known = self._ledger.drafts.get((self._link.life_posted_to, request, position), [])
        fits = any(block[: len(draft)] == draft for block in known)
        self._ledger.require(fits, f"a draft for another place was used at {position} of {request}")
        self._ledger.num_drafts_used += 1


class DraftEngine:
    """Holds rows by slot; drafts some true tokens and then wrong ones."""

    def __init__(self, life: str, ledger: Ledger, rng: random.Random) -> None:
        self._life, self._ledger, self._rng = life, ledger, rng
        self._rows: dict[int, tuple[int, int, int]] = {}

    def append_to_host(self, captured: torch.Tensor, positions: list[int], slots: list[int]) -> list[bool]:
        finite = [not math.isnan(row[0]) for row in captured.tolist()]
        for row, position, slot, ok in zip(captured.tolist(), positions, slots, finite, strict=True):
            if ok:
                request, row_position, token = (int(x) for x in row)
                self._ledger.require(row_position == position, f"row {row_position} was put at {position}")
                self._rows[slot] = (request, row_position, token)
        return finite

    def draft_to_host(self, blocks: Sequence[PlacedBlock]) -> torch.Tensor:
        return torch.tensor([self._draft(block) for block in blocks], dtype=torch.int32)

    def clean(self, pages: Sequence[int]) -> None:
        for page in pages:
            for slot in range(page * PAGE_SIZE, (page + 1) * PAGE_SIZE):
                self._rows.pop(slot, None)

    def _draft(self, block: PlacedBlock) -> list[int]:
        slots = [page * PAGE_SIZE + i for page in block.pages for i in range(PAGE_SIZE)][: block.num_context]
        rows = [self._rows.get(slot, (-1, -1, -1)) for slot in slots]
        self._ledger.require(bool(rows), "a block without any context")
        request = rows[-1][0]
        expected = [
            (request, position, truth(request, position))
            for position in range(block.position - block.num_context, block.position)
        ]
        self._ledger.require(rows == expected, f"context before {block.position} of {request} is wrong")
        self._ledger.require(block.anchor == truth(request, block.position), "the anchor is not the truth")
        num_good = self._rng.randint(0, DRAFT.num_draft_tokens)
        draft = [truth(request, block.position + k) for k in range(1, DRAFT.num_draft_tokens + 1)]
        draft[num_good:] = [(token + 1) % VOCAB_ROWS for token in draft[num_good:]]
        self._ledger.drafts.setdefault((self._life, request, block.position), []).append(draft)
        return draft


class _Observer:
    def observe_opened(self) -> None: ...

    def observe_closed(self, reason: CloseReason) -> None: ...


class DrafterLife:
    """One life of a drafter: the real table and step, the made-up engine."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        ledger: Ledger,
        rng: random.Random,
        *,
        num_pages: int,
        num_sessions_max: int,
    ) -> None:
        self.name = name
        self.num_sessions_max = num_sessions_max
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.table = SessionTable(
            self.pool, num_sessions_max=num_sessions_max, context_len_max=DRAFT.context_len_max,
            block_size=DRAFT.block_size, lease_s=LEASE_S, clock=clock, observer=_Observer(),
        )  # fmt: skip
        self._runner = StepRunner(self.table, DraftEngine(name, ledger, rng), VOCAB_ROWS, clock)  # type: ignore[arg-type]

    def answer(self, request: pb.DraftRequest, with_blocks: bool) -> pb.DraftResponse:
        captured = decode_captured(request, torch.float32, WIDTH)
        step = decode_step(request)
        reply = self._runner.run(request.target_instance_id, step, captured, with_blocks=with_blocks)
        return encode_reply(request, reply, self.name, 0.0)


class SimulatedLink:
    """A Link whose network and drafter are events on a time line."""

    def __init__(
        self,
        clock: Clock,
        ledger: Ledger,
        rng: random.Random,
        chances: Chances,
        *,
        num_pages: int,
        num_sessions_max: int,
    ) -> None:
        self.status = DrafterStatus(ledger, clock)
        self.life_posted_to = ""
        self._clock, self._ledger, self._rng, self._chances = clock, ledger, rng, chances
        self._new_life = lambda name: DrafterLife(
            name, clock, ledger, rng, num_pages=num_pages, num_sessions_max=num_sessions_max
        )
        self._names = (f"life-{i}" for i in itertools.count())
        self.life = self._new_life(next(self._names))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._dead_until = self._hung_until = self._differs_until = clock()
        self._slowness_s = 0.0
        self._busy_until = self._arrives_last = self._returns_last = clock()
        self._num_arriving = 0
        self._num_unanswered = 0
        self._answer_by: float | None = None
        self._at(clock(), self._probe)

    def close(self) -> None:
        """Nothing to stop."""

    # --- time ----------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Let time pass, and everything happen that falls into it."""
        self._run_until(self._clock.now + seconds, lambda: False)

    def wait_for_replies(self) -> None:
        """As `collect` would: until all is answered or the deadline."""
        if self._answer_by is not None:
            self._run_until(self._answer_by, lambda: self._num_unanswered == 0 or self.status.stream is None)
        self._answer_by = None

    def _run_until(self, until: float, done: Callable[[], bool]) -> None:
        while self._events and self._events[0][0] <= until and not done():
            when, _, happen = heapq.heappop(self._events)
            self._clock.now = max(self._clock.now, when)
            happen()
        if not done():
            self._clock.now = max(self._clock.now, until)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    # --- what goes wrong -----------------------------------------------------------------------------

    def trouble(self) -> None:
        """Maybe something happens to the drafter or the connection."""
        now, draw, chances = self._clock.now, self._rng.random, self._chances
        if draw() < chances.kill:
            self.life = self._new_life(next(self._names))
            self._dead_until = now + self._rng.uniform(0.0, 2.0)
            self.status.ended("killed")
        if draw() < chances.lose_stream:
            self.status.ended("lost")
        if draw() < chances.hang:
            self._hung_until = now + self._rng.uniform(0.0, 2.0)
        if draw() < chances.mismatch:
            self._differs_until = now + self._rng.uniform(0.0, 2.0)
            self.status.ended("replaced")
        self._slowness_s = self._rng.uniform(0.0, 0.3) if draw() < chances.slow else 0.0

    def _probe(self) -> None:
        if self.status.stream is None:
            wait_s = self.status.probe_in_s()
            if wait_s == 0:
                self._shake_hands()
        self._at(self._clock.now + 0.02, self._probe)

    def _shake_hands(self) -> None:
        now = self._clock.now
        if now < max(self._dead_until, self._hung_until):
            self.status.ended("UNAVAILABLE")
        elif now < self._differs_until:
            self.status.ended("contracts differ", [Mismatch("hidden_size", WIDTH, WIDTH + 1)])
        else:
            self.life.table.close_instance("target")
            agreement = Agreement(self.life.name, DRAFT, self.life.num_sessions_max)
            self._ledger.num_connections += 1
            stream = DrafterStream(agreement, lambda: self._send(stream))
            self._num_unanswered = 0
            self.status.connected(stream)

    # --- the way of a message --------------------------------------------------------------------------

    def _send(self, stream: DrafterStream) -> None:
        for request in stream.take_outgoing():
            self.life_posted_to = stream.agreement.drafter_instance_id
            self._answer_by = self._clock.now + DEADLINE_S if request.drafts else None
            self._num_unanswered += 1
            self._ledger.require(self._num_unanswered <= limits.MESSAGES_IN_FLIGHT_MAX, "too many in flight")
            wire = request.SerializeToString()
            self._arrives_last = max(self._clock.now, self._arrives_last) + self._rng.uniform(1e-4, 3e-3)
            self._num_arriving += 1
            self._at(self._arrives_last, partial(self._arrive, stream, self.life, wire))

    def _arrive(self, stream: DrafterStream, life: DrafterLife, wire: bytes) -> None:
        """The message waits for the drafter's engine. It arrives also when its stream is gone by now."""
        now = self._clock.now
        started = max(now, self._busy_until, self._hung_until)
        self._busy_until = started + self._rng.uniform(1e-4, 2e-3) + self._slowness_s
        num_arrived = self._num_arriving
        self._at(self._busy_until, lambda: self._work(stream, life, wire, num_arrived))

    def _work(self, stream: DrafterStream, life: DrafterLife, wire: bytes, num_arrived: int) -> None:
        self._num_arriving -= 1
        if life is not self.life or self._clock.now < self._dead_until:
            return
        request = pb.DraftRequest.FromString(wire)
        newer_waits = self._num_arriving > 0 and self._rng.random() < 0.5
        reply = life.answer(request, with_blocks=not newer_waits)
        if self._rng.random() < self._chances.repeat:
            reply = life.answer(request, with_blocks=not newer_waits)
        if self._rng.random() < self._chances.spoil_reply:
            self._spoil(life, request, reply)
        self._returns_last = max(self._clock.now, self._returns_last) + self._rng.uniform(1e-4, 3e-3)
        self._at(self._returns_last, lambda: self._return(stream, reply))

    def _return(self, stream: DrafterStream, reply: pb.DraftResponse) -> None:
        if not stream.is_shut:
            self._num_unanswered -= 1
            try:
                stream.deliver(reply)
            except PeerFault as fault:
                self._ledger.require(False, f"an honest reply was refused: {fault}")

    def _spoil(self, life: DrafterLife, request: pb.DraftRequest, reply: pb.DraftResponse) -> None:
        """A drafter that breaks its word. Nothing in such a reply may be used where it shows."""
        if not reply.outcomes:
            return
        outcome = self._rng.choice(reply.outcomes)
        kind = self._rng.randrange(6)
        if kind == 0:
            reply.step_id += self._rng.choice([-1, 1])
        elif kind == 1:
            reply.drafter_instance_id = "someone"
        elif kind == 2:
            reply.drafts.content = reply.drafts.content[:-1]
        elif kind == 3:
            reply.drafts.content = b"\xff" * len(reply.drafts.content)
        elif kind == 4:
            outcome.outcome = pb.Outcome.ValueType(self._rng.randint(2, 10))
        else:
            outcome.context_len += 1
        for block in request.drafts:
            if kind < 4 or block.session_id == outcome.session_id:
                for name, asker, position in self._ledger.drafts:
                    place = (life.name, block.position, block.anchor)
                    if (name, position, truth(asker, position)) == place:
                        self._ledger.drafts[name, asker, position] = []
