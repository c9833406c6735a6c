"""The draft engine compiled and recorded: against the CPU's engine, and against its own bodies unrecorded."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from common.handoff.transport import Outcome
from tests.builders_drafter import build_draft_pair

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(300),  # compiles
]
if torch.cuda.is_available():
    from common.handoff.ring import Ring
    from common.paged_kv import PageEntry
    from services.drafter import device_engine
    from services.drafter.device_engine import DeviceDraftEngine
    from services.drafter.draft_work import DeviceAppend, DraftResults, DraftWork
    from services.drafter.launch_control import LAUNCHES_IN_FLIGHT_MAX
    from tests.draft_engine_rig import (
        Append,
        DraftRig,
        Row,
        Sizes,
        build_engine,
        build_kernel_draft,
        build_ring,
    )
    from tests.kernel_checks import draft_engine as checks
    from tests.kernel_checks import draft_lanes

SEED = 20261213
ROOT = Path(__file__).parents[2]
SHIPPED_DRAFT = ROOT / "models" / "SmolLM2-135M-Instruct-DFlash-b8"
SHIPPED_TARGET = ROOT / ".models" / "SmolLM2-135M-Instruct"
SLIDING: dict[str, Any] = {
    "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 30, "max_len": 250,
}  # fmt: skip


@pytest.mark.parametrize("pdl", [False, True])
def test_the_books_on_the_device_are_kept_as_by_hand(pdl: bool) -> None:
    draft_lanes.check_ring_rows_are_staged("cuda", SEED, pdl=pdl)
    draft_lanes.check_appends_are_staged("cuda", SEED, pdl=pdl)
    draft_lanes.check_rows_that_are_not_finite_are_named("cuda", SEED, pdl=pdl)
    draft_lanes.check_pages_are_entered("cuda", SEED)


def test_random_histories_give_the_outcomes_contexts_and_drafts_of_the_cpu(tmp_path: Path) -> None:
    """Up to 48 rows a step, of a ring whose largest bucket is not full: kernels of ours and cuBLAS."""
    sizes = Sizes(
        num_pages=1000, page_size=16, num_lanes=50, num_rows_max=50, ring_rows=49, extend_rows=300,
        context_len_max=250,
    )  # fmt: skip
    rig = DraftRig(build_draft_pair(tmp_path, SEED, **SLIDING), sizes, SEED, device="cuda")
    seen = checks.play_random_history(rig, 60)
    few = (Outcome.NEEDS_RESYNC, Outcome.UNKNOWN_SESSION, Outcome.CONTEXT_LIMIT)
    assert seen[Outcome.OK] > 500 and all(seen[outcome] > 10 for outcome in few)
    assert rig.num_clear > 1000


def test_states_that_are_not_finite_spoil_their_own_session_alone(tmp_path: Path) -> None:
    rig = DraftRig(build_draft_pair(tmp_path, SEED), Sizes(), SEED, device="cuda")
    rig.join(0, 0)
    rig.join(1, 0)
    assert rig.step([Append(0, 0, 3), Append(1, 0, 3)], [Row(0, 3, 0), Row(1, 3, 0)]) == [Outcome.OK] * 2
    assert rig.step([], [Row(0, 3, 2, spoiled=1), Row(1, 3, 2)]) == [Outcome.NON_FINITE, Outcome.OK]
    assert rig.step([], [Row(1, 5, 1)]) == [Outcome.OK]


def test_inline_messages_and_changes_of_the_ring_are_served_as_on_the_cpu(tmp_path: Path) -> None:
    rig = DraftRig(build_draft_pair(tmp_path, SEED), Sizes(), SEED, device="cuda")
    checks.check_inline_rows_and_blocks(rig)
    checks.check_another_ring_takes_its_place(rig)


def test_each_of_32_lanes_gets_the_drafts_that_it_gets_alone(tmp_path: Path) -> None:
    checks.check_a_lane_among_many_equals_the_lane_alone(build_draft_pair(tmp_path, SEED), "cuda", SEED, 32)


class EagerGraphs:
    """Stands in for Graphs: runs bodies where graphs would be replayed."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._bodies: dict[Hashable, Callable[[], None]] = {}

    def capture_all(
        self, bodies: list[tuple[Hashable, Callable[[], None]]], on_captured: Callable[[int, int], None]
    ) -> None:
        self._bodies = dict(bodies)

    def replay(self, key: Hashable) -> None:
        self._bodies[key]()


def test_graphs_replayed_a_thousand_times_give_what_their_bodies_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets rise, fall, and come in any order; several launches are in flight; no launch waits."""
    sizes = Sizes(
        num_pages=200, page_size=16, num_lanes=12, num_rows_max=12, ring_rows=12, extend_rows=100,
        context_len_max=240,
    )  # fmt: skip
    model = build_kernel_draft(
        *build_draft_pair(tmp_path, SEED, **SLIDING), "cuda", sizes, row_independent=True
    )
    recorded = build_engine(model, sizes)
    monkeypatch.setattr(device_engine, "Graphs", EagerGraphs)
    eager = build_engine(model, sizes)
    found = []
    for engine in (recorded, eager):
        torch.cuda.synchronize()
        ring = build_ring(model, sizes)
        engine.attach(ring)
        drafts, results = _play(engine, ring, sizes, num_launches=1000)
        torch.cuda.synchronize()
        # But for the sentinel page, which is anybody's. NaN is compared as bits.
        context = engine._tensors.kv[:, :, sizes.page_size :].view(torch.int32).clone()
        found.append((drafts, results, context))
    (drafts, results, context), wanted = found
    assert results == wanted[1]
    assert sum(row.outcome is Outcome.OK for result in results for row in result.rows) > 5000
    assert torch.equal(drafts, wanted[0])
    assert torch.equal(context, wanted[2])


def _play(
    engine: DeviceDraftEngine, ring: Ring, sizes: Sizes, num_launches: int
) -> tuple[torch.Tensor, list[DraftResults]]:
    """The same launches for each engine: all drafts, all results."""
    stream, size = engine.stream, ring.shape.block_size
    assert stream is not None
    host, device = torch.Generator().manual_seed(SEED), torch.Generator("cuda").manual_seed(SEED)
    ends = [sizes.context_len_max] * sizes.num_lanes
    pages_each = -(-(sizes.context_len_max + 2 * size) // sizes.page_size)
    plan = [*range(1, 13), *range(12, 0, -1)]
    drafts, tickets, results = [], [], []
    for number in range(num_launches):
        num_rows = plan[number] if number < len(plan) else int(torch.randint(1, 13, (), generator=host))
        lanes = torch.randperm(sizes.num_lanes, generator=host)[:num_rows].tolist()
        counts = torch.randint(0, size + 1, (num_rows,), generator=host).tolist()
        work = DraftWork(lanes=lanes, begins=[False] * num_rows)
        row_start = 0
        for i, lane in enumerate(lanes):
            if ends[lane] + size > sizes.context_len_max:
                with _waiting_is_an_error():
                    engine.join(lane, 0)
                first = 1 + lane * pages_each
                work.pages += [PageEntry(lane, p, first + p) for p in range(pages_each)]
                work.appends.append(DeviceAppend(lane, 0, row_start, 7))
                row_start, ends[lane], counts[i] = row_start + 7, 7, 0
        # Pinned, so that these copies do not wait either: launches would never be in flight together.
        base = torch.tensor([ends[lane] for lane in lanes], dtype=torch.int32).pin_memory()
        count_rows = torch.tensor(counts, dtype=torch.int32).pin_memory()
        for lane, count in zip(lanes, counts, strict=True):
            ends[lane] += count
        with torch.cuda.stream(stream):
            ring.base[:num_rows].copy_(base, non_blocking=True)
            ring.count[:num_rows].copy_(count_rows, non_blocking=True)
            for captured in (ring.verify_captured, ring.extend_captured):
                captured.normal_(generator=device)
            ring.anchor.random_(0, engine._model.config.vocab_size, generator=device)
            with _waiting_is_an_error():
                tickets.append(engine.launch(work))
            drafts.append(ring.drafts.clone())
        if len(tickets) == LAUNCHES_IN_FLIGHT_MAX:
            results.append(engine.results_to_host(tickets.pop(0)))
    results += [engine.results_to_host(ticket) for ticket in tickets]
    return torch.stack(drafts), results


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("embedding", ["random", "the target's"])
def test_the_shipped_draft_proposes_what_it_proposes_on_a_cpu(tmp_path: Path, embedding: str) -> None:
    """After random states, in fp32, wherever two logits are 0.01 apart (over three layers of width 576 both
    sides differ by some 1e-4)."""
    target_dir = SHIPPED_TARGET
    if embedding == "random":
        target_dir = _target_of_random_embedding(tmp_path / "target")
    elif not (target_dir / "model.safetensors").exists():
        pytest.skip("the target's embedding is not on this host")
    sizes = Sizes(
        num_pages=200, page_size=16, num_lanes=5, num_rows_max=5, ring_rows=5, extend_rows=600,
        context_len_max=600,
    )  # fmt: skip
    rig = DraftRig((target_dir, SHIPPED_DRAFT), sizes, SEED, device="cuda", margin=0.01)
    ends = [300, 129, 40, 7, 1]
    for lane in range(5):
        rig.join(lane, 0)
    rows: list[Row | None] = [Row(lane, end, 0) for lane, end in enumerate(ends)]
    assert rig.step([Append(lane, 0, end) for lane, end in enumerate(ends)], rows) == [Outcome.OK] * 5
    for count in (8, 1, 5):
        assert rig.step([], [Row(lane, end, count) for lane, end in enumerate(ends)]) == [Outcome.OK] * 5
        ends = [end + count for end in ends]
    assert rig.num_clear > 100, "of 140 drafts"


def _target_of_random_embedding(directory: Path) -> Path:
    """A target's directory as far as a drafter reads it, of the shipped draft's widths."""
    draft = json.loads((SHIPPED_DRAFT / "config.json").read_text(encoding="utf-8"))
    vocab_rows, hidden_size = draft["vocab_size"], draft["hidden_size"]
    config = {
        "vocab_size": vocab_rows, "hidden_size": hidden_size, "tie_word_embeddings": True,
        "num_hidden_layers": draft["num_target_layers"],
    }  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    drawn = torch.randn(vocab_rows, hidden_size, generator=torch.Generator().manual_seed(SEED))
    save_file({"model.embed_tokens.weight": 0.1 * drawn}, directory / "model.safetensors")
    return directory
