"""The GPU's target from submission to last token, on a CPU: its composition, core thread, loop and device
engine give the tokens of the CPU's step loop."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common import limits
from common.config import load_settings
from common.contract import DraftContract
from common.errors import ConfigError
from common.handoff.ring import Ring, RingShape
from common.metrics import Metrics
from common.paged_kv import PagePool
from services.target import cuda_parts, kv_budget
from services.target.config import TargetSettings
from services.target.core.core import Core
from services.target.core.device_engine import DeviceEngine
from services.target.core.draft_source import HandOff, PlainReason
from services.target.core.lanes_scheduler import LanesScheduler
from services.target.core.pipelined_source import NoPipelinedDrafter, PipelinedDrafter, PostedStep
from services.target.core.pipelined_step import PipelinedStepLoop
from services.target.core.request import FinishReason, Request, RequestFinished, SamplingParams
from services.target.metrics import TargetMetrics
from services.target.model.llama import Llama, LlamaWeights
from tests.builders import build_tiny_llama_dir
from tests.core_rig import Ask, Habits, OracleDrafts, RecordedObserver, Tape, plain_tokens
from tests.core_thread_rig import Caller
from tests.fakes_kernels import PagedLlama
from tests.paged_runs import Piece, run_pieces

SEED = 20261221
VOCAB, PAGE_SIZE, MAX_LEN, BLOCK = 64, 4, 40, 4
NUM_LANES, EXTEND_ROWS = 3, 8
TAPS = (0, 1)
CONTRACT = DraftContract(TAPS, BLOCK, BLOCK - 1, VOCAB - 1, MAX_LEN, "draft")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LlamaWeights:
    directory = build_tiny_llama_dir(
        tmp_path_factory.mktemp("target"), SEED, vocab_size=VOCAB, hidden_size=32, intermediate_size=32,
        num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16, max_len=MAX_LEN, qwen3=True,
    )  # fmt: skip
    return LlamaWeights.load(directory, torch.float32)


def build_asks(rng: random.Random, count: int) -> list[Ask]:
    asks = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 11)))]
        sampling = SamplingParams(temperature=0.8, seed=i) if i % 3 == 2 else SamplingParams()
        stops = frozenset(rng.sample(range(VOCAB), 3)) if i % 4 == 1 else frozenset()
        asks.append(Ask(prompt, rng.choice((1, 6, 14)), sampling, stops, drafting=i % 5 != 3))
    return asks


def test_the_composed_core_serves_what_the_cpu_serves(weights: LlamaWeights) -> None:
    flags = [
        "--model", "m", "--listen", "unix:/t", "--device", "cuda", "--num-running-max", "2",
        "--extend-rows-max", str(EXTEND_ROWS),
    ]  # fmt: skip
    settings = load_settings(TargetSettings, "services.target", flags)
    pool = PagePool(30, PAGE_SIZE)
    parts = cuda_parts.compose(
        settings, weights, pool, max_len=MAX_LEN, instance_id="i",
        observer=TargetMetrics(Metrics("tandem_target", "m")), open_channel=lambda address: None,
    )  # fmt: skip
    failures: list[bool] = []
    core = Core(
        parts.roster, parts.loop, parts.drafter, num_known_max=8,
        on_failure=lambda: failures.append(True), prepare=lambda: None,
    )  # fmt: skip
    core.start()
    callers = [Caller(f"r{i}", 5) for i in range(3)]
    for caller in callers:
        core.submit(caller.request)
    for caller in callers:
        assert isinstance(caller.wait(), RequestFinished)
    core.stop()
    (expected,) = plain_tokens(Llama(weights), [Ask([3, 4], 5)])
    assert [caller.tokens for caller in callers] == [expected] * 3
    assert not failures and pool.num_free == pool.num_pages


def flags_of_a_gpu(*more: str) -> TargetSettings:
    flags = ["--model", "m", "--listen", "unix:/t", "--device", "cuda", "--num-running-max", "2", *more]
    return load_settings(TargetSettings, "services.target", flags)


def test_the_kv_pool_is_planned_beside_what_composing_then_allocates(weights: LlamaWeights) -> None:
    """The plan is of the very buffers; what a drafter needs is in it when there may be one."""
    token_bytes = 2 * 3 * 16 * 4
    flags = ("--extend-rows-max", str(EXTEND_ROWS), "--page-size", str(PAGE_SIZE))

    def free_for(settings: TargetSettings) -> int:
        """The least free memory with which a pool of one page is possible."""
        low, high = 0, 4 << 30
        while low < high:
            middle = (low + high) // 2
            try:
                cuda_parts.choose_kv_tokens(settings, weights, lambda device, free=middle: free)
                high = middle
            except ConfigError:
                low = middle + 1
        return low

    model = cuda_parts._make_model(flags_of_a_gpu(*flags), weights, PAGE_SIZE, MAX_LEN)
    engine = DeviceEngine(
        model, num_pages=1, page_size=PAGE_SIZE, num_lanes=2, max_len=MAX_LEN, extend_rows_max=EXTEND_ROWS,
        extends_max=2,
    )  # fmt: skip
    plain = free_for(flags_of_a_gpu(*flags))
    buffers = sum(size for name, size in engine.memory_report() if name.startswith("rows"))
    assert plain == buffers + kv_budget.GRAPH_BYTES + math.ceil(PAGE_SIZE * token_bytes / 0.85)

    shape = RingShape(2, 16, 15, 5 * 32, torch.float32, EXTEND_ROWS)
    ring = Ring.local(shape, "cpu")
    draft = DraftContract((0, 1, 0, 1, 0), 16, 15, VOCAB - 1, MAX_LEN, "draft")
    engine.prepare_drafting(draft, ring)
    verifies = dict(engine.memory_report())["rows and logits of verifies"]
    captured = ring.verify_captured.nbytes + ring.extend_captured.nbytes
    with_drafter = free_for(flags_of_a_gpu(*flags, "--drafter", "unix:/d"))
    assert with_drafter - plain == verifies + captured

    settings = flags_of_a_gpu(*flags)
    most = cuda_parts.choose_kv_tokens(settings, weights, lambda device: 4 << 30)
    assert most == 2 * MAX_LEN


def test_what_the_gpu_holds_is_logged_whole_when_it_is_allocated(
    weights: LlamaWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, dict[str, Any]]] = []
    log = SimpleNamespace(info=lambda event, **what: heard.append((event, what)))
    monkeypatch.setattr(cuda_parts, "log", log)
    settings = flags_of_a_gpu("--extend-rows-max", str(EXTEND_ROWS), "--page-size", str(PAGE_SIZE))
    parts = cuda_parts.compose(
        settings, weights, PagePool(30, PAGE_SIZE), max_len=MAX_LEN, instance_id="i",
        observer=TargetMetrics(Metrics("tandem_target", "m")), open_channel=lambda address: None,
    )  # fmt: skip
    ring = Ring.local(RingShape(2, BLOCK, BLOCK - 1, len(TAPS) * 32, torch.float32, EXTEND_ROWS), "cpu")
    parts.loop._engine.prepare_drafting(CONTRACT, ring)  # type: ignore[attr-defined]
    before, after = [what for event, what in heard if event == "device_memory"]
    assert before["rows_and_logits_of_verifies"] == 0 < after["rows_and_logits_of_verifies"]
    num_weights = sum(t.nbytes for layer in weights.layers for t in vars(layer).values() if t is not None)
    assert before["weights"] > num_weights and before["activations"] > 0
    assert [what for event, what in heard if event == "graphs_captured"] == [
        {"done": done, "total": 3} for done in (1, 2, 3)
    ] * 2


@pytest.mark.parametrize("total", [1, 3, 4, 40])
def test_progress_is_told_each_quarter_and_at_the_end(total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    log = SimpleNamespace(info=lambda event, done, total: heard.append(done))
    monkeypatch.setattr(cuda_parts, "log", log)
    for done in range(1, total + 1):
        cuda_parts.log_captured(done, total)
    assert len(heard) == min(total, 4) and heard[-1] == total


class DeviceRig:
    """A pipelined loop over the device engine, whose kernels of staging, choosing and accepting are
    interpreted. Has what tests.core_rig.OracleDrafts needs of a rig."""

    def __init__(self, weights: LlamaWeights, num_pages: int) -> None:
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.scheduler = LanesScheduler(
            self.pool, num_running_max=NUM_LANES, extend_rows_max=EXTEND_ROWS, extends_max=2
        )
        self.engine = DeviceEngine(
            PagedLlama(weights, PAGE_SIZE), num_pages=num_pages, page_size=PAGE_SIZE, num_lanes=NUM_LANES,
            max_len=MAX_LEN, extend_rows_max=EXTEND_ROWS, extends_max=2,
        )  # fmt: skip
        self.ring = Ring.local(
            RingShape(NUM_LANES, BLOCK, BLOCK - 1, len(TAPS) * 32, torch.float32, EXTEND_ROWS), "cpu"
        )
        self.observer = RecordedObserver()

    def run(self, drafter: PipelinedDrafter, asks: list[Ask]) -> list[Tape]:
        loop = PipelinedStepLoop(self.scheduler, self.engine, drafter, self.observer)
        tapes = [Tape(ask) for ask in asks]
        for i, (ask, tape) in enumerate(zip(asks, tapes, strict=True)):
            tape.request = Request(
                f"r{i}", list(ask.prompt), ask.sampling, ask.max_new_tokens, ask.stop_token_ids,
                ask.drafting, tape.record,
            )  # fmt: skip
            self.scheduler.add(tape.request)
        for _ in range(400):
            if not loop.has_work:
                break
            loop.step()
        assert not loop.has_work and self.pool.num_free == self.pool.num_pages
        return tapes

    @property
    def num_accepted(self) -> int:
        return sum(accepted for report in self.observer.reports for _, accepted in report.verifies)


class RingOracle(NoPipelinedDrafter):
    """Drafts what the target will say, with an error now and then, as soon as it is told."""

    draft = CONTRACT

    def __init__(self, rig: DeviceRig, truths: dict[tuple[int, ...], list[int]], rng: random.Random) -> None:
        self.ring = rig.ring
        self._rig, self._truths, self._rng = rig, truths, rng
        self._rows: dict[int, int] = {}

    def draft_rows(self, session_ids: list[int]) -> list[int]:
        return [self._rows.get(session_id, -1) for session_id in session_ids]

    def why_plain(self, session_id: int) -> PlainReason:
        return PlainReason.RESYNC

    def await_drafts(self) -> None: ...

    def mark_ready(self) -> None: ...

    def post(self, step: PostedStep) -> None:
        requests = {request.session_id: request for request in self._rig.scheduler.running}
        self._rows = {row.session_id: i for i, row in enumerate(step.rows) if row is not None}
        for session_id, i in self._rows.items():
            prompt = requests[session_id].prompt
            first = int(self.ring.base[i] + self.ring.count[i]) + 1 - len(prompt)
            draft = self._truths[tuple(prompt)][first : first + BLOCK - 1]
            draft += [VOCAB + 5] * (BLOCK - 1 - len(draft))
            if self._rng.random() < 0.3:
                draft[self._rng.randrange(BLOCK - 1)] = self._rng.randrange(-2, VOCAB)
            self.ring.drafts[i] = torch.tensor(draft)


class InlineOracle(OracleDrafts):
    """Hears of steps by messages."""

    draft = CONTRACT

    def __init__(self, rig: DeviceRig, truths: dict[tuple[int, ...], list[int]], rng: random.Random) -> None:
        habits = Habits(spoil=0.3, absent=0.1, lose=0.05)
        super().__init__(
            rig, truths, rng, num_draft_tokens=BLOCK - 1, habits=habits, hostile_ids=list(range(-3, VOCAB)),
            captured_layer_ids=TAPS,
        )  # fmt: skip
        self.held: dict[tuple[int, ...], torch.Tensor] = {}

    def post(self, handoff: HandOff) -> None:
        super().post(handoff)
        for session_id, held in self.contexts.items():
            request = self.requests[session_id]
            self.held[tuple(request.tokens[: len(held)])] = held


class ByMessages(NoPipelinedDrafter):
    """A pipelined drafter that is reached by messages."""

    draft = CONTRACT

    def __init__(self, rig: DeviceRig, source: InlineOracle) -> None:
        self.ring, self.inline = rig.ring, source


def distinct_asks(rng: random.Random) -> list[Ask]:
    return list({tuple(ask.prompt): ask for ask in build_asks(rng, 8)}.values())


def test_drafts_in_the_ring_change_no_token_and_are_accepted(weights: LlamaWeights) -> None:
    rng = random.Random(SEED)
    asks = distinct_asks(rng)
    expected = plain_tokens(Llama(weights), asks)
    truths = {tuple(ask.prompt): tokens for ask, tokens in zip(asks, expected, strict=True)}
    # Room for two of the longest, so that somebody is preempted.
    rig = DeviceRig(weights, num_pages=14)
    tapes = rig.run(RingOracle(rig, truths, rng), asks)
    assert [tape.tokens for tape in tapes] == expected
    assert rig.num_accepted > 20
    assert {tape.finished.reason for tape in tapes} <= {FinishReason.STOP, FinishReason.LENGTH}


def test_drafts_by_messages_change_no_token_and_the_states_sent_are_the_targets(
    weights: LlamaWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Contexts are captured anew also where little is to come.
    monkeypatch.setattr(limits, "RECAPTURE_ROOM_MIN", 2)
    rng = random.Random(SEED + 1)
    asks = distinct_asks(rng)
    expected = plain_tokens(Llama(weights), asks)
    truths = {tuple(ask.prompt): tokens for ask, tokens in zip(asks, expected, strict=True)}
    rig = DeviceRig(weights, num_pages=14)
    source = InlineOracle(rig, truths, rng)
    tapes = rig.run(ByMessages(rig, source), asks)
    assert [tape.tokens for tape in tapes] == expected
    assert rig.num_accepted > 20 and source.num_lost > 0
    llama = Llama(weights)
    longest = sorted(source.held, key=len)[-3:]
    for tokens in longest:
        ((_, captured),) = run_pieces(llama, [[Piece(0, list(tokens), len(tokens))]], taps=TAPS)
        torch.testing.assert_close(source.held[tokens], captured, rtol=1e-4, atol=1e-4)
