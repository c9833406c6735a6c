"""A device runner over a fake device, and the target's side of the ring."""

from __future__ import annotations

from typing import Any

import torch

from common.handoff.ring import Ring, RingShape
from common.handoff.transport import Close, DeviceRow, DeviceStep, Extend, Open, Outcome
from services.drafter.device_link import DeviceLink
from services.drafter.device_runner import DeviceRunner
from services.drafter.session_table import SessionTable
from services.drafter.step import StepReply
from tests.builders_drafter import ManualClock, build_table
from tests.fakes_ring import OWNER_TOKENS, FakeFlags, FakeGpu, FakeRingEngine

BLOCK_SIZE = 4
NUM_ROWS = 4
EXTEND_ROWS = 16


def small_ring(num_rows: int = NUM_ROWS) -> RingShape:
    """A ring whose rows are (owner, position)."""
    return RingShape(num_rows, BLOCK_SIZE, BLOCK_SIZE - 1, 2, torch.float32, EXTEND_ROWS)


def owned_rows(owner: float, position: int, count: int) -> torch.Tensor:
    """Captured rows `[count, 2]` of an owner, from a position on."""
    positions = torch.arange(position, position + count, dtype=torch.float32)
    return torch.stack([torch.full_like(positions, owner), positions], dim=1)


def fill_row(ring: Ring, i: int, owner: int, base: int, count: int, *, is_finite: bool = True) -> None:
    """What the target's verify leaves in a batch row: accepted rows of the owner, then rejected ones."""
    rows = owned_rows(owner, base, BLOCK_SIZE)
    rows[count:, 0] = -1.0
    if not is_finite:
        rows[0, 0] = float("nan")
    ring.verify_captured[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE] = rows
    ring.base[i], ring.count[i] = base, count
    ring.anchor[i] = anchor_of(owner, base + count)


def anchor_of(owner: int, position: int) -> int:
    return owner * OWNER_TOKENS + position


def draft_of(owner: int, position: int) -> list[int]:
    """What the fake drafts after an owner's anchor there, if all of its context is right."""
    return [anchor_of(owner, position) + k for k in range(1, BLOCK_SIZE)]


class RingRig:
    """One link of a target called "target"."""

    def __init__(self, **table: Any) -> None:
        settings = {"num_pages": 32, "page_size": 4, "context_len_max": 60, "num_sessions_max": 4} | table
        self.clock = ManualClock()
        self.table: SessionTable = build_table(
            has_lanes=True, block_size=BLOCK_SIZE, clock=self.clock, **settings
        )
        self.gpu = FakeGpu()
        self.engine = FakeRingEngine(
            self.gpu, num_lanes=settings["num_sessions_max"], page_size=settings["page_size"],
            block_size=BLOCK_SIZE, context_len_max=settings["context_len_max"],
        )  # fmt: skip
        self.ring = Ring.local(small_ring(), "cpu")
        self.runner = DeviceRunner(self.table, self.engine, BLOCK_SIZE)
        self.link = self.new_link()

    @property
    def flags(self) -> FakeFlags:
        flags = self.link.flags
        assert isinstance(flags, FakeFlags)
        return flags

    def new_link(self) -> DeviceLink:
        link = DeviceLink("target", self.ring, FakeFlags(self.gpu))
        self.runner.attach(link)
        return link

    def launch(self, **parts: Any) -> int:
        """Post a step with the next sequence, which is returned."""
        sequence = self.link.last_sequence + 1
        self.runner.launch(self.link, DeviceStep(sequence, **parts))
        return sequence

    def run(self, **parts: Any) -> dict[int, Outcome]:
        """Post a step whose states are in the ring, and finish it; outcomes by session."""
        self.flags.set_ready(self.launch(**parts))
        return outcomes(self.finish())

    def finish(self) -> StepReply:
        return self.runner.finish(self.link)

    def drafts(self, i: int) -> list[int]:
        return self.ring.drafts[i].tolist()

    def extend(self, session_id: int, owner: int, position: int, count: int, row: int = 0) -> Extend:
        """Captured rows of a prompt, put into the ring at a row; the extend that names them."""
        self.ring.extend_captured[row : row + count] = owned_rows(owner, position, count)
        return Extend(session_id, 0, position, row, row + count)

    def begin(self, session_id: int, owner: int, prompt_len: int, i: int = 0) -> dict[int, Outcome]:
        """Open a session with its prompt, and draft after it in batch row i."""
        fill_row(self.ring, i, owner, prompt_len, 0)
        return self.run(
            opens=[Open(session_id, 0, 0)],
            extends=[self.extend(session_id, owner, 0, prompt_len)],
            rows=[*[None] * i, DeviceRow(session_id, 0, prompt_len, prompt_len, False)],
        )

    def check(self) -> None:
        """Nothing is lost (I3)."""
        assert self.table.num_pages_unaccounted == 0
        assert self.table.num_lanes_unaccounted == 0


def outcomes(reply: StepReply) -> dict[int, Outcome]:
    return {verdict.session_id: verdict.outcome for verdict in reply.verdicts}


def close(session_id: int, epoch: int = 0) -> Close:
    return Close(session_id, epoch)
