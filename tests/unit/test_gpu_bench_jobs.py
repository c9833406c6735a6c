"""Rows, identity and soak of the GPU bench, over the CPU's step loop and a made-up model."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from services.target.core.step import StepLoop
from tests.core_rig import COUNTING_VOCAB, CountingModel, Habits, OracleDrafts, Rig
from tools.bench_result import Row, as_json
from tools.gpu_bench.contender import Contender
from tools.gpu_bench.core_load import CoreLoad
from tools.gpu_bench.floor import Floor, kv_bytes
from tools.gpu_bench.identity import compare_tokens, identity_asks, identity_table
from tools.gpu_bench.interruption import Interrupted
from tools.gpu_bench.plan import GpuPlan, Job, Mode
from tools.gpu_bench.prompts import RandomPrompts
from tools.gpu_bench.rows import RowMeter, rows_table, warnings_of
from tools.gpu_bench.soak import MemorySample, Soak, grown
from tools.gpu_bench.step_log import StepLog

PLAN = GpuPlan(
    device="cuda", random_shape="tiny", model=None, draft=None, job=Job.ROWS,
    modes=(Mode.PLAIN, Mode.INPROCESS),
    concurrency=(1, 3), prompt_tokens=5, max_new_tokens=40, num_rounds=2, synthetic_accept_length=None,
    row_independent=False, temperature=0.0, top_p=1.0, amount=0,
)  # fmt: skip
PROMPTS = RandomPrompts(COUNTING_VOCAB, PLAN.prompt_tokens)
FLOOR = Floor(
    bandwidth_bytes_s=1e9, target_bytes=2_000_000, draft_bytes=500_000, target_kv_bytes=100, draft_kv_bytes=10
)


class RotatingTruths(dict):
    """What follows any prompt in the counting model."""

    def __getitem__(self, prompt: tuple[int, ...]) -> list[int]:
        return [(prompt[-1] + 1 + i) % COUNTING_VOCAB for i in range(400)]


def contender(mode: Mode, **habits: float) -> tuple[Contender, Rig]:
    """A loop of the CPU path; with drafts that err as `habits` say, unless the mode is plain."""
    rng = random.Random(0)
    drafts = None
    if mode is not Mode.PLAIN:
        drafts = lambda rig: OracleDrafts(  # noqa: E731
            rig, RotatingTruths(), rng, habits=Habits(**habits), hostile_ids=list(range(COUNTING_VOCAB))
        )
    rig, log = Rig(CountingModel(), drafts=drafts), StepLog()
    rig.loop = StepLoop(rig.scheduler, rig.engine, rig.draft_source, log)
    return Contender(mode, rig.loop, CoreLoad(rig.loop, rig.scheduler, lambda: False), log), rig


def measured(plan: GpuPlan = PLAN) -> list[Row]:
    contenders = [contender(mode)[0] for mode in plan.modes]
    contenders[1].take_drafting_ms = lambda: {"draft": 1.5}
    meter = RowMeter(plan, contenders, FLOOR, PROMPTS, lambda: None)
    order: list[tuple[str, int]] = []
    meter.run(lambda row: order.append((row.mode, row.concurrency)))
    assert len(order) == meter.num_rounds
    # Level by level, the modes in turn: first to warm up, then round by round.
    one = [(mode, 1) for mode in ("plain", "inprocess", "plain", "inprocess", "inprocess", "plain")]
    assert order == [*one, *((mode, 3) for mode, _ in one)]
    return meter.rows


def test_each_mode_gets_its_rounds_at_each_level() -> None:
    rows = measured()
    assert [(row.mode, row.concurrency) for row in rows] == [
        ("plain", 1), ("inprocess", 1), ("plain", 3), ("inprocess", 3),
    ]  # fmt: skip
    for row in rows:
        assert len(row.tok_s) == len(row.step_ms) == len(row.phases_ms) == PLAN.num_rounds
        assert min(row.tok_s) > 0 and min(row.step_ms) > 0
        # A prompt for each 40 tokens: the rate over everything is below that of decoding.
        assert row.more["tok_s_end_to_end"][0] > 0
        drafted = row.mode == "inprocess"
        assert bool(row.accept_length) == drafted
        assert ("draft" in row.phases_ms[0]) == drafted
        # 2 or 2.5 MB at 1 GB/s; 25 positions in the mean.
        assert row.more["floor_ms"][0] == pytest.approx(2.5 if drafted else 2.0)
        assert row.more["kv_floor_ms"][0] == pytest.approx(
            row.concurrency * 25 * (110 if drafted else 100) / 1e6
        )
    drafted = rows[1].accept_length[0]
    # Blocks of 8 that are always right; the last one of an answer is cut.
    assert 7 < drafted <= 8


def test_an_accept_length_that_was_set_is_called_synthetic_in_table_and_json() -> None:
    plan = replace(PLAN, synthetic_accept_length=8.0)
    rows = measured(plan)
    floors_ms = {mode.value: FLOOR.weights_ms(mode) for mode in plan.modes}
    result = as_json(
        rows, device="cpu", model_name="tiny", block_size=8, accept_kind=plan.accept_kind, floors_ms=floors_ms
    )
    assert result["accept"]["kind"] == "synthetic"
    assert result["rows"][1]["floor_fraction"] == pytest.approx(2.5 / result["rows"][1]["step_ms"])
    assert warnings_of(rows) == []
    table = rows_table(rows, plan.accept_kind)
    assert "synthetic" in str(table.title)
    assert any("synthetic" in str(column.header) for column in table.columns)
    assert table.row_count == 4


def test_steps_without_drafts_and_hidden_waits_make_a_row_doubtful() -> None:
    contenders = [contender(Mode.PLAIN)[0], contender(Mode.INPROCESS, absent=0.5)[0]]

    def after_each_run() -> None:
        contenders[0].syncs.append("somewhere.py:1")

    meter = RowMeter(replace(PLAN, concurrency=(2,)), contenders, FLOOR, PROMPTS, after_each_run)
    meter.run(lambda row: None)
    doubts = warnings_of(meter.rows)
    assert len(doubts) == 2
    assert doubts[0].startswith("plain x 2: the host waited unseen")
    assert doubts[1].startswith("inprocess x 2: ") and doubts[1].endswith("of the decode steps had no draft")


def test_an_interrupted_run_keeps_the_rounds_that_were_finished() -> None:
    contenders = [contender(mode)[0] for mode in PLAN.modes]
    calls = iter(range(100))

    def check() -> None:
        # Two rounds to warm up, two that count, and the third is cut short.
        if next(calls) == 4:
            raise Interrupted

    meter = RowMeter(PLAN, contenders, FLOOR, PROMPTS, check)
    with pytest.raises(Interrupted):
        meter.run(lambda row: None)
    assert [len(row.tok_s) for row in meter.rows] == [1, 1, 0, 0]
    assert rows_table(meter.rows, "real").row_count == 2


def test_a_draft_that_is_wrong_changes_no_token_and_a_model_that_drifts_is_found() -> None:
    plan = replace(PLAN, job=Job.IDENTITY, concurrency=(4,), amount=9)
    asks = identity_asks(plan, PROMPTS, seed=random.randrange(2**32))
    assert {ask.sampling.temperature for ask in asks} == {0.0, 0.8}
    learned: dict[tuple[int, ...], list[int]] = {}

    def learn(prompt: list[int], output: list[int]) -> None:
        learned[tuple(prompt)] = output

    contenders = [contender(Mode.PLAIN)[0], contender(Mode.INPROCESS, spoil=0.3)[0]]
    comparisons = compare_tokens(plan, contenders, asks, learn, lambda: None, lambda mode, level: None)
    modes = [(c.mode, c.concurrency) for c in comparisons]
    assert modes == [("plain", 4), ("inprocess", 1), ("inprocess", 4)]
    assert all(c.found == [] and c.num_tokens == 9 * 40 for c in comparisons)
    assert len(learned) == 9
    assert identity_table(comparisons, False).row_count == 3

    class Drifting(CountingModel):
        """Chooses otherwise once there is company."""

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().logits(hidden).roll(int(hidden.shape[0] > 1), dims=1)

    drifting, rig = contender(Mode.PLAIN)
    rig.engine._model = Drifting()
    (comparison, *_) = compare_tokens(plan, [drifting], asks, learn, lambda: None, lambda mode, level: None)
    assert len(comparison.found) == comparison.as_json()["prompts_that_differ"] > 0


def test_a_soak_counts_what_it_did_and_finds_nothing_where_nothing_leaks() -> None:
    plan = replace(PLAN, job=Job.SOAK, concurrency=(6,), amount=120)
    subject, rig = contender(Mode.INPROCESS, spoil=0.2)
    done: list[int] = []
    # Of 36 requests a random seed leaves all alone once in fifty.
    result = Soak(plan, subject, PROMPTS, seed=7).run(lambda: None, done.append)
    assert result.complaints == []
    assert result.num_steps >= 120 and done[-1] == result.num_steps
    assert 0 < result.num_cancelled < result.num_requests
    assert result.num_tokens > result.num_requests
    assert len(result.as_json()["memory"]) == len(done)


def test_a_soak_finds_a_page_that_nobody_has() -> None:
    plan = replace(PLAN, job=Job.SOAK, concurrency=(4,), amount=20)
    subject, rig = contender(Mode.PLAIN)
    rig.pool.allocate(1)
    result = Soak(plan, subject, PROMPTS, seed=0).run(lambda: None, lambda steps: None)
    assert "target: 1 pages unaccounted" in result.complaints
    assert "target: 1 pages are not free" in result.complaints


def test_memory_that_grows_is_a_complaint_and_memory_that_wavers_is_not() -> None:
    mib = 1 << 20
    level = MemorySample(100 * mib, 50 * mib, 1000 * mib, 2000 * mib)
    assert grown([level, replace(level, own_resident=120 * mib), level]) == []
    leaked = replace(level, torch_allocated=1040 * mib)
    assert grown([level, level, leaked]) == ["memory: torch_allocated grew by 40 MiB"]


def test_k_v_bytes_of_a_position_are_those_of_qwen3_8b() -> None:
    assert kv_bytes((36, 8, 128), torch.bfloat16) == 147_456
