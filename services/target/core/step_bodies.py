"""What a launch runs on the device, as two bodies for graphs: prompt rows, and blocks of lanes that decode.

A body reads the control buffers and the lanes, and writes K/V, lanes, results and, when a drafter follows,
the ring. It allocates nothing and never waits. Knows kernels and their order; nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from common.handoff.ring import Ring
from common.kernels.extend_rows import commit_extends, stage_extends
from common.kernels.lanes import LaneState, Published, apply_updates
from common.kernels.verify import RESULT_WORDS, BlockBatch, accept_blocks, stage_blocks
from common.layers.kernel_decoder import PagedRows
from common.layers.kernel_linear import launches_may_overlap
from services.target.core.control_buffer import ExtendControl, LaneControl
from services.target.core.extend_sizes import ExtendSize
from services.target.core.step_buffers import StepBuffers

if TYPE_CHECKING:
    from services.target.model.kernel_llama import KernelLlama

# By the key of its graph.
Bodies = list[tuple[Hashable, Callable[[], None]]]


@dataclass(frozen=True)
class StepMemory:
    """What both bodies share. extend_results `[extends_max, 2]` and block_results (flat) are int32."""

    model: KernelLlama
    kv: torch.Tensor
    lanes: LaneState
    lane_control: LaneControl
    extend_control: ExtendControl
    extend_results: torch.Tensor
    block_results: torch.Tensor
    page_size: int
    positions_max: int

    @property
    def pdl(self) -> bool:
        return launches_may_overlap(self.model.device)

    def apply_updates(self) -> None:
        control = self.lane_control
        apply_updates(control.device, control.first_join, self.lanes, pdl=self.pdl)


@dataclass(frozen=True)
class HandOver:
    """Where a step leaves what the drafter needs: layers to capture, and the ring."""

    captured_layer_ids: tuple[int, ...]
    ring: Ring

    @property
    def published(self) -> Published:
        return Published(self.ring.base, self.ring.count, self.ring.anchor)


def extend_body(
    memory: StepMemory, buffers: StepBuffers, num_rows: int, num_extends: int, handover: HandOver | None
) -> None:
    """Run num_rows prompt rows of num_extends prompts; where a prompt ends, its lane gets an anchor."""
    m, pdl = memory, memory.pdl
    batch, ragged = m.extend_control.batch(num_rows, num_extends)
    staged = buffers.staged.first(num_rows, num_extends, num_extends)
    last_rows, last_hidden = buffers.last_rows[:num_extends], buffers.last_hidden[:num_extends]
    hidden = buffers.hidden[:num_rows]
    m.apply_updates()
    stage_extends(
        batch, m.lanes, staged, last_rows, page_size=m.page_size, positions_max=m.positions_max, pdl=pdl
    )
    m.model.forward(
        batch.ids, m.kv,
        PagedRows(staged.positions, staged.slots, staged.page_table, staged.kv_lens, ragged), hidden,
        None if handover is None else handover.ring.extend_captured[:num_rows],
        () if handover is None else handover.captured_layer_ids,
    )  # fmt: skip
    torch.index_select(hidden, 0, last_rows, out=last_hidden)
    chosen, finite = buffers.choose(m.model, last_hidden)
    commit_extends(
        chosen, finite, batch, m.lanes, m.extend_results[:num_extends],
        None if handover is None else handover.published, pdl=pdl,
    )  # fmt: skip


def block_body(
    memory: StepMemory,
    buffers: StepBuffers,
    num_lanes: int,
    rows_each: int,
    handover: HandOver | None,
    synthetic_accepted: float | None,
) -> None:
    """Run a block of rows_each rows for each lane; accept what of its draft is right."""
    m, pdl = memory, memory.pdl
    num_rows = num_lanes * rows_each
    staged, num_clamped = buffers.staged.first(num_rows, num_lanes, num_rows), buffers.num_clamped[:num_lanes]
    hidden = buffers.hidden[:num_rows]
    control = m.lane_control
    batch = BlockBatch(
        control.lanes[:num_lanes], control.draft_rows[:num_lanes],
        control.device.view(1, -1) if handover is None else handover.ring.drafts, control.device,
    )  # fmt: skip
    m.apply_updates()
    stage_blocks(
        batch, m.lanes, staged, num_clamped, vocab_rows=m.model.vocab_rows, page_size=m.page_size,
        positions_max=m.positions_max, pdl=pdl,
    )  # fmt: skip
    m.model.forward(
        staged.ids, m.kv,
        PagedRows(staged.positions, staged.slots, staged.page_table, staged.kv_lens, rows_each), hidden,
        None if handover is None else handover.ring.verify_captured[:num_rows],
        () if handover is None else handover.captured_layer_ids,
    )  # fmt: skip
    chosen, finite = buffers.choose(m.model, hidden)
    shape = num_lanes, rows_each
    width = rows_each + RESULT_WORDS
    accept_blocks(
        chosen.view(shape), finite.view(shape), batch, m.lanes, staged, num_clamped,
        m.block_results[: num_lanes * width].view(num_lanes, width),
        None if handover is None else handover.published, synthetic_accepted=synthetic_accepted, pdl=pdl,
    )  # fmt: skip


def extend_bodies(
    memory: StepMemory, buffers: StepBuffers, sizes: Sequence[ExtendSize], handover: HandOver | None
) -> Bodies:
    """One for each size (rising), the largest first."""
    return [(size, partial(extend_body, memory, buffers, *size, handover)) for size in reversed(sizes)]


def block_bodies(
    memory: StepMemory,
    buffers: StepBuffers,
    lane_buckets: Sequence[int],
    rows_each: int,
    handover: HandOver | None,
    synthetic_accepted: float | None,
) -> Bodies:
    """One for each number of lanes (rising), the largest first."""
    return [
        (n, partial(block_body, memory, buffers, n, rows_each, handover, synthetic_accepted))
        for n in reversed(lane_buckets)
    ]
