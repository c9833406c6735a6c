"""A device draft engine beside the CPU's engine and session table, told the same; they must answer alike.

The device's free pages hold NaN, and so does all of the ring that no step names: what reads too much shows.
Draft ids are compared where the CPU's two best logits are clearly apart (both sides compute in fp32).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.embedding import load_shared_weights
from common.handoff.ring import Ring, RingShape
from common.handoff.transport import Outcome
from common.paged_kv import PageEntry, PagePool, PageTable
from services.drafter.device_engine import DeviceDraftEngine
from services.drafter.draft_work import DeviceAppend, DraftWork, LaneResult
from services.drafter.engine import PlacedBlock
from services.drafter.model.dflash_weights import Draft
from services.drafter.model.kernel_dflash import KernelDFlash
from services.drafter.session import SessionKey
from tests.builders_drafter import load_drafter

# Over two tiny layers in fp32 the two sides differ by some 1e-5.
MARGIN = 1e-3
NOBODY = LaneResult(Outcome.UNKNOWN_SESSION, 0)


@dataclass(frozen=True)
class Sizes:
    """Of the device engine and of the ring, which may be smaller."""

    num_pages: int = 60
    page_size: int = 8
    num_lanes: int = 4
    num_rows_max: int = 4
    ring_rows: int = 3
    extend_rows: int = 8
    context_len_max: int = 60


class Append(NamedTuple):
    lane: int
    position: int
    num_rows: int


class Row(NamedTuple):
    """A ring row. spoiled: index of a captured row that holds NaN."""

    lane: int
    base: int
    count: int
    begins: bool = False
    spoiled: int | None = None


def build_kernel_draft(
    target_dir: Path, draft_dir: Path, device: str, sizes: Sizes, *, row_independent: bool = False
) -> KernelDFlash:
    """The draft in fp32, for an engine of these sizes."""
    shared, contract = load_shared_weights(target_dir, torch.float32, device)
    draft = Draft.load(draft_dir, shared, contract)
    block_size = draft.config.block_size
    return KernelDFlash(
        draft, shared, page_size=sizes.page_size,
        num_rows_max=max(sizes.num_rows_max * block_size, sizes.extend_rows, 64),
        num_keys_max=sizes.context_len_max + 3 * block_size,
        max_positions=sizes.context_len_max + 3 * block_size, row_independent=row_independent,
    )  # fmt: skip


def build_engine(model: KernelDFlash, sizes: Sizes, **changes: Any) -> DeviceDraftEngine:
    """An engine whose pages are all filled with NaN."""
    engine = DeviceDraftEngine(
        model, num_pages=sizes.num_pages, page_size=sizes.page_size, num_lanes=sizes.num_lanes,
        num_rows_max=sizes.num_rows_max, extend_rows_max=sizes.extend_rows,
        context_len_max=sizes.context_len_max, **changes,
    )  # fmt: skip
    engine._tensors.kv.fill_(float("nan"))
    return engine


def build_ring(model: KernelDFlash, sizes: Sizes) -> Ring:
    c, contract = model.config, model.contract
    shape = RingShape(
        num_rows=sizes.ring_rows, block_size=c.block_size, num_draft_tokens=contract.num_draft_tokens,
        captured_width=len(contract.captured_layer_ids) * c.hidden_size, dtype=model.dtype,
        extend_rows_max=sizes.extend_rows,
    )  # fmt: skip
    return Ring.local(shape, model.device)


class DraftRig:
    """Both engines, and what the host keeps for the device: pages of each lane."""

    def __init__(
        self, checkpoints: tuple[Path, Path], sizes: Sizes, seed: int, *, device: str = "cpu",
        margin: float = MARGIN,
    ) -> None:  # fmt: skip
        """checkpoints: directories of the target, of which only the shared weights are read, and the draft.
        margin: logits that are further apart decide the same on both sides."""
        self.sizes = sizes
        self._margin = margin
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        model = build_kernel_draft(*checkpoints, device, sizes)
        self.block_size = model.config.block_size
        self.mask_token_id = model.config.mask_token_id
        self.vocab_rows = model.config.vocab_size
        self.engine = build_engine(model, sizes)
        self.ring = build_ring(model, sizes)
        self.engine.attach(self.ring)
        # Pages of another size: places never agree by chance.
        pages_each = -(-(sizes.context_len_max + self.block_size) // 5)
        self.cpu = load_drafter(
            *checkpoints, page_size=5, num_pages=sizes.num_lanes * pages_each,
            num_sessions_max=sizes.num_lanes, context_len_max=sizes.context_len_max,
        )  # fmt: skip
        self._pool = PagePool(sizes.num_pages, sizes.page_size)
        self._tables: dict[int, PageTable] = {}
        self._starts: dict[int, int] = {}
        self._epochs = dict.fromkeys(range(sizes.num_lanes), 0)
        self._logits: list[torch.Tensor] = []
        compute = self.cpu.model.logits

        def recorded(hidden: torch.Tensor) -> torch.Tensor:
            self._logits.append(compute(hidden))
            return self._logits[-1]

        self.cpu.model.logits = recorded  # type: ignore[method-assign]
        self.num_clear = 0

    # --- lanes ---------------------------------------------------------------------------------------

    @property
    def joined(self) -> list[int]:
        return list(self._tables)

    def context_len(self, lane: int) -> int:
        return self.cpu.table.context_len(_key(lane))

    def start(self, lane: int) -> int:
        return self._starts[lane]

    def replace_ring(self, sizes: Sizes) -> Ring:
        """Go on over another ring, of these sizes; returns the one before."""
        before, self.sizes = self.ring, replace(
            self.sizes, ring_rows=sizes.ring_rows, extend_rows=sizes.extend_rows
        )
        self.ring = build_ring(self.engine._model, sizes)
        self.engine.attach(self.ring)
        return before

    def join(self, lane: int, start: int) -> None:
        """A session begins in the lane; one that was there has left nothing behind."""
        self.leave(lane)
        self.engine.join(lane, start)
        self._tables[lane] = PageTable(self._pool)
        self._begin(lane, start)

    def leave(self, lane: int) -> None:
        """The session ends; its pages are spoiled for whoever gets them."""
        if lane in self._tables:
            self.cpu.table.close(_key(lane), self._epochs[lane])
            self._spoil(self._tables.pop(lane).release())

    # --- steps ---------------------------------------------------------------------------------------

    def step(
        self,
        appends: list[Append],
        rows: list[Row | None],
        *,
        blocks: bool = True,
        spoiled: int | None = None,
    ) -> list[Outcome]:
        """One step of both, compared. rows: by ring row, None for nobody's. spoiled: index of an append that
        holds a NaN. Sessions whose context is not finite end. Returns the rows' outcomes."""
        self._fill_ring(appends, rows, spoiled)
        work = DraftWork(
            appends=self._device_appends(appends),
            lanes=[self.engine.sentinel_lane if row is None else row.lane for row in rows],
            begins=[row is not None and row.begins for row in rows],
            pages=self._reserve(appends, rows),
            blocks=blocks,
        )
        ticket = self.engine.launch(work)
        results = self.engine.results_to_host(ticket)
        wanted_appends, wanted_rows, wanted_drafts = self._on_cpu(work.appends, rows)
        assert results.appends == wanted_appends
        assert results.rows == wanted_rows
        self._compare_drafts(wanted_drafts if blocks else {}, len(rows))
        for lane, result in zip(
            [append.lane for append in appends] + work.lanes, results.appends + results.rows, strict=True
        ):
            if result.outcome is Outcome.NON_FINITE and lane in self._tables:
                self._end_spoiled(lane)
        return [result.outcome for result in results.rows]

    def _fill_ring(self, appends: list[Append], rows: list[Row | None], spoiled: int | None) -> None:
        ring, size = self.ring, self.block_size
        for tensor in (ring.verify_captured, ring.extend_captured):
            tensor.fill_(float("nan"))
        for tensor in (ring.base, ring.count, ring.anchor, ring.drafts):
            tensor.fill_(-(2**31))
        for i, row in enumerate(rows):
            if row is not None:
                captured = self._captured(size)
                # What was drafted and not accepted is no context, whatever it is.
                captured[max(row.count, 0) :][: self.rng.randrange(size + 1)] = float("nan")
                if row.spoiled is not None:
                    captured[row.spoiled, self.rng.randrange(captured.shape[1])] = float("inf")
                ring.verify_captured[i * size : (i + 1) * size].copy_(captured)
                ring.base[i], ring.count[i] = row.base, row.count
                ring.anchor[i] = self.rng.randrange(self.vocab_rows)
        for append in self._device_appends(appends):
            rows_at = slice(append.row_start, append.row_start + append.num_rows)
            ring.extend_captured[rows_at].copy_(self._captured(append.num_rows))
        if spoiled is not None:
            append = self._device_appends(appends)[spoiled]
            ring.extend_captured[append.row_start + append.num_rows - 1, 3] = float("nan")
        self._settle()

    def _device_appends(self, appends: list[Append]) -> list[DeviceAppend]:
        """Laid out from the end of extend_captured backwards, so that row 0 is usually nobody's."""
        placed, stop = [], self.sizes.extend_rows
        for append in appends:
            stop -= append.num_rows
            placed.append(DeviceAppend(append.lane, append.position, stop, append.num_rows))
        return placed

    def _reserve(self, appends: list[Append], rows: list[Row | None]) -> list[PageEntry]:
        """Room by bounds, as the service reserves it: a whole block of states, and a block after it."""
        entries = []
        for wish in (*appends, *filter(None, rows)):
            table, start = self._tables[wish.lane], self._starts[wish.lane]
            begins = isinstance(wish, Row) and wish.begins
            if begins:
                start = max(0, getattr(wish, "base", 0) - self.rng.randrange(3))
            position = wish.position if isinstance(wish, Append) else wish.base
            if not begins:
                position = min(max(position, start), self.context_len(wish.lane))
            num_rows = wish.num_rows if isinstance(wish, Append) else self.block_size
            position_max = min(position + num_rows, self.sizes.context_len_max)
            told = table.num_pages
            table.reserve(position_max + 2 * self.block_size - start)
            entries += [PageEntry(wish.lane, i, table.pages[i]) for i in range(told, table.num_pages)]
        return entries

    def _on_cpu(
        self, appends: list[DeviceAppend], rows: list[Row | None]
    ) -> tuple[list[LaneResult], list[LaneResult], dict[int, tuple[torch.Tensor, torch.Tensor]]]:
        """What the CPU's engine and table say: results, and by ring row drafts with their logits."""
        wanted_appends = []
        for append in appends:
            rows_at = slice(append.row_start, append.row_start + append.num_rows)
            captured = self.ring.extend_captured[rows_at].cpu()
            wanted_appends.append(self._append_on_cpu(append.lane, append.position, captured))
        wanted_rows, blocks, drafted_rows = [], [], []
        for i, row in enumerate(rows):
            if row is None:
                wanted_rows.append(NOBODY)
                continue
            result = self._take_on_cpu(row, i)
            wanted_rows.append(result)
            if result.outcome is Outcome.OK:
                outcome, session = self.cpu.table.reserve_block(
                    _key(row.lane), self._epochs[row.lane], row.base + row.count
                )
                assert outcome is Outcome.OK and session is not None
                drafted_rows.append(i)
                blocks.append(PlacedBlock(
                    int(self.ring.anchor[i]), session.context_len, session.num_rows, session.pages.pages,
                    self.cpu.table.block_slots(session),
                ))  # fmt: skip
        if not blocks:
            return wanted_appends, wanted_rows, {}
        drafts = self.cpu.engine.draft_to_host(blocks)
        return wanted_appends, wanted_rows, dict(
            zip(drafted_rows, zip(drafts, self._logits.pop(), strict=True), strict=True)
        )

    def _take_on_cpu(self, row: Row, i: int) -> LaneResult:
        unchanged = self.context_len(row.lane)
        if not 0 <= row.count <= self.block_size:
            return LaneResult(Outcome.NEEDS_RESYNC, unchanged)
        if row.begins:
            if row.base + row.count > self.sizes.context_len_max:
                return LaneResult(Outcome.CONTEXT_LIMIT, unchanged)
            self._begin(row.lane, row.base)
        first = i * self.block_size
        return self._append_on_cpu(
            row.lane, row.base, self.ring.verify_captured[first : first + row.count].cpu()
        )

    def _append_on_cpu(self, lane: int, position: int, captured: torch.Tensor) -> LaneResult:
        table = self.cpu.table
        outcome, slots = table.append_at(_key(lane), self._epochs[lane], position, len(captured))
        if outcome is Outcome.OK and len(captured):
            positions = list(range(position, position + len(captured)))
            if not all(self.cpu.engine.append_to_host(captured, positions, slots)):
                outcome = Outcome.NON_FINITE
        return LaneResult(outcome, self.context_len(lane))

    def _compare_drafts(self, wanted: dict[int, tuple[torch.Tensor, torch.Tensor]], num_rows: int) -> None:
        found = self.ring.drafts.cpu()
        for i in range(num_rows):
            if i not in wanted:
                assert (found[i] == self.mask_token_id).all()
                continue
            drafts, logits = wanted[i]
            best = logits.topk(2, dim=-1).values
            clear = best[:, 0] - best[:, 1] > self._margin
            assert torch.equal(found[i][clear], drafts[clear])
            assert ((found[i] >= 0) & (found[i] < self.vocab_rows)).all()
            self.num_clear += int(clear.sum())

    # --- leaves --------------------------------------------------------------------------------------

    def _begin(self, lane: int, start: int) -> None:
        self._epochs[lane] += 1
        self._starts[lane] = start
        assert self.cpu.table.open(_key(lane), self._epochs[lane], start) is Outcome.OK

    def _end_spoiled(self, lane: int) -> None:
        """Both sides end the session and zero its pages."""
        self.cpu.engine.clean(self.cpu.table.abandon(_key(lane)))
        pages = self._tables.pop(lane).release()
        self.engine.clean(pages)
        self._settle()
        for page in pages:
            assert (self._slots_of(page) == 0).all()
        self._spoil(pages)

    def _spoil(self, pages: list[int]) -> None:
        for page in pages:
            self._slots_of(page).fill_(float("nan"))
        self._settle()

    def _slots_of(self, page: int) -> torch.Tensor:
        size = self.sizes.page_size
        return self.engine._tensors.kv[:, :, page * size : (page + 1) * size]

    def _captured(self, num_rows: int) -> torch.Tensor:
        """Hidden states that no real model would be ashamed of."""
        return torch.randn(num_rows, self.ring.shape.captured_width, generator=self.generator)

    def _settle(self) -> None:
        """The rig writes on another stream than the engine reads."""
        if self.ring.buffer.is_cuda:
            torch.cuda.synchronize()


def _key(lane: int) -> SessionKey:
    return SessionKey("rig", lane)


def random_step(rig: DraftRig) -> tuple[list[Append], list[Row | None]]:
    """Joins and leaves, then a step of extends and ring rows that mostly continue their contexts, but also
    crop, leave a gap, begin anew, or say nonsense."""
    rng, size = rig.rng, rig.block_size
    for lane in range(rig.sizes.num_lanes):
        if lane not in rig.joined or rng.random() < 0.05:
            rig.join(lane, rng.choice((0, 0, rng.randrange(20))))
    lanes = rng.sample(rig.joined, rng.randint(1, rig.sizes.ring_rows))
    appends: list[Append] = []
    rows: list[Row | None] = []
    left = rig.sizes.extend_rows
    for lane in lanes:
        end = rig.context_len(lane)
        num_rows = rng.randint(1, max(left, 1))
        if left and (end == rig.start(lane) or rng.random() < 0.25):
            position = _near(rng, rig.start(lane), end)
            appends.append(Append(lane, position, num_rows))
            left -= num_rows
            if rig.start(lane) <= position <= end and position + num_rows <= rig.sizes.context_len_max:
                end = position + num_rows
        kind = rng.random()
        if kind < 0.15:
            rows.append(None)
        elif kind < 0.3:
            base = rng.choice((rng.randrange(25), rig.sizes.context_len_max - rng.randrange(size)))
            rows.append(Row(lane, base, rng.randint(0, size), begins=True))
        elif kind < 0.35:
            rows.append(Row(lane, end, rng.choice((-1, size + 1, 2**31 - 1))))
        else:
            count = 0 if appends and appends[-1].lane == lane else rng.randint(0, size)
            rows.append(Row(lane, _near(rng, rig.start(lane), end), count))
    return appends, rows


def _near(rng: random.Random, start: int, end: int) -> int:
    if rng.random() < 0.75:
        return end
    return rng.choice((rng.randint(start, end), max(start - 1, 0), end + 1))
