"""One message of a target, done: closes, opens, one append for all extends, one draft for all blocks.

Composes the session table with the engine. What a target got wrong is an outcome of that session alone.
Must not know protobuf or streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from common.handoff.transport import Outcome
from services.drafter.engine import Block, DraftEngine
from services.drafter.session import SessionKey
from services.drafter.session_table import SessionTable


class Close(NamedTuple):
    session_id: int
    epoch: int


class Open(NamedTuple):
    session_id: int
    epoch: int
    start_position: int


class Extend(NamedTuple):
    """The next num_rows rows of the message's captured tensor belong at `position`."""

    session_id: int
    epoch: int
    position: int
    num_rows: int


class WantedBlock(NamedTuple):
    session_id: int
    epoch: int
    position: int
    anchor: int


@dataclass(frozen=True)
class DraftStep:
    """What a message asks. captured `[sum of num_rows, num_captured_layers * hidden_size]` or None when
    nothing is extended; its type, width and number of rows are already true."""

    target_instance_id: str
    closes: list[Close] = field(default_factory=list)
    opens: list[Open] = field(default_factory=list)
    extends: list[Extend] = field(default_factory=list)
    captured: torch.Tensor | None = None
    wanted: list[WantedBlock] = field(default_factory=list)


@dataclass
class Verdict:
    """What became of a session: context_len is the end of its context afterwards, draft_row its row in
    the drafts."""

    session_id: int
    epoch: int
    outcome: Outcome = Outcome.OK
    context_len: int = 0
    draft_row: int | None = None


@dataclass(frozen=True)
class StepReply:
    """Verdicts in the order in which the message named sessions; drafts `[blocks, num_draft_tokens]`
    int32, or None when there is no block."""

    verdicts: list[Verdict]
    drafts: torch.Tensor | None = None
    num_context_rows: int = 0
    ingest_s: float = 0.0
    draft_s: float = 0.0


class StepRunner:
    """Runs messages one after another, on one thread."""

    def __init__(
        self,
        table: SessionTable,
        engine: DraftEngine,
        vocab_rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._engine = engine
        self._vocab_rows = vocab_rows
        self._clock = clock

    def run(self, step: DraftStep, *, with_blocks: bool = True) -> StepReply:
        """Apply a message. with_blocks False appends context and answers BUSY for each block."""
        verdicts = name_sessions(step)
        for close in step.closes:
            self._table.close(SessionKey(step.target_instance_id, close.session_id), close.epoch)
        self._open(step, verdicts)
        began_s = self._clock()
        num_context_rows = self._extend(step, verdicts)
        ingested_s = self._clock()
        drafts = self._draft(step, verdicts, with_blocks)
        drafted_s = self._clock()
        for session_id, verdict in verdicts.items():
            verdict.context_len = self._table.context_len(SessionKey(step.target_instance_id, session_id))
        return StepReply(
            list(verdicts.values()), drafts, num_context_rows, ingested_s - began_s, drafted_s - ingested_s
        )

    def _open(self, step: DraftStep, verdicts: dict[int, Verdict]) -> None:
        for wish in step.opens:
            verdict = verdicts[wish.session_id]
            if verdict.outcome is Outcome.OK:
                key = SessionKey(step.target_instance_id, wish.session_id)
                verdict.outcome = self._table.open(key, wish.epoch, wish.start_position)

    def _extend(self, step: DraftStep, verdicts: dict[int, Verdict]) -> int:
        rows: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        owners: list[Verdict] = []
        first_row = 0
        for extend in step.extends:
            verdict = verdicts[extend.session_id]
            if verdict.outcome is Outcome.OK:
                key = SessionKey(step.target_instance_id, extend.session_id)
                verdict.outcome, taken = self._table.append_at(
                    key, extend.epoch, extend.position, extend.num_rows
                )
                slots += taken
                rows += range(first_row, first_row + len(taken))
                positions += range(extend.position, extend.position + len(taken))
                owners += [verdict] * len(taken)
            first_row += extend.num_rows
        if not rows or step.captured is None:
            return 0
        captured = step.captured if len(rows) == len(step.captured) else step.captured[rows]
        finite = self._engine.append_to_host(captured, positions, slots)
        if not all(finite):
            self._abandon(step, {v.session_id: v for v, ok in zip(owners, finite, strict=True) if not ok})
        return len(rows)

    def _abandon(self, step: DraftStep, spoiled: dict[int, Verdict]) -> None:
        for session_id, verdict in spoiled.items():
            verdict.outcome = Outcome.NON_FINITE
            self._engine.clean(self._table.abandon(SessionKey(step.target_instance_id, session_id)))

    def _draft(self, step: DraftStep, verdicts: dict[int, Verdict], with_blocks: bool) -> torch.Tensor | None:
        blocks: list[Block] = []
        for wanted in step.wanted:
            verdict = verdicts[wanted.session_id]
            if verdict.outcome is not Outcome.OK:
                continue
            if wanted.anchor >= self._vocab_rows:
                verdict.outcome = Outcome.INVALID_FIELD
                continue
            key = SessionKey(step.target_instance_id, wanted.session_id)
            verdict.outcome, session = self._table.reserve_block(key, wanted.epoch, wanted.position)
            if session is None:
                continue
            if not with_blocks:
                verdict.outcome = Outcome.BUSY
                continue
            verdict.draft_row = len(blocks)
            blocks.append(Block(
                wanted.anchor, wanted.position, session.num_rows, session.pages.pages,
                self._table.block_slots(session),
            ))  # fmt: skip
        return self._engine.draft_to_host(blocks) if blocks else None


def name_sessions(step: DraftStep) -> dict[int, Verdict]:
    """A verdict for each session that the message opens, extends or wants a block of.

    INVALID_FIELD for one that it names twice in the same role, under two epochs, or with no rows: which
    of the two was meant cannot be known, and writing a slot twice in one append has no defined result.
    """
    verdicts: dict[int, Verdict] = {}
    for wishes in (step.opens, step.extends, step.wanted):
        _name(wishes, verdicts)
    for extend in step.extends:
        if extend.num_rows == 0:
            verdicts[extend.session_id].outcome = Outcome.INVALID_FIELD
    return verdicts


def _name(
    wishes: Iterable[Open] | Iterable[Extend] | Iterable[WantedBlock], verdicts: dict[int, Verdict]
) -> None:
    seen = set()
    for wish in wishes:
        verdict = verdicts.setdefault(wish.session_id, Verdict(wish.session_id, wish.epoch))
        if wish.session_id in seen or wish.epoch != verdict.epoch:
            verdict.outcome = Outcome.INVALID_FIELD
        seen.add(wish.session_id)


def refuse(step: DraftStep, outcome: Outcome) -> StepReply:
    """The reply to a message of which nothing is done."""
    verdicts = name_sessions(step)
    for verdict in verdicts.values():
        verdict.outcome = outcome
    return StepReply(list(verdicts.values()))
