"""The device engine on a GPU: graphs against the same bodies run eagerly, launches that wait for nothing,
long lives, and the CPU engine's text."""

from __future__ import annotations

import random
import resource
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(300),  # compiles
]
if torch.cuda.is_available():
    from common.contract import DraftContract
    from common.graphs import Graphs
    from common.handoff.ring import Ring, RingShape
    from common.paged_kv import PageEntry, PagePool
    from services.target.core.device_engine import DeviceEngine, positions_max
    from services.target.core.device_launch import ExtendRows, Launch, Results
    from services.target.core.request import SamplingParams
    from services.target.model.kernel_llama import KernelLlama
    from services.target.model.llama import Llama, LlamaWeights
    from tests.builders import build_tiny_llama_dir
    from tests.engine_rig import EngineRig, Rider, cpu_answer

SEED = 20261212
DEVICE = "cuda"
VOCAB, PAGE_SIZE, MAX_LEN, NUM_LANES, EXTEND_ROWS, BLOCK = 512, 16, 160, 12, 64, 8
PAGES_EACH = MAX_LEN // PAGE_SIZE
NUM_PAGES = NUM_LANES * PAGES_EACH
TAPS = (0, 2)


def load(path: Path, dtype: torch.dtype, device: str = DEVICE, **shape: int) -> LlamaWeights:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_layers": 4, "head_dim": 32} | shape
    if not (path / "config.json").exists():
        build_tiny_llama_dir(path, SEED, vocab_size=VOCAB, max_len=MAX_LEN, qwen3=True, **sizes)
    return LlamaWeights.load(path, dtype, device)


def engine_over(
    weights: LlamaWeights, *, num_lanes: int = NUM_LANES, num_rows_max: int = 128
) -> DeviceEngine:
    reach = positions_max(MAX_LEN)
    model = KernelLlama(
        weights, page_size=PAGE_SIZE, num_rows_max=num_rows_max, num_keys_max=reach, max_positions=reach
    )
    return DeviceEngine(
        model, num_pages=num_lanes * PAGES_EACH, page_size=PAGE_SIZE, num_lanes=num_lanes, max_len=MAX_LEN,
        extend_rows_max=EXTEND_ROWS, extends_max=8,
    )  # fmt: skip


def with_drafting(engine: DeviceEngine, weights: LlamaWeights, block: int = BLOCK) -> Ring:
    hidden = weights.config.hidden_size
    dtype = weights.shared.embedding.dtype
    ring = Ring.local(
        RingShape(engine._num_lanes, block, block - 1, len(TAPS) * hidden, dtype, EXTEND_ROWS), DEVICE
    )
    engine.prepare_drafting(DraftContract(TAPS, block, block - 1, VOCAB - 1, MAX_LEN, "draft"), ring)
    return ring


def own_pages(lane: int) -> list[PageEntry]:
    """All the pages that a lane ever needs."""
    return [PageEntry(lane, i, 1 + lane * PAGES_EACH + i) for i in range(PAGES_EACH)]


def some_sampling(lane: int) -> SamplingParams:
    return (
        SamplingParams(),
        SamplingParams(temperature=0.9, seed=lane),
        SamplingParams(temperature=1.2, top_k=30, top_p=0.9, seed=2**63 + lane),
    )[lane % 3]


@pytest.mark.parametrize("drafting", [False, True])
def test_text_is_the_cpu_engines(tmp_path: Path, drafting: bool) -> None:
    """Prompt chunks beside lanes that decode, drafts of all kinds, lanes reused, nobody's pages untouched."""
    print(f"seed {SEED}")
    weights, rng = load(tmp_path, torch.float32), random.Random(SEED)
    llama, rows_each, riders = Llama(load(tmp_path, torch.float32, "cpu")), BLOCK if drafting else 1, []
    for i in range(30):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 15, 16, 17, 40, 70)))]
        sampling, wanted = some_sampling(i), rng.randint(1, 24)
        answer = cpu_answer(llama, prompt, sampling, wanted + 4 * rows_each)
        riders.append(Rider(prompt, sampling, answer, wanted))
    engine = engine_over(weights)
    ring = with_drafting(engine, weights) if drafting else None
    rig = EngineRig(
        engine, PagePool(NUM_PAGES, PAGE_SIZE), num_lanes=NUM_LANES, vocab=VOCAB, extend_rows=EXTEND_ROWS,
        seed=SEED, ring=ring,
    )  # fmt: skip
    rig.run(riders)
    assert not drafting or rig.accept_counts == set(range(BLOCK))


def replay_all_buckets(
    engine: DeviceEngine, ring: Ring, seed: int
) -> tuple[list[Results], list[torch.Tensor]]:
    """Prompts in many batches, then batches of 1 to all lanes and back, verified and plain in turn. Returns
    what came out, and what is left on the device."""
    rng = random.Random(seed)
    results = []

    def run(launch: Launch) -> None:
        results.append(engine.results_to_host(engine.launch(launch)))

    lane = 0
    for count, num_rows in ((1, 1), (2, 9), (1, 50), (4, 13), (3, 20), (1, 17)):
        extends = []
        for _ in range(count):
            engine.join(lane, some_sampling(lane))
            prompt = [rng.randrange(VOCAB) for _ in range(num_rows)]
            extends.append(ExtendRows(lane, 0, prompt, True, len(extends)))
            lane += 1
        pages = [entry for extend in extends for entry in own_pages(extend.lane)]
        run(Launch(extends=extends, draft_rows=[] if count > 1 else None, pages=pages))
    sizes = [*range(1, NUM_LANES + 1), *range(NUM_LANES - 1, 0, -1)]
    for i, size in enumerate(sizes):
        lanes = rng.sample(range(NUM_LANES), size)
        if i % 3 == 2:
            run(Launch(lanes=lanes))
        else:
            drafts = [[rng.randrange(-1, VOCAB + 1) for _ in range(BLOCK - 1)] for _ in range(size)]
            engine.set_drafts(drafts)
            rows = [rng.choice((-1, row)) for row in range(size)]
            run(Launch(lanes=lanes, draft_rows=rows, drafts_inline=True))
    memory = engine._memory
    left = [memory.kv[:, :, PAGE_SIZE:], *vars(memory.lanes).values()]
    return results, [*left, ring.base, ring.count, ring.anchor]


class EagerGraphs(Graphs if torch.cuda.is_available() else object):  # type: ignore[misc]
    """Runs the body at each replay."""

    def capture(self, key: Hashable, body: Callable[[], None]) -> None:
        self._bodies[key] = body

    def replay(self, key: Hashable) -> None:
        self._bodies[key]()


def test_graphs_give_what_their_bodies_give_for_rising_and_falling_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = load(tmp_path, torch.bfloat16)
    graphed = engine_over(weights)
    captured = replay_all_buckets(graphed, with_drafting(graphed, weights), SEED)
    monkeypatch.setattr("services.target.core.device_engine.Graphs", EagerGraphs)
    eager = engine_over(weights)
    direct = replay_all_buckets(eager, with_drafting(eager, weights), SEED)
    for i, (ours, theirs) in enumerate(zip(captured[0], direct[0], strict=True)):
        for name in ("tokens", "num_accepted", "finite", "num_clamped", "extend_tokens", "extend_finite"):
            assert (getattr(ours, name) == getattr(theirs, name)).all(), f"{name} of launch {i}"
        assert ours.finite.all() and ours.gpu_s > 0
    for ours, theirs in zip(captured[1], direct[1], strict=True):
        assert torch.equal(ours, theirs)


def test_graphs_captured_while_lanes_decode_leave_them_alone(tmp_path: Path) -> None:
    weights, cpu_weights = load(tmp_path, torch.float32), load(tmp_path, torch.float32, "cpu")
    llama, engine = Llama(cpu_weights), engine_over(weights)
    prompts = [[5, 7, 9], list(range(20))]
    answers = [cpu_answer(llama, prompt, SamplingParams(), 12) for prompt in prompts]
    for lane in (0, 1):
        engine.join(lane, SamplingParams())
    extends = [ExtendRows(lane, 0, prompt, True) for lane, prompt in enumerate(prompts)]
    launches = [Launch(extends=extends, pages=own_pages(0) + own_pages(1)), *[Launch(lanes=[0, 1])] * 2]
    got = [engine.results_to_host(engine.launch(launch)) for launch in launches]
    for block in (BLOCK, 4):
        # One launch is in flight.
        ticket = engine.launch(Launch(lanes=[0, 1]))
        with_drafting(engine, weights, block)
        got.append(engine.results_to_host(ticket))
        got += [engine.results_to_host(engine.launch(Launch(lanes=[0, 1], draft_rows=[-1, -1])))]
    for lane, answer in enumerate(answers):
        assert got[0].extend_tokens[lane] == answer[0]
        assert [int(results.tokens[lane, 0]) for results in got[1:]] == answer[1:7]


@contextmanager
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_launch_waits_for_nothing(tmp_path: Path) -> None:
    """Neither by torch's own account nor by the clock, while the device is kept busy."""
    weights = load(tmp_path, torch.bfloat16)
    engine = engine_over(weights)
    with_drafting(engine, weights)
    first = [ExtendRows(lane, 0, [lane, 3, 5], True, lane) for lane in range(3)]
    for lane in range(3):
        engine.join(lane, some_sampling(lane))
    pages = [entry for lane in range(3) for entry in own_pages(lane)]
    engine.results_to_host(engine.launch(Launch(extends=first, draft_rows=[], pages=pages)))
    with no_synchronization():
        with torch.cuda.stream(engine.stream):
            torch.cuda._sleep(2_000_000_000)
        began = time.perf_counter()
        engine.join(3, some_sampling(3))
        engine.set_drafts([[1] * (BLOCK - 1)] * 2)
        more = [ExtendRows(3, 0, [9] * 40, True, 3)]
        tickets = [
            engine.launch(Launch(more, [0, 1, 2], [1, -1, 0], own_pages(3), drafts_inline=True)),
            engine.launch(Launch(lanes=[3, 0, 1], draft_rows=[0, -1, 2])),
            engine.launch(Launch(lanes=[0])),
        ]
        engine.zero_pages([5])
        took_s = time.perf_counter() - began
        assert engine.stream is not None and not engine.stream.query(), "the device was not kept busy"
    assert took_s < 0.2
    results = [engine.results_to_host(ticket) for ticket in tickets]
    assert all(r.finite.all() for r in results) and results[0].extend_s > 0


def test_a_lane_used_a_thousand_times_gives_the_same_text_and_memory_stays_flat(tmp_path: Path) -> None:
    weights = load(tmp_path, torch.bfloat16)
    engine, rng = engine_over(weights), random.Random(SEED)
    with_drafting(engine, weights)
    prompts = [[rng.randrange(VOCAB) for _ in range(count)] for count in (3, 16, 33, 20, 1)]
    seen: dict[tuple[int, int], list[int]] = {}
    flat: tuple[int, int, int] | None = None
    for life in range(1000):
        lane, which = life % 4, rng.randrange(5)
        engine.join(lane, some_sampling(which))
        extend = ExtendRows(lane, 0, prompts[which], True, 0)
        begin = engine.launch(Launch(extends=[extend], draft_rows=[], pages=own_pages(lane)))
        tickets = [engine.launch(Launch(lanes=[lane], draft_rows=[-1])) for _ in range(3)]
        text = [int(engine.results_to_host(begin).extend_tokens[0])]
        text += [int(engine.results_to_host(ticket).tokens[0, 0]) for ticket in tickets]
        assert seen.setdefault((which, 0), text) == text, f"life {life}"
        if life == 100:
            flat = _memory_in_use()
    assert flat is not None and len(seen) == 5
    allocated, reserved, host = (now - then for now, then in zip(_memory_in_use(), flat, strict=True))
    assert allocated == 0 and reserved <= 0 and host < 20 << 20


def _memory_in_use() -> tuple[int, int, int]:
    """Bytes: on the device allocated, and reserved for that; the process's at its highest."""
    torch.cuda.synchronize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), peak


@pytest.mark.parametrize("num_lanes, budget_ms", [(1, 0.4), (32, 1.0)])
def test_the_hosts_part_of_a_launch_keeps_its_budget(
    tmp_path: Path, num_lanes: int, budget_ms: float
) -> None:
    """As many launches a step as Qwen3-8B has; each lane gets a page, as it may with 16 rows."""
    weights = load(tmp_path, torch.bfloat16, num_layers=36, hidden_size=64, intermediate_size=64)
    engine = engine_over(weights, num_lanes=num_lanes, num_rows_max=num_lanes * 16 + EXTEND_ROWS)
    with_drafting(engine, weights, 16)
    lanes, rows = list(range(num_lanes)), list(range(num_lanes))
    for lane in lanes:
        engine.join(lane, SamplingParams())
    pages = [entry for lane in lanes for entry in own_pages(lane)]
    engine.results_to_host(engine.launch(Launch(lanes=lanes, draft_rows=rows, pages=pages)))
    launch_ms, read_ms = _host_times(engine, lanes, rows, [own_pages(lane)[0] for lane in lanes])
    print(f"{num_lanes} lanes: launch {launch_ms:.3f} ms, results {read_ms:.3f} ms")
    assert launch_ms < budget_ms


def _host_times(
    engine: DeviceEngine, lanes: Sequence[int], rows: Sequence[int], pages: list[PageEntry]
) -> tuple[float, float]:
    """Of launching, and of reading what is done already: medians of a round, and of rounds the best, since
    other tests may share the host."""
    rounds = []
    for _ in range(6):
        launching, reading = [], []
        for lane in lanes:
            engine.join(lane, SamplingParams())
        engine.results_to_host(engine.launch(Launch(lanes=list(lanes), pages=pages)))
        for _ in range(6):
            began = time.perf_counter()
            ticket = engine.launch(Launch(lanes=list(lanes), draft_rows=list(rows), pages=pages))
            launched = time.perf_counter()
            torch.cuda.synchronize()
            done = time.perf_counter()
            engine.results_to_host(ticket)
            reading.append(time.perf_counter() - done)
            launching.append(launched - began)
        rounds.append((statistics.median(launching) * 1e3, statistics.median(reading) * 1e3))
    return min(rounds)
