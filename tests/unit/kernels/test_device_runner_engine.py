"""The drafter's runners over the real device engine, in Triton's interpreter, against the CPU's: sessions,
pages and lanes as the service keeps them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from common.handoff.transport import Block, Close, DeviceRow, DeviceStep, Extend, Open, Outcome, Step
from common.paged_kv import PagePool
from services.drafter.device_link import DeviceLink
from services.drafter.device_runner import DeviceRunner
from services.drafter.session_table import SessionTable
from services.drafter.step import StepReply, StepRunner
from tests.builders_drafter import ManualClock, RecordedSessions, build_draft_pair, load_drafter
from tests.draft_engine_rig import MARGIN, Sizes, build_engine, build_kernel_draft, build_ring
from tests.fakes_ring import FakeFlags, FakeGpu

SEED = 20261209
DRAFT: dict[str, Any] = {
    "num_heads": 2, "num_kv_heads": 1, "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 9, "max_len": 60,
}  # fmt: skip
SIZES = Sizes(num_pages=16, num_lanes=3)


class Draft(NamedTuple):
    """Draft tokens `[K]` and the logits `[K, vocab_rows]` that they were chosen from."""

    tokens: torch.Tensor
    logits: torch.Tensor


class Pair:
    """The device engine under a session table of its own, and the CPU's drafter, told the same."""

    def __init__(self, directory: Path) -> None:
        checkpoints = build_draft_pair(directory, SEED, **DRAFT)
        model = build_kernel_draft(*checkpoints, "cpu", SIZES)
        self.block_size, self.vocab_rows = model.config.block_size, model.config.vocab_size
        self.engine = build_engine(model, SIZES)
        self.ring = build_ring(model, SIZES)
        self.table = SessionTable(
            PagePool(SIZES.num_pages, SIZES.page_size), num_sessions_max=SIZES.num_lanes,
            context_len_max=SIZES.context_len_max, block_size=self.block_size, lease_s=30.0,
            clock=ManualClock(), observer=RecordedSessions(), has_lanes=True,
        )  # fmt: skip
        self.inline = StepRunner(self.table, self.engine, self.vocab_rows)
        self.runner = DeviceRunner(self.table, self.engine, self.block_size)
        flags = FakeFlags(FakeGpu())
        # The interpreter runs a launch at once, so the ring is always filled before.
        flags.release()
        self.link = DeviceLink("target", self.ring, flags)
        self.runner.attach(self.link)
        self.cpu = load_drafter(*checkpoints, page_size=5, num_pages=200)
        self.rng = random.Random(SEED)
        self.generator = torch.Generator().manual_seed(SEED)
        self._logits: list[torch.Tensor] = []
        compute = self.cpu.model.logits

        def recorded(hidden: torch.Tensor) -> torch.Tensor:
            self._logits.append(compute(hidden))
            return self._logits[-1]

        self.cpu.model.logits = recorded  # type: ignore[method-assign]
        self.num_clear = 0

    def captured(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.ring.shape.captured_width, generator=self.generator)

    def on_device(self, **parts: Any) -> StepReply:
        self.runner.launch(self.link, DeviceStep(self.link.last_sequence + 1, **parts))
        return self.runner.finish(self.link)

    def on_cpu(self, captured: torch.Tensor | None, **parts: Any) -> StepReply:
        reply = self.cpu.runner.run("target", Step(**parts), captured)
        assert {verdict.outcome for verdict in reply.verdicts} <= {Outcome.OK}
        return reply

    def compare(self, found: torch.Tensor, wanted: Draft) -> None:
        best = wanted.logits.topk(2, dim=-1).values
        clear = best[:, 0] - best[:, 1] > MARGIN
        assert torch.equal(found[clear], wanted.tokens[clear])
        self.num_clear += int(clear.sum())

    def prompt(self, session_id: int, position: int, count: int, row: int) -> Extend:
        """A piece of a prompt on both sides; on the device from this row of the ring on."""
        captured = self.captured(count)
        self.ring.extend_captured[row : row + count] = captured
        self.on_cpu(captured, extends=[Extend(session_id, 0, position, 0, count)])
        return Extend(session_id, 0, position, row, row + count)

    def drafts_of(self, reply: StepReply) -> list[Draft]:
        """What the CPU has just drafted."""
        assert reply.drafts is not None
        return [Draft(*pair) for pair in zip(reply.drafts, self._logits[-1], strict=True)]

    def verified(self, i: int, session_id: int, base: int, count: int) -> Draft:
        """Batch row i of a step: `count` of its rows are context. What the CPU drafts after them."""
        captured, anchor = self.captured(self.block_size), self.rng.randrange(self.vocab_rows)
        self.ring.verify_captured[i * self.block_size : (i + 1) * self.block_size] = captured
        self.ring.base[i], self.ring.count[i], self.ring.anchor[i] = base, count, anchor
        reply = self.on_cpu(
            captured[:count] if count else None,
            extends=[Extend(session_id, 0, base, 0, count)] if count else [],
            blocks=[Block(session_id, 0, base + count, anchor)],
        )
        return self.drafts_of(reply)[0]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def test_sessions_come_go_and_inherit_lanes_and_pages_and_each_drafts_as_on_the_cpu(pair: Pair) -> None:
    def open_both(session_id: int, position: int = 0) -> Open:
        pair.on_cpu(None, opens=[Open(session_id, 0, position)])
        return Open(session_id, 0, position)

    # A prompt in two pieces beside a short one; the long one's end and the short one are drafted after.
    opens = [open_both(1), open_both(2)]
    reply = pair.on_device(opens=opens, extends=[pair.prompt(1, 0, 5, 0), pair.prompt(2, 0, 3, 5)])
    assert [verdict.context_len for verdict in reply.verdicts] == [5, 3]
    extends, ends = [pair.prompt(1, 5, 8, 0)], {1: 13, 2: 3}
    for step in range(6):
        rows: list[DeviceRow | None] = []
        wanted = []
        opens, closes = [], []
        if step == 3:
            # The first leaves; its lane and pages go to a third, which begins where only the ring says.
            closes.append(Close(1, 0))
            pair.cpu.table.close_instance("target", [1])
            opens.append(open_both(3, 21))
            ends = {2: ends[2], 3: 21}
        for i, (session_id, base) in enumerate(ends.items()):
            count = 0 if step == 0 else pair.rng.randint(1, pair.block_size)
            wanted.append(pair.verified(i, session_id, base, count))
            ends[session_id] = base + count
            begins = step == 3 and session_id == 3
            rows.append(DeviceRow(session_id, 0, base, base + pair.block_size, begins))
        reply = pair.on_device(closes=closes, opens=opens, extends=extends, rows=rows)
        extends = []
        assert {verdict.outcome for verdict in reply.verdicts} == {Outcome.OK}
        assert {v.session_id: v.context_len for v in reply.verdicts} == ends
        for i, draft in enumerate(wanted):
            pair.compare(pair.ring.drafts[i], draft)
    assert pair.num_clear > 20
    assert pair.table.num_pages_unaccounted == pair.table.num_lanes_unaccounted == 0
    pair.link.is_lost = True
    pair.runner.end(pair.link)
    assert pair.table.num_pages_used == 0


def test_rows_that_are_not_finite_leave_zeroed_pages(pair: Pair) -> None:
    pair.ring.extend_captured[:4] = pair.captured(4)
    pair.ring.extend_captured[2, 3] = float("inf")
    reply = pair.on_device(opens=[Open(1, 0, 0)], extends=[Extend(1, 0, 0, 0, 4)])
    assert [verdict.outcome for verdict in reply.verdicts] == [Outcome.NON_FINITE]
    assert pair.table.num_sessions == pair.table.num_pages_used == 0
    # Pages are handed out from the first: this session's is the one that is clean now.
    kv = pair.engine._tensors.kv
    assert bool((kv[:, :, SIZES.page_size : 2 * SIZES.page_size] == 0).all())
    assert bool(kv[:, :, 3 * SIZES.page_size :].isnan().all())


def test_inline_messages_are_answered_as_on_the_cpu(pair: Pair) -> None:
    for position in (0, 7, 9):
        count = {0: 7, 7: 2, 9: 3}[position]
        captured = pair.captured(2 * count)
        parts = {
            "opens": [Open(s, 0, 0) for s in (1, 2)],
            "extends": [Extend(1, 0, position, 0, count), Extend(2, 0, position, count, 2 * count)],
            "blocks": [Block(s, 0, position + count, pair.rng.randrange(pair.vocab_rows)) for s in (1, 2)],
        }
        wanted = pair.on_cpu(captured, **parts)
        found = pair.inline.run("target", Step(**parts), captured)
        assert found.verdicts == wanted.verdicts
        assert found.drafts is not None
        for tokens, draft in zip(found.drafts, pair.drafts_of(wanted), strict=True):
            pair.compare(tokens, draft)
    assert pair.num_clear > 10
