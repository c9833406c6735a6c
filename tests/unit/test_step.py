"""The step loop: order of events, reports, hand-overs, failures. A made-up model whose next token is
the one after; no weights."""

from __future__ import annotations

import random

import pytest

from common.errors import Unavailable
from services.target.core.draft_source import Drafts, HandOff, PlainReason
from services.target.core.request import FinishReason, Phase, RequestFailed, SamplingParams
from tests.core_rig import COUNTING_VOCAB, Ask, CountingModel, Rig


class ScriptedDrafts:
    """A DraftSource that gives what `answers` says, step by step, and keeps every hand-over."""

    def __init__(self, *answers: Drafts, captured_layer_ids: tuple[int, ...] = (0,)) -> None:
        self.captured_layer_ids = captured_layer_ids
        self.answers = list(answers)
        self.handoffs: list[HandOff] = []
        self.lost: set[int] = set()

    def post(self, handoff: HandOff) -> None:
        self.handoffs.append(handoff)

    def collect(self) -> Drafts:
        return self.answers.pop(0) if self.answers else Drafts()

    def lost_sessions(self) -> set[int]:
        lost, self.lost = self.lost, set()
        return lost

    def close(self) -> None:
        self.answers = []


def build_rig(source: ScriptedDrafts | None = None, **changes: int) -> tuple[Rig, ScriptedDrafts]:
    source = source or ScriptedDrafts()
    return Rig(CountingModel(), drafts=lambda _: source, **changes), source


def test_a_prompt_chunk_is_handed_over_before_anything_is_sampled() -> None:
    rig, source = build_rig(extend_rows_max=4)
    rig.submit(Ask([10, 11, 12, 13, 14, 15], 5))
    rig.loop.step()
    first = source.handoffs[0]
    assert [(a.session_id, a.position, a.row_start, a.row_stop) for a in first.appends] == [(1, 0, 0, 4)]
    assert first.wanted == []
    rig.loop.step()
    second = source.handoffs[1]
    assert [(a.position, a.row_start, a.row_stop) for a in second.appends] == [(4, 0, 2)]
    assert [(b.session_id, b.position, b.anchor) for b in second.wanted] == [(1, 6, 16)]


def test_only_accepted_rows_of_a_verify_become_context() -> None:
    rig, source = build_rig(ScriptedDrafts(Drafts(), Drafts(tokens={1: [12, 13, 40], 2: [9, 9, 9]})))
    rig.submit(Ask([10], 9))
    rig.submit(Ask([20, 21], 9))
    rig.loop.step()
    rig.loop.step()
    handoff = source.handoffs[1]
    # Rows: anchor and 3 drafts of session 1, the same of session 2.
    assert [(a.session_id, a.position, a.row_start, a.row_stop) for a in handoff.appends] == [
        (1, 1, 0, 3), (2, 2, 4, 5),
    ]  # fmt: skip
    assert [(b.session_id, b.position, b.anchor) for b in handoff.wanted] == [(1, 4, 14), (2, 3, 23)]
    assert handoff.captured is not None
    assert handoff.captured[:3].tolist() == [[11, 1], [12, 2], [13, 3]]
    assert rig.tapes[0].from_draft == [False, True, True, False]
    assert rig.observer.reports[1].verifies == [(3, 2), (3, 0)]


def test_no_block_is_wanted_where_one_token_is_left_and_none_after_the_end() -> None:
    rig, source = build_rig()
    rig.run([Ask([10], 3)])
    assert [len(handoff.wanted) for handoff in source.handoffs] == [1, 0, 0, 0]
    assert [len(handoff.appends) for handoff in source.handoffs] == [1, 1, 0, 0]
    assert [handoff.ended for handoff in source.handoffs] == [[], [], [1], []]


def test_nothing_is_captured_while_nobody_can_use_it() -> None:
    rig, source = build_rig(ScriptedDrafts(captured_layer_ids=()))
    rig.run([Ask([10], 3)])
    assert all(handoff.captured is None and not handoff.appends for handoff in source.handoffs)
    # A block may be wanted all the same: it is the source that says why there is none.
    assert len(source.handoffs[0].wanted) == 1


def test_the_report_names_why_a_decode_step_had_no_draft() -> None:
    rig, _ = build_rig(
        ScriptedDrafts(Drafts(), Drafts(plain={1: PlainReason.DEADLINE}), Drafts(tokens={1: [13]}))
    )
    rig.submit(Ask([10], 9))
    rig.submit(Ask([10], 9, drafting=False))
    for _ in range(3):
        rig.loop.step()
    assert [r.plain for r in rig.observer.reports] == [
        [], [PlainReason.DEADLINE, PlainReason.DISABLED], [PlainReason.DISABLED],
    ]  # fmt: skip


def test_a_draft_that_found_no_pages_is_reported() -> None:
    rig, _ = build_rig(ScriptedDrafts(Drafts(), Drafts(tokens={1: [13, 14, 15]})), num_pages=2, page_size=4)
    rig.submit(Ask([10, 11], 6))
    rig.submit(Ask([10], 6))
    rig.loop.step()
    assert rig.scheduler.num_running == 2
    rig.loop.step()
    assert rig.observer.reports[1].plain == [PlainReason.NO_CAPACITY]
    assert rig.observer.reports[1].verifies == []


def test_the_report_counts_rows_tokens_and_captured_bytes() -> None:
    rig, _ = build_rig(extend_rows_max=5)
    rig.submit(Ask([10, 11, 12], 9))
    rig.submit(Ask([1, 2, 3, 4, 5], 9))
    rig.loop.step()
    report = rig.observer.reports[0]
    assert (report.num_requests, report.num_rows, report.num_prompt_tokens) == (2, 5, 5)
    assert (report.num_generated_tokens, report.extends) == (1, True)
    assert report.captured_bytes == 5 * 2 * 4
    rig.loop.step()
    assert rig.observer.reports[1].num_prompt_tokens == 3
    assert rig.observer.stats[1].num_running == 2


def test_only_a_step_in_which_some_request_ran_more_than_one_token_of_its_own_extends() -> None:
    rig, _ = build_rig()
    rig.submit(Ask([10, 11, 12], 9))
    rig.loop.step()
    rig.loop.step()
    rig.submit(Ask([1, 2], 9))
    rig.loop.step()
    rig.loop.step()
    assert [report.extends for report in rig.observer.reports] == [True, False, True, False]


def test_the_parts_of_a_step_add_up_to_it() -> None:
    ticks = iter(range(100))
    rig, _ = build_rig()
    rig.loop._clock = lambda: float(next(ticks))
    rig.submit(Ask([10, 11], 3))
    rig.loop.step()
    report = rig.observer.reports[0]
    assert (report.draft_wait_s, report.forward_s, report.commit_s) == (1, 1, 1)
    assert report.draft_wait_s + report.forward_s + report.commit_s + report.host_s == next(ticks) - 1


def test_committed_tokens_are_told_before_the_end_and_the_end_once() -> None:
    order: list[str] = []
    rig, source = build_rig()
    tape = rig.submit(Ask([10], 1))
    inner, post = tape.request.emit, source.post
    tape.request.emit = lambda event: (order.append(type(event).__name__), inner(event))[1]
    source.post = lambda handoff: (order.append("post"), post(handoff))[1]  # type: ignore
    rig.loop.step()
    # The drafter may start before the callers hear.
    assert order == ["post", "TokensCommitted", "RequestFinished"]


def test_lost_contexts_are_rewound_only_where_that_is_cheap_and_pays() -> None:
    rig, source = build_rig(extend_rows_max=1 << 12, num_pages=4096, page_size=16)
    asks = [Ask([1] * 20, 40), Ask([1] * 600, 40), Ask([1] * 20, 12)]
    for ask in asks:
        rig.submit(ask)
    rig.loop.step()
    source.lost = {1, 2, 3}
    rig.loop.step()
    positions = {a.session_id: a.position for a in source.handoffs[1].appends}
    assert positions == {1: 0, 2: 600, 3: 20}, "only the first is short enough and has enough to come"


def test_an_aborted_request_ends_once_with_its_pages_free_whether_it_ran_or_waited() -> None:
    rig, source = build_rig(num_running_max=1)
    runs, waits = rig.submit(Ask([10], 50)), rig.submit(Ask([10], 50))
    rig.loop.step()
    for name in ("r0", "r1", "r0", "unknown"):
        rig.loop.abort(name)
    for tape, num_tokens in ((runs, 1), (waits, 0)):
        assert tape.finished.reason is FinishReason.ABORT
        assert tape.finished.num_output_tokens == len(tape.tokens) == num_tokens
    rig.run()
    assert [handoff.ended for handoff in source.handoffs] == [[], [1]]


def test_failing_all_ends_each_request_once() -> None:
    rig, _ = build_rig(num_running_max=2)
    for _ in range(4):
        rig.submit(Ask([10], 50))
    rig.loop.step()
    rig.loop.fail_all(Unavailable("over"), "unavailable")
    assert [type(tape.terminal) for tape in rig.tapes] == [RequestFailed] * 4
    assert all(tape.request.phase is Phase.FINISHED for tape in rig.tapes)
    assert rig.observer.failed == [(f"r{i}", "unavailable") for i in range(4)]
    rig.check_idle()


def test_five_hundred_mixed_requests_with_cancellations_leak_neither_page_nor_session() -> None:
    """Drafted, plain, sampled, stopped, aborted while waiting, running and preempted."""
    rng = random.Random(20261216)
    source = ScriptedDrafts()
    rig, _ = build_rig(source, num_pages=40, page_size=4, num_running_max=12, extend_rows_max=40)
    asks = []
    for i in range(500):
        prompt = [rng.randrange(COUNTING_VOCAB) for _ in range(rng.randint(1, 40))]
        stops = frozenset(rng.sample(range(COUNTING_VOCAB), rng.choice([0, 0, 3])))
        sampling = SamplingParams(temperature=rng.choice([0.0] * 5 + [0.8]), top_p=0.9, seed=i)
        asks.append(Ask(prompt, rng.randint(1, 40), sampling, stops, drafting=rng.random() < 0.8))

    def draft_and_cancel() -> None:
        drafts = Drafts()
        for block in source.handoffs[-1].wanted:
            right = [(block.anchor + 1 + k) % COUNTING_VOCAB for k in range(7)]
            right[rng.randrange(7)] += rng.choice([0, 0, 1])
            drafts.tokens[block.session_id] = [t % COUNTING_VOCAB for t in right]
        source.answers = [drafts]
        running = [r.session_id for r in rig.scheduler.running if r.drafting]
        source.lost = set(rng.sample(running, 1)) if running and rng.random() < 0.05 else set()
        for _ in range(rng.choice([0, 0, 1, 3])):
            rig.loop.abort(f"r{rng.randrange(500)}")

    tapes = rig.run(asks, each_step=draft_and_cancel)
    reasons = [tape.finished.reason for tape in tapes]
    assert all(reasons.count(reason) > 20 for reason in FinishReason), reasons
    assert rig.scheduler.num_preemptions > 20
    assert sum(sum(tape.from_draft) for tape in tapes) > 1000
    ended = [session for handoff in source.handoffs for session in handoff.ended]
    assert sorted(ended) == list(range(1, len(ended) + 1)), "a session ended twice or never"
    named = {a.session_id for handoff in source.handoffs for a in (*handoff.appends, *handoff.wanted)}
    assert named <= set(ended)


def test_a_step_without_requests_reports_only_what_changed() -> None:
    rig, source = build_rig()
    rig.run([Ask([10], 1)])
    seen, handed = len(rig.observer.reports), len(source.handoffs)
    for _ in range(3):
        rig.loop.step()
    assert len(rig.observer.reports) == seen
    assert len(source.handoffs) == handed + 3, "ended sessions could not reach the drafter"


@pytest.mark.parametrize("num_tokens", [1, 2, 9])
def test_times_and_counts_of_a_request_add_up(num_tokens: int) -> None:
    rig, _ = build_rig()
    tape = rig.run([Ask([10, 11], num_tokens)])[0]
    finished = tape.finished
    assert tape.tokens == list(range(12, 12 + num_tokens))
    assert finished.num_decode_steps == num_tokens
    assert min(finished.queue_s, finished.prefill_s, finished.decode_s) >= 0
    assert rig.observer.first_tokens == ["r0"]


def test_a_context_that_was_lost_comes_back_in_chunks_without_a_gap() -> None:
    rng = random.Random(20261215)
    rig, source = build_rig(extend_rows_max=3)
    rig.submit(Ask([rng.randrange(COUNTING_VOCAB) for _ in range(8)], 30))
    for _ in range(6):
        rig.loop.step()
    source.lost = {1}
    handed = len(source.handoffs)
    for _ in range(6):
        rig.loop.step()
    again = [(a.position, a.row_stop - a.row_start) for h in source.handoffs[handed:] for a in h.appends]
    committed = [8 + 4 + i for i in range(3)]
    assert again[:4] == [(0, 3), (3, 3), (6, 3), (9, 3)]
    assert again[4:] == [(committed[0], 1), (committed[1], 1)]
