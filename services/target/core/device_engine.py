"""Runs launches on a GPU without ever waiting for it: one upload, one or two graphs, one download each.

Positions, anchors and accept lengths live on the device, so a launch can follow another whose results
nobody has seen. Owns the K/V storage, the arrays by lane and the graphs. Knows lanes and pages, not
requests; nothing of how drafts get into the ring. On a CPU the same bodies run eagerly, in Triton's
interpreter: for tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from common import limits
from common.contract import DraftContract
from common.device import is_out_of_memory
from common.graphs import Graphs, MemoryReport, bucket_for, buckets_up_to
from common.handoff.ring import Ring
from common.kernels.lanes import LaneState
from common.kernels.verify import RESULT_WORDS
from common.layers.rope import POSITIONS_BEYOND_CONTEXT
from common.pinned_ring import PinnedRing, Words
from services.target.core.captured_rows import CapturedRows
from services.target.core.control_buffer import (
    LAUNCHES_IN_FLIGHT_MAX,
    ExtendControl,
    LaneControl,
    join_words,
)
from services.target.core.device_launch import Launch, Results, Ticket
from services.target.core.draft_fit import DraftFit
from services.target.core.extend_sizes import extend_size_for, extend_sizes
from services.target.core.launch_clock import LaunchClock
from services.target.core.request import SamplingParams
from services.target.core.step_bodies import HandOver, StepMemory, block_bodies, extend_bodies
from services.target.core.step_buffers import StepBuffers

if TYPE_CHECKING:
    from services.target.model.kernel_llama import KernelLlama


def positions_max(max_len: int) -> int:
    """Positions and keys that the engine's rows reach: what its model must be made for."""
    return max_len + POSITIONS_BEYOND_CONTEXT


def _nothing() -> None:
    """Nothing has to stand there."""


class DeviceEngine:
    """Used by one thread. `stream` carries all of its work, in order: others may enqueue between launches."""

    def __init__(
        self,
        model: KernelLlama,
        *,
        num_pages: int,
        page_size: int,
        num_lanes: int,
        max_len: int,
        extend_rows_max: int,
        extends_max: int = 32,
        synthetic_accept: float | None = None,
        lane_buckets: Sequence[int] = (),
        extend_buckets: Sequence[int] = (),
        on_captured: Callable[[int, int], None] = lambda done, total: None,
        on_memory: Callable[[MemoryReport], None] = lambda report: None,
    ) -> None:
        """Allocates, and captures the graphs of plain decoding and of extends; on_captured hears how far it
        is, on_memory what is allocated once it is, and again when drafting was prepared.

        num_pages: usable pages, the sentinel comes on top. num_lanes: requests that run at once. max_len:
        tokens of a request. extend_rows_max, extends_max: prompt rows and prompts of a launch.
        synthetic_accept: for measurements, the mean accept length that verifies shall have. lane_buckets,
        extend_buckets: batch sizes and prompt rows that get graphs, rising; where none are given, enough for
        little padding at any load.
        """
        device = model.device
        cuda = device.type == "cuda"
        self.stream: torch.cuda.Stream | None = torch.cuda.Stream(device) if cuda else None
        self._model = model
        self._num_lanes, self._page_size = num_lanes, page_size
        self._extends_max, self._extend_rows_max = extends_max, extend_rows_max
        self._synthetic_accepted = None if synthetic_accept is None else synthetic_accept - 1
        self._on_captured, self._on_memory = on_captured, on_memory
        self._lane_buckets = list(lane_buckets) or buckets_up_to(num_lanes)
        self._extend_sizes = extend_sizes(list(extend_buckets) or buckets_up_to(extend_rows_max), extends_max)
        assert self._lane_buckets[-1] == num_lanes and self._extend_sizes[-1].num_rows == extend_rows_max
        num_pages_each = -(-positions_max(max_len) // page_size)
        self._num_pages_each = num_pages_each

        num_layers, num_kv_heads, head_dim = model.kv_shape
        # Zeros, so that memory never written is finite; reads are bounded by length anyway.
        kv = torch.zeros(
            (num_layers, 2, (num_pages + 1) * page_size, num_kv_heads, head_dim),
            dtype=model.dtype, device=device,
        )  # fmt: skip
        results_max = 2 * extends_max + num_lanes * (limits.BLOCK_SIZE_MAX + RESULT_WORDS)
        self._results = PinnedRing(results_max, LAUNCHES_IN_FLIGHT_MAX, device)
        self._lane_control = LaneControl(num_lanes, num_pages, num_pages_each, device)
        group = model.config.num_heads // num_kv_heads
        self._extend_control = ExtendControl(
            extend_rows_max, extends_max, num_lanes, group, model.dtype, device
        )  # fmt: skip
        self._memory = StepMemory(
            model, kv, LaneState.allocate(num_lanes, num_pages_each, device), self._lane_control,
            self._extend_control, self._results.device[: 2 * extends_max].view(extends_max, 2),
            self._results.device[2 * extends_max :], page_size, positions_max(max_len),
        )  # fmt: skip
        self._extend_buffers = StepBuffers.allocate(
            model, extend_rows_max, extends_max, extends_max, num_pages_each, device
        )
        self._plain_buffers = self._block_buffers(num_lanes, device)
        self._draft_buffers: StepBuffers | None = None
        self._captured_on_host: CapturedRows | None = None
        self._fit = DraftFit(self._free_bytes)

        self._graph_bytes = {"plain": 0, "drafting": 0}
        self._clock = LaunchClock(cuda)
        self._number = 0
        self._unread: set[int] = set()
        self._joins: dict[int, Words] = {}
        self._drafts: Words | None = None
        self._draft: DraftContract | None = None
        self._handover: HandOver | None = None
        self._plain = self._capture(self._plain_buffers, 1, None)
        self._drafting: Graphs | None = None
        # Its kernel is loaded when it first runs, which waits for all that the device has to do: not for a
        # drafter, then. The rest of what is not recorded are copies.
        self.zero_pages([0])
        self._wait_for_device()
        on_memory(self.memory_report())

    def prepare_drafting(self, draft: DraftContract, ring: Ring, *, by_messages: bool = False) -> None:
        """Capture the graphs that verify this draft's blocks and hand states over through this ring; make
        captured_to_host possible if by_messages. Waits for the device. Does nothing for what was prepared
        last. Raises DraftDoesNotFit: what is prepared then is the same as before, or nothing."""
        handover = self._handover
        is_prepared = handover is not None and ring is handover.ring and self._is_shaped_like(draft)
        if is_prepared and (self._captured_on_host is not None or not by_messages):
            return
        self._wait_for_device()
        num_rows, shape = self._num_lanes * draft.block_size, ring.shape
        assert (shape.block_size, shape.num_draft_tokens) == (draft.block_size, draft.num_draft_tokens)
        assert draft.num_draft_tokens == draft.block_size - 1
        assert shape.num_rows >= self._num_lanes and shape.extend_rows_max >= self._extend_rows_max
        assert shape.captured_width == len(draft.captured_layer_ids) * self._model.config.hidden_size
        if not is_prepared:
            held = self._draft_buffers.num_bytes if self._draft_buffers else 0
            planned = self._block_buffers(num_rows, torch.device("meta")).num_bytes
            # These graphs are as many as the plain ones.
            needed = max(planned, held) + self._graph_bytes["plain"]
            self._fit.require(draft, needed, held + self._graph_bytes["drafting"])
        try:
            if not is_prepared:
                self._prepare(draft, ring, num_rows)
            if by_messages:
                self._captured_on_host = CapturedRows(
                    ring, num_lanes=self._num_lanes, pinned=self.stream is not None
                )
            self._on_memory(self.memory_report())
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Not above: what was raised keeps alive what was allocated.
        self._forget_drafting()
        raise self._fit.failed(draft)

    def join(self, lane: int, sampling: SamplingParams) -> None:
        """A request takes this lane: from the next launch on it has no pages, position 0, and its tokens are
        chosen so."""
        assert 0 <= lane < self._num_lanes, f"lane {lane} of {self._num_lanes}"
        self._joins[lane] = join_words(lane, sampling)

    def set_drafts(self, drafts: list[list[int]]) -> None:
        """Drafts `[any, K]` for the next launch with drafts_inline."""
        self._drafts = np.array(drafts, np.int32)

    def launch(
        self, launch: Launch, enter: Callable[[], object] = _nothing, leave: Callable[[], object] = _nothing
    ) -> Ticket:
        """Enqueue a step. Never waits; at most LAUNCHES_IN_FLIGHT_MAX launches have results unread.

        enter and leave enqueue what has to stand before the ring is used and behind it: the copies from and
        to the host lie outside, so that they delay neither this step nor the drafter's.
        """
        drafting = launch.draft_rows is not None
        graphs = self._drafting if drafting else self._plain
        assert graphs is not None, "prepare_drafting comes first"
        assert launch.lanes or launch.extends, "nothing to run"
        rows_each = self._draft.block_size if drafting and self._draft else 1
        drafts = self._drafts if launch.drafts_inline else None
        self._check_draft_rows(launch.draft_rows or [], drafts)
        number = self._number
        assert number - LAUNCHES_IN_FLIGHT_MAX not in self._unread, f"results of launch {number} are unread"
        lane_bucket = bucket_for(self._lane_buckets, len(launch.lanes)) if launch.lanes else 0
        num_rows = sum(len(extend.token_ids) for extend in launch.extends)
        with torch.cuda.stream(self.stream):
            self._lane_control.upload(
                number, launch.lanes, launch.draft_rows or (), lane_bucket, list(self._joins.values()),
                launch.pages, drafts,
            )  # fmt: skip
            size = extend_size_for(self._extend_sizes, num_rows, len(launch.extends))
            if launch.extends:
                self._extend_control.upload(number, launch.extends, *size)
            enter()
            self._clock.begin(number)
            if launch.extends:
                graphs.replay(size)
            self._clock.split(number)
            if launch.lanes:
                graphs.replay(lane_bucket)
            leave()
            num_words = 2 * self._extends_max + len(launch.lanes) * (rows_each + RESULT_WORDS)
            self._results.download(number, num_words)
            self._clock.end(number)
        self._joins.clear()
        self._drafts = None
        self._number += 1
        self._unread.add(number)
        return Ticket(number, len(launch.extends), len(launch.lanes), rows_each, num_rows)

    def results_to_host(self, ticket: Ticket) -> Results:
        """Wait until that launch is done. Each ticket is good once."""
        self._unread.remove(ticket.number)
        times = self._clock.wait(ticket.number)
        words = self._results.words(ticket.number)
        extends = words[: 2 * ticket.num_extends].reshape(-1, 2).copy()
        width = ticket.rows_each + RESULT_WORDS
        blocks = words[2 * self._extends_max :][: ticket.num_lanes * width].reshape(-1, width).copy()
        num_accepted, finite, num_clamped = blocks[:, ticket.rows_each :].T
        return Results(
            tokens=blocks[:, : ticket.rows_each], num_accepted=num_accepted, finite=finite != 0,
            num_clamped=num_clamped, extend_tokens=extends[:, 0], extend_finite=extends[:, 1] != 0,
            extend_s=times.extend_s, verify_s=times.verify_s, gpu_s=times.total_s,
        )  # fmt: skip

    def captured_to_host(self, ticket: Ticket) -> torch.Tensor:
        """States that the last launch captured `[extend rows + S · R, W]`: those of the extends in order,
        then each lane's block. Waits for the device; overwritten by the next call."""
        assert ticket.number == self._number - 1 and self._captured_on_host is not None
        with torch.cuda.stream(self.stream):
            captured = self._captured_on_host.copy(
                ticket.num_extend_rows, ticket.num_lanes * ticket.rows_each
            )
        self._wait_for_device()
        return captured

    def zero_pages(self, pages: list[int]) -> None:
        """Overwrite pages that held numbers which were not finite, once all launches so far are done."""
        pages_of_kv = self._memory.kv.unflatten(2, (-1, self._page_size))
        with torch.cuda.stream(self.stream):
            for page in pages:
                pages_of_kv[:, :, page].zero_()

    def memory_report(self) -> MemoryReport:
        """Bytes on the device beside the weights and the model's activations."""
        verifies = self._draft_buffers.num_bytes if self._draft_buffers else 0
        return [
            ("K/V pages", self._memory.kv.nbytes),
            ("rows and logits of verifies", verifies),
            ("rows and logits of plain steps", self._plain_buffers.num_bytes),
            ("rows and logits of extends", self._extend_buffers.num_bytes),
            ("page tables by lane", self._memory.lanes.page_table.nbytes),
            ("CUDA graphs", sum(self._graph_bytes.values())),
        ]

    def _prepare(self, draft: DraftContract, ring: Ring, num_rows: int) -> None:
        self._draft = self._handover = self._drafting = self._captured_on_host = None
        if self._draft_buffers is None or self._draft_buffers.hidden.shape[0] < num_rows:
            self._draft_buffers = None
            self._draft_buffers = self._block_buffers(num_rows, self._model.device)
        handover = HandOver(draft.captured_layer_ids, ring)
        self._drafting = self._capture(self._draft_buffers, draft.block_size, handover)
        self._draft, self._handover = draft, handover

    def _forget_drafting(self) -> None:
        """Give everything of it back, to whoever else is on the device, too."""
        self._draft = self._handover = self._drafting = self._captured_on_host = self._draft_buffers = None
        self._graph_bytes["drafting"] = 0
        if self.stream is not None:
            torch.cuda.empty_cache()

    def _is_shaped_like(self, draft: DraftContract) -> bool:
        """Whether the graphs are those of this draft too: weights and mask are nothing to them."""
        last = self._draft
        return last is not None and (last.captured_layer_ids, last.block_size, last.num_draft_tokens) == (
            draft.captured_layer_ids, draft.block_size, draft.num_draft_tokens,
        )  # fmt: skip

    def _block_buffers(self, num_rows: int, device: torch.device) -> StepBuffers:
        return StepBuffers.allocate(
            self._model, num_rows, self._num_lanes, num_rows, self._num_pages_each, device
        )

    def _capture(self, buffers: StepBuffers, rows_each: int, handover: HandOver | None) -> Graphs:
        """Graphs over blocks of rows_each rows and over extends, recorded on padding."""
        self._wait_for_device()
        self._lane_control.reset()
        self._extend_control.reset()
        self._wait_for_device()
        if self.stream is not None:
            # What a draft before left in torch's cache is free, and must count so.
            torch.cuda.empty_cache()
        free_bytes = self._free_bytes()
        graphs = Graphs(self._model.device, self.stream)
        extends = extend_bodies(self._memory, self._extend_buffers, self._extend_sizes, handover)
        blocks = block_bodies(
            self._memory, buffers, self._lane_buckets, rows_each, handover, self._synthetic_accepted
        )
        graphs.capture_all((*extends, *blocks), self._on_captured)
        self._graph_bytes["drafting" if handover else "plain"] = free_bytes - self._free_bytes()
        return graphs

    def _check_draft_rows(self, rows: list[int], drafts: Words | None) -> None:
        """Each names a draft that is there; the device would read whatever lies beyond."""
        last = max(rows, default=-1)
        if last < 0:
            return
        assert self._handover is not None
        shape = self._handover.ring.shape
        given = (shape.num_rows, shape.num_draft_tokens) if drafts is None else drafts.shape
        assert last < given[0] and given[1:] == (shape.num_draft_tokens,), f"draft row {last} of {given}"

    def _wait_for_device(self) -> None:
        if self.stream is not None:
            torch.cuda.synchronize(self.stream.device)

    def _free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.stream.device)[0] if self.stream is not None else sys.maxsize
