"""What must hold for the device's draft engine, on any device."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch

from common.handoff.transport import Outcome
from common.paged_kv import PageEntry, PagePool, PageTable
from services.drafter.draft_work import DraftWork
from services.drafter.engine import PlacedBlock
from tests.draft_engine_rig import (
    MARGIN,
    NOBODY,
    Append,
    DraftRig,
    Row,
    Sizes,
    build_engine,
    build_kernel_draft,
    build_ring,
    random_step,
)


def play_random_history(rig: DraftRig, num_steps: int) -> Counter[Outcome]:
    """Steps of both engines, compared; the outcomes of the rows."""
    seen: Counter[Outcome] = Counter()
    for _ in range(num_steps):
        seen.update(rig.step(*random_step(rig)))
    return seen


def check_another_ring_takes_its_place(rig: DraftRig) -> None:
    """The same ring is captured once. After another one, also a smaller one, nothing touches the first."""
    rig.join(0, 0)
    captured: list[tuple[int, int]] = []
    rig.engine._on_captured = lambda done, total: captured.append((done, total))
    rig.engine.attach(rig.ring)
    assert not captured
    first = rig.replace_ring(Sizes(ring_rows=1, extend_rows=3))
    assert captured and captured[-1] == (len(captured), len(captured))
    first.buffer.fill_(99)
    before = first.buffer.clone()
    assert rig.step([Append(0, 0, 3)], [Row(0, 3, 0)]) == [Outcome.OK]
    assert rig.step([], [Row(0, 3, rig.block_size)]) == [Outcome.OK]
    assert torch.equal(first.buffer, before)
    work = DraftWork(lanes=[rig.engine.sentinel_lane], begins=[False])
    assert rig.engine.results_to_host(rig.engine.launch(work)).rows == [NOBODY]


def check_inline_rows_and_blocks(rig: DraftRig) -> None:
    """A block before any context, one after context of more rows than are stored at once; rows of which one
    is not finite."""
    size, num_rows = rig.block_size, 33
    rows = rig._captured(num_rows + 4)
    rows[num_rows + 3, 5] = float("nan")
    given: list[tuple[list[bool], torch.Tensor]] = []
    for engine, pool in ((rig.cpu.engine, PagePool(30, 5)), (rig.engine, PagePool(30, rig.sizes.page_size))):
        tables = [PageTable(pool) for _ in range(3)]
        for table, room in zip(tables, (num_rows + size, size, 8), strict=True):
            table.reserve(room)
        finite = []
        for first, stop in ((0, num_rows - 2), (num_rows - 2, num_rows)):
            slots = tables[0].slots(first, stop)
            finite += engine.append_to_host(rows[first:stop], list(range(7 + first, 7 + stop)), slots)
        finite += engine.append_to_host(rows[num_rows:], list(range(4)), tables[2].slots(0, 4))
        blocks = [
            PlacedBlock(
                17, 7 + num_rows, num_rows, tables[0].pages, tables[0].slots(num_rows, num_rows + size)
            ),
            PlacedBlock(5, 0, 0, tables[1].pages, tables[1].slots(0, size)),
        ]
        given.append((finite, engine.draft_to_host(blocks)))
    (cpu_finite, cpu_drafts), (finite, drafts) = given
    assert finite == cpu_finite == [True] * (num_rows + 3) + [False]
    best = rig._logits.pop().topk(2, dim=-1).values
    clear = best[..., 0] - best[..., 1] > MARGIN
    assert clear.sum() > size and torch.equal(drafts[clear], cpu_drafts[clear])
    assert drafts.dtype == torch.int32 and drafts.device.type == "cpu"
    assert rig.engine.append_to_host(rows[:0], [], []) == []


def check_a_lane_among_many_equals_the_lane_alone(
    checkpoints: tuple[Path, Path], device: str, seed: int, many_lanes: int
) -> None:
    """To the bit in fp32, in the cache as in the ring. Both engines have the same pages, for other lanes."""
    sizes = Sizes(
        num_pages=2 * many_lanes, num_lanes=many_lanes, num_rows_max=many_lanes, ring_rows=many_lanes,
        extend_rows=2,
    )  # fmt: skip
    model = build_kernel_draft(*checkpoints, device, sizes, row_independent=True)
    together, alone = (build_engine(model, sizes) for _ in range(2))
    many, one = build_ring(model, sizes), build_ring(model, Sizes(ring_rows=1, extend_rows=2))
    together.attach(many)
    alone.attach(one)
    size, generator = model.config.block_size, torch.Generator().manual_seed(seed)
    lanes = torch.randperm(many_lanes, generator=generator).tolist()
    starts = torch.randint(0, 40, (many_lanes,), generator=generator)
    watched = range(0, many_lanes, 5)
    for i, (lane, start) in enumerate(zip(lanes, starts.tolist(), strict=True)):
        together.join(lane, start)
        if i in watched:
            alone.join(i, start)
    for step in range(2):
        many.verify_captured.copy_(torch.randn(many.verify_captured.shape, generator=generator))
        many.base.copy_(starts + size * step)
        many.count.fill_(size - step)
        many.anchor.copy_(torch.randint(0, model.config.vocab_size, (many_lanes,), generator=generator))
        new = range(2 * (1 - step))
        pages = [PageEntry(lane, p, 1 + 2 * i + p) for i, lane in enumerate(lanes) for p in new]
        _wait(device)
        work = DraftWork(lanes=lanes, begins=[False] * many_lanes, pages=pages)
        together.results_to_host(together.launch(work))
        for i in watched:
            one.verify_captured.copy_(many.verify_captured[size * i : size * (i + 1)])
            for name in ("base", "count", "anchor"):
                getattr(one, name)[0] = getattr(many, name)[i]
            _wait(device)
            work = DraftWork(lanes=[i], begins=[False], pages=[PageEntry(i, p, 1 + 2 * i + p) for p in new])
            results = alone.results_to_host(alone.launch(work))
            end = (step + 1) * size - step
            assert results.rows == [(Outcome.OK, int(starts[i]) + end)]
            assert torch.equal(one.drafts[0], many.drafts[i])
            first = (1 + 2 * i) * sizes.page_size
            slots = slice(first, first + end + size)
            assert torch.equal(together._tensors.kv[:, :, slots], alone._tensors.kv[:, :, slots])


def _wait(device: str) -> None:
    """Each engine has a stream of its own; the model's buffers are both's."""
    if device != "cpu":
        torch.cuda.synchronize()
