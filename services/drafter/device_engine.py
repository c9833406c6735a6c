"""The drafter's engine on a device: captured states come from the hand-off ring, drafts go there.

All that a step depends on is decided on the device (common.kernels.draft_lanes), so a launch never waits for
anything. Knows lanes, pages and the ring; nothing of sessions, messages or flags: whoever launches puts the
waits and writes of flags around it, on `stream`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from common.graphs import Graphs, MemoryReport, bucket_for, buckets_up_to
from common.handoff.ring import Ring, RingShape
from common.kernels.draft_appends import settle_appends, stage_appends
from common.kernels.draft_lanes import DraftLanes, enter_pages, publish_drafts, stage_ring_rows
from common.layers.kernel_linear import launches_may_overlap
from services.drafter.device_inline import InlineDrafting
from services.drafter.device_tensors import DraftTensors
from services.drafter.draft_work import DraftResults, DraftWork
from services.drafter.engine import PlacedBlock
from services.drafter.launch_control import LaunchControl, LaunchTimes, Ticket

if TYPE_CHECKING:
    from services.drafter.model.kernel_dflash import KernelDFlash

# Fewest rows of a graph for appends; each further one takes twice as many.
_EXTEND_ROWS_MIN = 32


def _nothing() -> None:
    """Nothing has to stand there."""


class DeviceDraftEngine:
    """Owns the KV cache, the lanes and the graphs. Called from one thread.

    On a CPU the same bodies run eagerly in Triton's interpreter: for tests.
    """

    def __init__(
        self,
        model: KernelDFlash,
        *,
        num_pages: int,
        page_size: int,
        num_lanes: int,
        num_rows_max: int,
        extend_rows_max: int,
        context_len_max: int,
        on_captured: Callable[[int, int], None] = lambda done, total: None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Allocates everything at its largest and captures what needs no ring; on_captured: see Graphs.

        num_pages counts the usable ones. num_rows_max, extend_rows_max: batch rows of a ring and rows of its
        extend_captured, at most. The model must take num_rows_max · block_size and extend_rows_max rows, and
        positions up to context_len_max + block_size. stream: where all work is enqueued; None makes one.
        """
        c, self.device = model.config, model.device
        assert context_len_max <= model.contract.context_len_max
        # A bound on positions is known two steps late: each may move it by a block, and a block comes after.
        width = -(-(context_len_max + 3 * c.block_size) // page_size)
        is_cuda = self.device.type == "cuda"
        self.stream = stream or (torch.cuda.Stream(self.device) if is_cuda else None)
        self.sentinel_lane = num_lanes
        self.page_table_width = width
        # Of the launch whose results were read last.
        self.times = LaunchTimes(0.0, 0.0)
        self._model = model
        self._pdl = launches_may_overlap(self.device)
        self._extend_rows_max = extend_rows_max
        self._on_captured = on_captured
        self._buckets = buckets_up_to(num_rows_max)
        self._tensors = DraftTensors(
            model, num_pages=num_pages, page_size=page_size, num_blocks_max=num_rows_max,
            num_context_rows_max=max(num_rows_max * c.block_size, extend_rows_max), page_table_width=width,
        )  # fmt: skip

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=self.device)

        self._lanes = DraftLanes(
            zeros(num_lanes + 1), zeros(num_lanes + 1), zeros(num_lanes + 1, width), page_size,
            context_len_max, context_len_max + c.block_size,
        )  # fmt: skip
        self._joins: list[tuple[int, int]] = []
        self._counts = zeros(num_rows_max)
        self._control = LaunchControl(num_rows_max, num_lanes, num_pages, self.device)
        self._control.reset()
        self._ring: Ring | None = None
        self._ring_graphs: Graphs | None = None
        self._extend_buckets: list[int] = []
        self._graphs = Graphs(self.device, self.stream)
        self._inline = InlineDrafting(self._tensors, self._graphs, model, self._buckets)
        if is_cuda:
            # What was zeroed on the stream that is current here is used on another.
            torch.cuda.synchronize(self.device)
        self._capture(
            self._graphs,
            [
                *((("draft", n), partial(self._tensors.draft_blocks, n)) for n in reversed(self._buckets)),
                *self._inline.bodies(),
                ("pages", self._enter_pages),
            ],
        )
        self._try_what_is_not_recorded()

    # --- the ring ------------------------------------------------------------------------------------

    def attach(self, ring: Ring) -> None:
        """Work over this ring from now on: captures graphs over its addresses, unless it is attached already.

        The device must be idle, and stay so, but for this engine. Writes the ring's drafts.
        """
        if ring is self._ring:
            return
        self.detach()
        self._check(ring.shape)
        # Bodies run once for each graph: on padding, so that no lane changes.
        with self._on_stream():
            self._control.reset()
        graphs = Graphs(self.device, self.stream)
        top = bucket_for(self._buckets, ring.shape.num_rows)
        self._extend_buckets = _extend_buckets(ring.shape.extend_rows_max)
        bodies: list[tuple[Hashable, Callable[[], None]]] = []
        for n in reversed(self._extend_buckets):
            bodies.append((("extend", n), partial(self._extend, ring, n)))
        for n in reversed([n for n in self._buckets if n <= top]):
            bodies.append((("append", n), partial(self._append, ring, n)))
            bodies.append((("publish", n), partial(self._publish, ring, n)))
        self._capture(graphs, bodies)
        self._ring, self._ring_graphs = ring, graphs

    def detach(self) -> None:
        """Forget the ring: nothing refers to its memory afterwards. All launches must be done."""
        self._ring, self._ring_graphs = None, None
        if self.stream is not None:
            # What a capture that found no memory has left is for whoever else is on the device.
            torch.cuda.empty_cache()

    # --- a step --------------------------------------------------------------------------------------

    def join(self, lane: int, start_position: int) -> None:
        """Begin a lane in the next launch's turn: its context is empty and starts here, it has no page."""
        assert 0 <= lane < self.sentinel_lane, f"lane {lane} of {self.sentinel_lane}"
        self._joins.append((lane, start_position))

    @torch.inference_mode()
    def launch(
        self, work: DraftWork, enter: Callable[[], object] = _nothing, leave: Callable[[], object] = _nothing
    ) -> Ticket:
        """Enqueue a step. Never waits; the results of all but LAUNCHES_IN_FLIGHT_MAX - 1 launches before must
        have been read. The ring's drafts are the mask id in rows that get none.

        enter and leave enqueue what has to stand before the ring is read, and after its drafts are written:
        the copies from and to the host lie outside, so that the other process waits for neither.
        """
        named = [lane for lane in work.lanes if lane != self.sentinel_lane]
        assert len(set(named)) == len(named), "a lane has two ring rows"
        with self._on_stream():
            ticket = self._control.upload(work)
            # Nothing but the copy stands before: a kernel would take the GPU from the target in mid-step.
            enter()
            self._control.mark_begun(ticket)
            self._begin_lanes()
            if work.pages:
                self._graphs.replay("pages")
            if work.appends:
                num_rows = max(append.row_start + append.num_rows for append in work.appends)
                self._replay_over_ring("extend", bucket_for(self._extend_buckets, num_rows))
            bucket = bucket_for(self._buckets, len(work.lanes)) if work.lanes else 0
            if bucket:
                self._replay_over_ring("append", bucket)
            self._control.mark_ingested(ticket)
            if bucket:
                if work.blocks:
                    self._graphs.replay(("draft", bucket))
                self._replay_over_ring("publish", bucket)
            leave()
            self._control.download(ticket)
        return ticket

    def results_to_host(self, ticket: Ticket) -> DraftResults:
        """What that launch did; waits until it is done. Once for each launch. Leaves its `times`."""
        results, self.times = self._control.results_to_host(ticket)
        return results

    @torch.inference_mode()
    def clean(self, pages: Sequence[int]) -> None:
        """Zero pages that held rows which were not finite, after all that was launched. Never waits."""
        with self._on_stream():
            self._tensors.clean(pages)

    # --- inline messages -----------------------------------------------------------------------------

    @torch.inference_mode()
    def append_to_host(self, captured: torch.Tensor, positions: list[int], slots: list[int]) -> list[bool]:
        """As DraftEngine.append_to_host; captured is in host memory."""
        with self._on_stream():
            return self._inline.append_to_host(captured, positions, slots)

    @torch.inference_mode()
    def draft_to_host(self, blocks: Sequence[PlacedBlock]) -> torch.Tensor:
        """As DraftEngine.draft_to_host; the drafts are in host memory."""
        with self._on_stream():
            return self._inline.draft_to_host(blocks)

    @property
    def memory(self) -> MemoryReport:
        """Bytes that are allocated here, by region; weights and activations are the model's."""
        return self._tensors.memory + [
            ("draft lanes", self._lanes.page_table.nbytes),
            ("inline captured states", self._inline.captured.nbytes),
        ]

    # --- bodies of graphs ----------------------------------------------------------------------------

    def _enter_pages(self) -> None:
        enter_pages(self._control.entries, self._control.num_entries, self._lanes)

    def _extend(self, ring: Ring, num_rows: int) -> None:
        """Appends, over the first rows of extend_captured."""
        staged, control = self._tensors.context_rows(num_rows), self._control
        staged.positions.zero_()
        staged.slots.zero_()
        stage_appends(control.appends, self._lanes, staged, control.append_results, pdl=self._pdl)
        self._tensors.store_context(ring.extend_captured[:num_rows])
        finite = self._tensors.finite[:num_rows]
        settle_appends(control.appends, finite, control.append_results, pdl=self._pdl)

    def _append(self, ring: Ring, num_blocks: int) -> None:
        """Verified rows of the first batch rows become context; their blocks are staged."""
        in_ring = min(num_blocks, ring.shape.num_rows)
        num_rows, control, c = num_blocks * ring.shape.block_size, self._control, self._model.config
        stage_ring_rows(
            ring.base[:in_ring], ring.count[:in_ring], ring.anchor[:in_ring], control.row_lanes[:num_blocks],
            control.begins[:num_blocks], self._lanes, self._tensors.context_rows(num_rows),
            self._tensors.block_rows(num_blocks), self._counts[:num_blocks], control.row_results[:num_blocks],
            vocab_rows=c.vocab_size, mask_token_id=c.mask_token_id, pdl=self._pdl,
        )  # fmt: skip
        self._tensors.store_context(ring.verify_captured[: in_ring * ring.shape.block_size])

    def _publish(self, ring: Ring, num_blocks: int) -> None:
        publish_drafts(
            self._tensors.drafted[:num_blocks], self._control.wanted,
            self._tensors.finite[: num_blocks * ring.shape.block_size], self._counts[:num_blocks],
            self._control.row_results[:num_blocks], ring.drafts[:num_blocks],
            mask_token_id=self._model.config.mask_token_id, pdl=self._pdl,
        )  # fmt: skip

    # --- leaves --------------------------------------------------------------------------------------

    def _begin_lanes(self) -> None:
        for lane, start_position in self._joins:
            self._lanes.start[lane].fill_(start_position)
            self._lanes.context_len[lane].fill_(start_position)
            self._lanes.page_table[lane].zero_()
        self._joins.clear()

    def _replay_over_ring(self, kind: str, size: int) -> None:
        assert self._ring_graphs is not None, "no ring is attached"
        self._ring_graphs.replay((kind, size))

    @torch.inference_mode()
    def _capture(self, graphs: Graphs, bodies: list[tuple[Hashable, Callable[[], None]]]) -> None:
        graphs.capture_all(bodies, self._on_captured)

    def _try_what_is_not_recorded(self) -> None:
        """A kernel is loaded when it first runs, which waits for all that the device has to do: not for a
        target's states, then. Which kernel fills a lane depends on where it lies."""
        for lane in range(self.sentinel_lane):
            self.join(lane, 0)
        with self._on_stream():
            self._begin_lanes()
        self.clean([0])
        if self.stream is not None:
            self.stream.synchronize()

    def _on_stream(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _check(self, ring: RingShape) -> None:
        """A ring that does not fit was refused when it was offered."""
        contract, c = self._model.contract, self._model.config
        assert ring.block_size == c.block_size and ring.num_draft_tokens == contract.num_draft_tokens
        assert ring.captured_width == len(contract.captured_layer_ids) * c.hidden_size
        assert ring.dtype is self._model.dtype
        assert ring.num_rows <= self._buckets[-1] and ring.extend_rows_max <= self._extend_rows_max


def _extend_buckets(num_rows_max: int) -> list[int]:
    """Rows of the graphs for appends, rising: doubling, ending with all."""
    sizes, size = [], _EXTEND_ROWS_MIN
    while size < num_rows_max:
        sizes.append(size)
        size *= 2
    return [*sizes, num_rows_max]
