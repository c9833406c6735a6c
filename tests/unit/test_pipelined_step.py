"""The pipelined step loop: order of launches and readings, ends inside a block, reports, hand-overs,
failures. A device without tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from common.errors import Unavailable
from services.target.core.draft_source import Drafts, HandOff, PlainReason
from services.target.core.engine import StepOutput
from services.target.core.pipelined_source import PipelinedDrafter
from services.target.core.report import StepReport
from services.target.core.request import FinishReason, RequestFailed, SamplingParams
from services.target.core.scheduler import Batch, Scheduler
from services.target.core.step import StepLoop
from tests.core_rig import Ask, RecordedObserver, Tape
from tests.fakes_device import VOCAB_ROWS, Oracle, cell
from tests.pipelined_rig import Habits, MessageDrafter, MessageSource, PipelinedRig, RingDrafter

SEED = 20261222
PROMPT = [5, 9, 2]
Make = Callable[[PipelinedRig], PipelinedDrafter] | None
KINDS: dict[str, Any] = {"none": None, "ring": RingDrafter, "messages": MessageDrafter}


def build_rig(kind: str = "none", habits: Habits | None = None, **changes: Any) -> PipelinedRig:
    rng, make = random.Random(SEED), KINDS[kind]
    return PipelinedRig(rng, make and (lambda rig: make(rig, rng, habits)), **changes)


def answer(prompt: list[int], count: int) -> list[int]:
    return Oracle().answer(prompt, SamplingParams(), count)[0]


# A prompt whose first 12 tokens are all different.
DISTINCT = next(p for p in ([5, i] for i in range(VOCAB_ROWS)) if len(set(answer(p, 12))) == 12)


def test_a_step_is_launched_before_the_one_before_is_read() -> None:
    rig = build_rig()
    order: list[tuple[str, int]] = []
    launch, read = rig.engine.launch, rig.engine.results_to_host
    rig.engine.launch = lambda *a: (ticket := launch(*a), order.append(("launch", ticket.number)))[0]  # type: ignore
    rig.engine.results_to_host = lambda t: (order.append(("read", t.number)), read(t))[1]  # type: ignore
    rig.run([Ask(PROMPT, 3)])
    assert order == [
        ("launch", 0), ("launch", 1), ("read", 0), ("launch", 2), ("read", 1), ("read", 2),
    ]  # fmt: skip


def test_a_step_is_read_before_the_next_where_drafts_come_by_messages() -> None:
    rig = build_rig("messages")
    rig.submit(Ask(PROMPT, 9))
    for expected in (1, 2, 3):
        rig.step()
        assert rig.engine.num_launches == expected
        assert rig.engine.num_unread == 0


@pytest.mark.parametrize(("count", "launches"), [(1, 1), (2, 2), (7, 7)])
def test_who_ends_by_length_rides_no_further_than_that(count: int, launches: int) -> None:
    rig = build_rig()
    (tape,) = rig.run([Ask(PROMPT, count)])
    assert tape.tokens == answer(PROMPT, count)
    assert rig.engine.num_launches == launches


def test_who_ends_by_a_stop_rides_once_more() -> None:
    tokens = answer(DISTINCT, 4)
    rig = build_rig()
    (tape,) = rig.run([Ask(DISTINCT, 30, stop_token_ids=frozenset(tokens[3:]))])
    assert tape.tokens == tokens
    assert rig.engine.num_launches == 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("offset", range(10))
def test_nothing_is_committed_past_a_stop_wherever_in_a_block_it_falls(kind: str, offset: int) -> None:
    tokens = answer(DISTINCT, 12)
    rig = build_rig(kind)
    (tape,) = rig.run([Ask(DISTINCT, 30, stop_token_ids=frozenset({tokens[offset], VOCAB_ROWS}))])
    assert tape.tokens == tokens[: offset + 1]
    assert (tape.finished.reason, tape.finished.matched_token_id) == (FinishReason.STOP, tokens[offset])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", range(1, 11))
def test_nothing_is_committed_past_the_length_wherever_in_a_block_it_falls(kind: str, count: int) -> None:
    rig = build_rig(kind)
    (tape,) = rig.run([Ask(PROMPT, count)])
    assert tape.tokens == answer(PROMPT, count)
    assert tape.finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", ["ring", "messages"])
def test_a_right_draft_is_accepted_whole_wherever_its_request_stands_in_the_batch(kind: str) -> None:
    """What the drafter is given is right only if every row, position and anchor is: its drafts show it."""
    rng = random.Random(SEED)
    rig = build_rig(kind, Habits(block_sizes=(5,)), num_pages=400, num_running_max=6, max_len=80)
    asks = [
        Ask([rng.randrange(VOCAB_ROWS) for _ in range(rng.randint(1, 30))], 40, drafting=i != 2)
        for i in range(12)
    ]
    tapes = rig.run(asks)
    verifies = [v for report in rig.observer.reports for v in report.verifies]
    assert len(verifies) > 80
    assert all(num_drafts == num_accepted for num_drafts, num_accepted in verifies)
    assert not any(tapes[2].from_draft)
    for tape in tapes[:2] + tapes[3:]:
        # The first comes with the prompt; a block is 4 drafts and the target's own.
        assert tape.from_draft[:11] == [False] + ([True] * 4 + [False]) * 2
        assert tape.finished.num_drafts == tape.finished.num_decode_steps - 1 == 8
        assert tape.finished.num_accepted_tokens == sum(tape.from_draft) == 31


@pytest.mark.parametrize("kind", ["ring", "messages"])
def test_a_draft_is_wanted_as_long_as_one_token_of_it_may_be_committed(kind: str) -> None:
    rig = build_rig(kind)
    (tape,) = rig.run([Ask(PROMPT, 3)])
    assert tape.from_draft == [False, True, False]
    (tape,) = build_rig(kind).run([Ask(PROMPT, 2)])
    assert tape.from_draft == [False, False]


def test_a_request_that_is_aborted_frees_all_at_once_though_it_is_on_its_way() -> None:
    rig = build_rig("ring", num_running_max=1)
    runs, waits = rig.submit(Ask(PROMPT, 30)), rig.submit(Ask([1, 2], 5))
    for _ in range(4):
        rig.step()
    assert rig.engine.num_unread == 1
    told = len(runs.tokens)
    for name in ("r0", "r0", "unknown"):
        rig.loop.abort(name)
    assert rig.pool.num_free == rig.pool.num_pages
    assert rig.loop.stats().num_running == 0
    rig.run()
    assert runs.finished.reason is FinishReason.ABORT
    assert len(runs.tokens) == runs.finished.num_output_tokens == told
    assert waits.tokens == answer([1, 2], 5)
    assert rig.drafter.ended == {1, 2}  # type: ignore[union-attr]


def test_failing_all_ends_each_request_once_and_leaves_what_is_on_its_way() -> None:
    rig = build_rig(num_running_max=2)
    for _ in range(4):
        rig.submit(Ask(PROMPT, 30))
    for _ in range(3):
        rig.step()
    rig.loop.fail_all(Unavailable("over"), "unavailable")
    assert [type(tape.terminal) for tape in rig.tapes] == [RequestFailed] * 4
    assert rig.observer.failed == [(f"r{i}", "unavailable") for i in range(4)]
    rig.run()


def _ask_that_fails(share: float) -> tuple[Ask, list[int]]:
    """A request whose logits are not finite after some tokens; and those."""
    for i in range(10_000):
        prompt = [7, i % VOCAB_ROWS, i // VOCAB_ROWS % VOCAB_ROWS]
        tokens, fails = Oracle(share).answer(prompt, SamplingParams(), 30)
        if fails and 4 <= len(tokens) <= 8:
            return Ask(prompt, 30), tokens
    raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_not_finite_end_their_own_request_only(kind: str) -> None:
    ask, tokens = _ask_that_fails(0.01)
    rig = build_rig(kind, nan_share=0.01, num_running_max=3)
    neighbours = [
        Ask([i], 20) for i in range(VOCAB_ROWS) if not rig.oracle.answer([i], SamplingParams(), 20)[1]
    ][:2]
    fails = rig.submit(ask)
    others = [rig.submit(neighbour) for neighbour in neighbours]
    rig.step()
    assert fails.request.page_table is not None
    pages = set(fails.request.page_table.pages)
    rig.run()
    assert isinstance(fails.terminal, RequestFailed)
    assert fails.tokens == tokens
    assert rig.observer.failed == [("r0", "non_finite")]
    assert pages | {0} <= rig.engine.zeroed
    for tape, neighbour in zip(others, neighbours, strict=True):
        assert tape.tokens == rig.oracle.answer(neighbour.prompt, SamplingParams(), 20)[0]


@pytest.mark.parametrize("kind", ["ring", "messages"])
def test_a_block_with_logits_that_are_not_finite_is_computed_again_without_its_draft(kind: str) -> None:
    ask, tokens = _ask_that_fails(0.01)
    rig = build_rig(kind, Habits(block_sizes=(8,)), nan_share=0.01)
    restarts: list[int] = []
    restart = rig.scheduler.restart
    rig.scheduler.restart = lambda r, n: (restarts.append(n), restart(r, n))[1]  # type: ignore[method-assign]
    (tape,) = rig.run([ask])
    assert tape.tokens == tokens
    plain = [reason for report in rig.observer.reports for reason in report.plain]
    assert plain.count(PlainReason.NON_FINITE) == len(restarts) >= 1


def test_the_report_is_of_the_step_that_was_read() -> None:
    rig = build_rig("ring", Habits(block_sizes=(4,)), extend_rows_max=5)
    rig.submit(Ask([10, 11, 12], 30))
    rig.submit(Ask([1, 2, 3, 4, 5], 30))
    rig.step()
    assert [r.num_requests for r in rig.observer.reports] == [0], "requests began, nothing is known yet"
    for _ in range(4):
        rig.step()
    reports = rig.observer.reports[1:]
    assert [r.num_requests for r in reports] == [2, 2, 2, 2]
    assert [r.num_prompt_tokens for r in reports] == [5, 3, 0, 0]
    assert [r.num_rows for r in reports] == [5, 4 + 3, 8, 8]
    assert [r.captured_bytes for r in reports] == [r.num_rows * 12 for r in reports]
    assert [r.extends for r in reports] == [True, True, False, False]
    assert [r.num_generated_tokens for r in reports] == [1, 4 + 1, 8, 8]
    assert [r.verifies for r in reports] == [[], [(3, 3)], [(3, 3)] * 2, [(3, 3)] * 2]


def test_the_report_names_why_a_decode_had_no_draft() -> None:
    rig = build_rig("ring", Habits(absent=1.0))
    rig.run([Ask(PROMPT, 4), Ask(PROMPT, 4, drafting=False)])
    plain = [reason for report in rig.observer.reports for reason in report.plain]
    # With room for one token only, nobody wanted a draft.
    assert plain.count(PlainReason.RESYNC) == 2
    assert plain.count(PlainReason.DISABLED) == 3
    rig = build_rig()
    rig.run([Ask(PROMPT, 4)])
    assert [r.plain for r in rig.observer.reports[1:]] == [[], *[[PlainReason.DISABLED]] * 2, []]


def test_a_draft_that_found_no_pages_is_reported_and_not_accepted() -> None:
    rig = build_rig("ring", Habits(block_sizes=(4,)), num_pages=3, page_size=4)
    tapes = rig.run([Ask([10, 11, 12], 9), Ask([10], 8)])
    plain = [reason for report in rig.observer.reports for reason in report.plain]
    assert PlainReason.NO_CAPACITY in plain
    assert [tape.tokens for tape in tapes] == [answer([10, 11, 12], 9), answer([10], 8)]


def test_preemptions_are_reported_once() -> None:
    rig = build_rig(num_pages=10, page_size=2)
    rig.run([Ask([3] * 6, 12), Ask([4] * 6, 12)])
    assert rig.scheduler.num_preemptions > 0
    told = sum(report.num_preemptions for report in rig.observer.reports if report.num_requests)
    assert told == rig.scheduler.num_preemptions


def test_drafts_of_another_contract_than_the_one_that_is_there_are_left_out() -> None:
    rig = build_rig("messages", Habits(block_sizes=(4,)))
    source = rig.drafter.source  # type: ignore[union-attr]
    rig.submit(Ask(PROMPT, 30))
    for _ in range(3):
        rig.step()
    collect = source.collect

    def collect_and_change() -> Drafts:
        drafts = collect()
        assert drafts.tokens
        source.habits.block_sizes = (8,)
        source.lose_connection()
        return drafts

    source.collect = collect_and_change
    rig.step()
    source.collect = collect
    assert rig.observer.reports[-1].plain == [PlainReason.UNAVAILABLE]
    assert rig.observer.reports[-1].num_rows == 8
    (tape,) = rig.run()
    assert tape.tokens == answer(PROMPT, 30)


def test_a_context_that_was_lost_is_captured_anew_from_the_first_token_where_that_is_cheap() -> None:
    rig = build_rig("ring", max_len=64)
    rig.submit(Ask(PROMPT, 50))
    for _ in range(4):
        rig.step()
    drafter: Any = rig.drafter
    lost = {rig.scheduler.running[0].session_id}
    drafter.lost_sessions = lambda: lost
    num_known = rig.tapes[0].request.committed_len
    rig.step()
    (extend,) = drafter.posted[-1].extends
    assert (extend.position, extend.num_rows) == (0, min(num_known, 16))
    lost.clear()
    before = drafter.num_drafts
    (tape,) = rig.run()
    assert tape.tokens == answer(PROMPT, 50) and drafter.num_drafts > before


def test_drafts_that_are_not_of_the_vocabulary_are_told_of_and_counted_as_none() -> None:
    rig = build_rig("ring", Habits(hostile=1.0))
    (tape,) = rig.run([Ask(PROMPT, 30)])
    assert tape.tokens == answer(PROMPT, 30)
    plain = [reason for report in rig.observer.reports for reason in report.plain]
    verifies = [verify for report in rig.observer.reports for verify in report.verifies]
    invalid = rig.drafter.invalid  # type: ignore[attr-defined]
    assert plain.count(PlainReason.INVALID_DRAFT) >= 5 and set(invalid) == {tape.request.session_id}
    # What was launched past the end was read, too.
    assert len(invalid) - 1 <= plain.count(PlainReason.INVALID_DRAFT) <= len(invalid)
    assert len(verifies) + plain.count(PlainReason.INVALID_DRAFT) == tape.request.num_drafts


@pytest.mark.parametrize("kind", ["ring", "messages"])
def test_a_drafter_that_the_device_has_no_room_for_is_refused_and_decoding_goes_on_without(kind: str) -> None:
    rig = build_rig(kind, Habits(block_sizes=(8,)))
    rig.engine.block_size_fits = 4
    (tape,) = rig.run([Ask(PROMPT, 12)])
    assert tape.tokens == answer(PROMPT, 12)
    source = rig.drafter if kind == "ring" else rig.drafter.source  # type: ignore[attr-defined]
    assert [mismatch.field for mismatch in source.mismatches[:1]] == ["block_size"]
    assert source.num_drafts == 0 and not any(report.captured_bytes for report in rig.observer.reports)


def test_a_drafter_that_fits_may_come_after_one_that_did_not() -> None:
    rig = build_rig("ring", Habits(block_sizes=(4,), come_back=1.0))
    rig.engine.block_size_fits = 2
    rig.submit(Ask(PROMPT, 40))
    for _ in range(4):
        rig.step()
    rig.engine.block_size_fits = 4
    (tape,) = rig.run()
    assert tape.tokens == answer(PROMPT, 40)
    assert rig.drafter.mismatches and rig.drafter.num_drafts > 0  # type: ignore[attr-defined]


def test_nothing_is_captured_while_nobody_wants_a_draft() -> None:
    rig = build_rig("ring")
    rig.run([Ask(PROMPT, 5, drafting=False)])
    posted = rig.drafter.posted  # type: ignore[union-attr]
    assert all(not step.extends and not step.rows for step in posted)
    assert all(report.captured_bytes == 0 for report in rig.observer.reports)
    assert [step.ended for step in posted if step.ended] == [[1]]


def test_a_step_without_requests_hands_ended_sessions_over_once_and_reports_only_what_changed() -> None:
    rig = build_rig("ring")
    rig.run([Ask(PROMPT, 4)])
    drafter: Any = rig.drafter
    assert [step.ended for step in drafter.posted if step.ended] == [[1]]
    posted, reports = len(drafter.posted), len(rig.observer.reports)
    for _ in range(3):
        rig.step()
    assert (len(drafter.posted), len(rig.observer.reports)) == (posted, reports)
    assert drafter.completed == [step.number for step in drafter.posted if step.extends or step.rows]


def test_committed_tokens_are_told_before_the_end_and_when_the_snapshot_shows_it() -> None:
    rig = build_rig()
    tape = rig.submit(Ask(PROMPT, 2))
    seen: list[tuple[str, int]] = []
    inner = tape.request.emit
    tape.request.emit = lambda event: (
        seen.append((type(event).__name__, rig.loop.stats().num_running)), inner(event)
    )[1]  # fmt: skip
    rig.run()
    assert seen == [("TokensCommitted", 1), ("TokensCommitted", 0), ("RequestFinished", 0)]


def test_the_times_of_a_step_are_of_the_device_and_of_the_host_beside_it() -> None:
    """A device that takes 10 a step, 4 of them in waiting for drafts; each look at the clock takes 1."""
    rig = build_rig("ring")
    now = 0.0

    def tick() -> float:
        nonlocal now
        now += 1
        return now

    rig.loop._clock = tick
    read = rig.engine.results_to_host

    def results(ticket: Any) -> Any:
        nonlocal now
        results = read(ticket)
        now += 6
        object.__setattr__(results, "gpu_s", 6.0)
        return results

    rig.engine.results_to_host = results  # type: ignore[method-assign]
    rig.submit(Ask(PROMPT, 30))
    for _ in range(5):
        rig.step()
    report = rig.observer.reports[-1]
    assert (report.forward_s, report.commit_s, report.host_s) == (6, 1, 2)
    # From read to read it was 6 and five looks at the clock; the device worked for 6.
    assert report.draft_wait_s == 5


class _Cells(list[int]):
    nbytes = 0


class _CpuOracle:
    """The engine of the CPU's loop over the same made-up model."""

    def __init__(self) -> None:
        self._oracle = Oracle()

    def run(self, batch: Batch, captured_layer_ids: tuple[int, ...]) -> StepOutput:
        chosen: list[list[int] | None] = []
        captured: list[int] = []
        for s in batch.scheduled:
            tokens = s.request.tokens[: s.start + s.num_tokens] + s.draft
            cells = [cell(position, token) for position, token in enumerate(tokens)]
            captured += cells[s.start :]
            stops = range(len(tokens) - len(s.draft), len(tokens) + 1) if s.samples else ()
            chosen.append([self._oracle.choose(cells[:stop], s.request.sampling) or 0 for stop in stops])
        return StepOutput(chosen, _Cells(captured) if captured_layer_ids else None)  # type: ignore[arg-type]

    def zero_pages(self, pages: list[int]) -> None:
        raise AssertionError


@pytest.mark.parametrize("round_", range(10))
def test_a_step_in_turn_reports_and_hands_over_what_the_cpus_loop_does(round_: int) -> None:
    """The same drafter, with the same chances, beside both."""
    rng = random.Random(SEED + round_)
    habits = Habits(spoil=0.4, hostile=0.1, absent=0.2)
    asks = [
        Ask([rng.randrange(VOCAB_ROWS) for _ in range(rng.randint(1, 20))], rng.randint(1, 40),
            drafting=rng.random() < 0.8)
        for _ in range(8)
    ]  # fmt: skip
    sizes: Any = {"num_pages": 400, "max_len": 64, "num_running_max": 3, "extend_rows_max": 16}
    rig = PipelinedRig(random.Random(1), lambda rig: MessageDrafter(rig, random.Random(2), habits), **sizes)
    tapes = rig.run(asks)

    twin = PipelinedRig(random.Random(1), **sizes)
    source = MessageSource(twin, random.Random(2), habits)
    twin.scheduler = Scheduler(twin.pool, num_running_max=3, extend_rows_max=16)  # type: ignore[assignment]
    observer = RecordedObserver()
    loop = StepLoop(twin.scheduler, _CpuOracle(), source, observer)  # type: ignore[arg-type]
    twin_tapes = [twin.submit(ask) for ask in asks]
    while loop.has_work:
        loop.step()
    loop.step()

    assert [tape.tokens for tape in tapes] == [tape.tokens for tape in twin_tapes]
    assert [tape.from_draft for tape in tapes] == [tape.from_draft for tape in twin_tapes]
    assert [_facts(r) for r in rig.observer.reports] == [_facts(r) for r in observer.reports]
    mine: Any = rig.drafter
    assert [_handed(h) for h in mine.source.handoffs] == [_handed(h) for h in source.handoffs]
    assert sum(len(r.verifies) for r in observer.reports) > 5
    assert [_counts(tape) for tape in tapes] == [_counts(tape) for tape in twin_tapes]


def _facts(report: StepReport) -> tuple[object, ...]:
    return (
        report.num_requests, report.num_prompt_tokens, report.num_generated_tokens,
        sorted(report.verifies), sorted(reason.value for reason in report.plain),
    )  # fmt: skip


def _handed(handoff: HandOff) -> tuple[object, ...]:
    """Session, position and number of rows: the rows lie elsewhere in a batch of lanes."""
    appends = sorted((a.session_id, a.position, a.row_stop - a.row_start) for a in handoff.appends)
    wanted = sorted((block.session_id, block.position, block.anchor) for block in handoff.wanted)
    return appends, wanted, sorted(handoff.ended)


def _counts(tape: Tape) -> tuple[int, ...]:
    f = tape.finished
    return f.num_decode_steps, f.num_drafts, f.num_draft_tokens, f.num_accepted_tokens
