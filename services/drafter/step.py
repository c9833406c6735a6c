"""One message of a target, done: closes, opens, one append for all extends, one draft for all blocks.

Composes the session table with the engine. What a target got wrong is an outcome of that session alone.
Must not know protobuf or streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from common.handoff.transport import Block, DeviceRow, Extend, Open, Outcome, Step
from services.drafter.engine import PlacedBlock
from services.drafter.session import SessionKey
from services.drafter.session_table import SessionTable


@dataclass
class Verdict:
    """What became of a session: context_len is the end of its context afterwards, draft_row its row in
    the drafts."""

    session_id: int
    epoch: int
    outcome: Outcome = Outcome.OK
    context_len: int = 0
    draft_row: int | None = None


# By session id, within one message of one target.
Keys = dict[int, SessionKey]
Verdicts = dict[int, Verdict]


@dataclass(frozen=True)
class StepReply:
    """Verdicts in the order in which the message named sessions; drafts `[num_blocks, num_draft_tokens]`
    int32, or None when there is no block or the drafts are in the hand-off ring."""

    verdicts: list[Verdict]
    drafts: torch.Tensor | None = None
    num_blocks: int = 0
    num_context_rows: int = 0
    ingest_s: float = 0.0
    draft_s: float = 0.0


class InlineEngine(Protocol):
    """What an engine does for inline messages; engine.DraftEngine says how."""

    def append_to_host(
        self, captured: torch.Tensor, positions: list[int], slots: list[int]
    ) -> list[bool]: ...

    def draft_to_host(self, blocks: Sequence[PlacedBlock]) -> torch.Tensor: ...

    def clean(self, pages: Sequence[int]) -> None: ...


class StepRunner:
    """Runs messages one after another, on one thread."""

    def __init__(
        self,
        table: SessionTable,
        engine: InlineEngine,
        vocab_rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._engine = engine
        self._vocab_rows = vocab_rows
        self._clock = clock

    def run(
        self, target_instance_id: str, step: Step, captured: torch.Tensor | None, *, with_blocks: bool = True
    ) -> StepReply:
        """Apply a message of this target.

        captured `[N, num_captured_layers * hidden_size]` holds the rows that the extends name, or is None
        when they name none; its type, width and number of rows are already true. with_blocks False
        appends context and answers BUSY for each block.
        """
        verdicts = name_sessions(step)
        keys = {session_id: SessionKey(target_instance_id, session_id) for session_id in verdicts}
        for close in step.closes:
            self._table.close(SessionKey(target_instance_id, close.session_id), close.epoch)
        open_sessions(self._table, step.opens, keys, verdicts)
        began_s = self._clock()
        num_context_rows = self._extend(step.extends, captured, keys, verdicts)
        ingested_s = self._clock()
        drafts = self._draft(step.blocks, keys, verdicts, with_blocks)
        drafted_s = self._clock()
        for session_id, verdict in verdicts.items():
            verdict.context_len = self._table.context_len(keys[session_id])
        return StepReply(
            list(verdicts.values()),
            drafts,
            0 if drafts is None else len(drafts),
            num_context_rows,
            ingested_s - began_s,
            drafted_s - ingested_s,
        )

    def _extend(
        self, extends: list[Extend], captured: torch.Tensor | None, keys: Keys, verdicts: Verdicts
    ) -> int:
        rows: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        owners: list[Verdict] = []
        for extend in extends:
            verdict = verdicts[extend.session_id]
            if verdict.outcome is Outcome.OK:
                verdict.outcome, taken = self._table.append_at(
                    keys[extend.session_id], extend.epoch, extend.position, extend.num_rows
                )
                slots += taken
                rows += range(extend.row_start, extend.row_start + len(taken))
                positions += range(extend.position, extend.position + len(taken))
                owners += [verdict] * len(taken)
        if not rows or captured is None:
            return 0
        # The common case, without a copy: every row of the message, in order.
        named = captured if rows == list(range(len(captured))) else captured[rows]
        finite = self._engine.append_to_host(named, positions, slots)
        if not all(finite):
            spoiled = {v.session_id: v for v, ok in zip(owners, finite, strict=True) if not ok}
            for session_id, verdict in spoiled.items():
                verdict.outcome = Outcome.NON_FINITE
                self._engine.clean(self._table.abandon(keys[session_id]))
        return len(rows)

    def _draft(
        self, wanted_blocks: list[Block], keys: Keys, verdicts: Verdicts, with_blocks: bool
    ) -> torch.Tensor | None:
        blocks: list[PlacedBlock] = []
        for wanted in wanted_blocks:
            verdict = verdicts[wanted.session_id]
            if verdict.outcome is not Outcome.OK:
                continue
            if wanted.anchor >= self._vocab_rows:
                verdict.outcome = Outcome.INVALID_FIELD
                continue
            verdict.outcome, session = self._table.reserve_block(
                keys[wanted.session_id], wanted.epoch, wanted.position
            )
            if session is None:
                continue
            if not with_blocks:
                verdict.outcome = Outcome.BUSY
                continue
            verdict.draft_row = len(blocks)
            blocks.append(PlacedBlock(
                wanted.anchor, wanted.position, session.num_rows, session.pages.pages,
                self._table.block_slots(session),
            ))  # fmt: skip
        return self._engine.draft_to_host(blocks) if blocks else None


def name_sessions(step: Step) -> Verdicts:
    """A verdict for each session that the message opens, extends or wants a block of.

    INVALID_FIELD for one that it names twice in the same role, under two epochs, or with no rows: which
    of the two was meant cannot be known, and writing a slot twice in one append has no defined result.
    """
    verdicts: Verdicts = {}
    for wishes in (step.opens, step.extends, step.blocks):
        name_in_role(wishes, verdicts)
    for extend in step.extends:
        if extend.num_rows == 0:
            verdicts[extend.session_id].outcome = Outcome.INVALID_FIELD
    return verdicts


def name_in_role(
    wishes: Iterable[Open] | Iterable[Extend] | Iterable[Block] | Iterable[DeviceRow], verdicts: Verdicts
) -> None:
    """Add a verdict for each session that is new; INVALID_FIELD for one that stands there twice, or under
    another epoch than before."""
    seen = set()
    for wish in wishes:
        verdict = verdicts.setdefault(wish.session_id, Verdict(wish.session_id, wish.epoch))
        if wish.session_id in seen or wish.epoch != verdict.epoch:
            verdict.outcome = Outcome.INVALID_FIELD
        seen.add(wish.session_id)


def open_sessions(table: SessionTable, opens: list[Open], keys: Keys, verdicts: Verdicts) -> None:
    """Begin the sessions that a message opens."""
    for wish in opens:
        verdict = verdicts[wish.session_id]
        if verdict.outcome is Outcome.OK:
            verdict.outcome = table.open(keys[wish.session_id], wish.epoch, wish.start_position)


def refuse(step: Step, outcome: Outcome) -> StepReply:
    """The reply to a message of which nothing is done."""
    verdicts = name_sessions(step)
    for verdict in verdicts.values():
        verdict.outcome = outcome
    return StepReply(list(verdicts.values()))
