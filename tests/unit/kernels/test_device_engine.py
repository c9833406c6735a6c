"""The device engine on a CPU: kernels of staging, sampling and accepting in Triton's interpreter, under plain
torch's forward where many launches are made, and under the kernels' where that counts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from common.contract import DraftContract
from common.handoff.ring import Ring, RingShape
from common.kernels.lanes import NUM_JOINS
from common.paged_kv import PageEntry, PagePool
from services.target.core.control_buffer import LAUNCHES_IN_FLIGHT_MAX
from services.target.core.device_engine import DeviceEngine, positions_max
from services.target.core.device_launch import ExtendRows, Launch
from services.target.core.draft_fit import DraftDoesNotFit, DraftFit
from services.target.core.request import SamplingParams
from services.target.model.kernel_llama import KernelLlama
from services.target.model.llama import Llama, LlamaWeights
from tests.builders import build_tiny_llama_dir
from tests.engine_rig import EngineRig, Rider, cpu_answer
from tests.fakes_kernels import PagedLlama
from tests.paged_runs import Piece, run_pieces

SEED = 20261211
VOCAB, PAGE_SIZE, MAX_LEN, NUM_PAGES = 64, 4, 48, 70
# Graphs are of 1, 2, 4 and 5 lanes: a batch of 3 has padding.
NUM_LANES, EXTEND_ROWS, BLOCK = 5, 8, 4
TAPS = (0, 1)
# Filters take the interpreter a second a row, so one request has them.
SAMPLED = [
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(),
    SamplingParams(temperature=0.7, min_p=0.05, seed=2**40 + 7),
    SamplingParams(),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, seed=2**64 - 3),
    SamplingParams(temperature=1.0, seed=77),
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> LlamaWeights:
    directory = build_tiny_llama_dir(
        tmp_path_factory.mktemp("target"), SEED, vocab_size=VOCAB, hidden_size=32, intermediate_size=32,
        num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16, max_len=MAX_LEN, qwen3=True,
    )  # fmt: skip
    return LlamaWeights.load(directory, torch.float32)


def kernel_llama(weights: LlamaWeights) -> KernelLlama:
    reach = positions_max(MAX_LEN)
    return KernelLlama(
        weights, page_size=PAGE_SIZE, num_rows_max=NUM_LANES * BLOCK, num_keys_max=reach, max_positions=reach
    )


def engine_over(model: KernelLlama | PagedLlama) -> DeviceEngine:
    return DeviceEngine(
        model, num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_lanes=NUM_LANES, max_len=MAX_LEN,
        extend_rows_max=EXTEND_ROWS, extends_max=NUM_LANES,
    )  # fmt: skip


def contract(block_size: int = BLOCK) -> DraftContract:
    return DraftContract(TAPS, block_size, block_size - 1, VOCAB - 1, MAX_LEN, "draft")


def a_ring(hidden_size: int) -> Ring:
    shape = RingShape(NUM_LANES, BLOCK, BLOCK - 1, len(TAPS) * hidden_size, torch.float32, EXTEND_ROWS)
    return Ring.local(shape, "cpu")


def riders(weights: LlamaWeights, count: int, rows_each: int, *, num_wanted: int = 8) -> list[Rider]:
    rng, llama = random.Random(SEED), Llama(weights)
    found = []
    for i in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 5, 9, 13)))]
        sampling = SAMPLED[i % len(SAMPLED)]
        answer = cpu_answer(llama, prompt, sampling, num_wanted + 4 * rows_each)
        found.append(Rider(prompt, sampling, answer, num_wanted - i % 3))
    return found


def rig_over(engine: DeviceEngine, ring: Ring | None, *, lag: int = 1) -> EngineRig:
    return EngineRig(
        engine, PagePool(NUM_PAGES, PAGE_SIZE), num_lanes=NUM_LANES, vocab=VOCAB, extend_rows=EXTEND_ROWS,
        seed=SEED, ring=ring, lag=lag,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lag, count", [(1, 7), (2, 4)])
def test_verified_text_is_the_cpu_engines_whatever_is_drafted(
    weights: LlamaWeights, lag: int, count: int
) -> None:
    """Ragged prompt chunks beside decoding lanes, lanes reused, greedy and sampled."""
    print(f"seed {SEED}")
    engine, ring = engine_over(PagedLlama(weights, PAGE_SIZE)), a_ring(32)
    engine.prepare_drafting(contract(), ring)
    rig = rig_over(engine, ring, lag=lag)
    rig.run(riders(weights, count, BLOCK))
    assert {0, BLOCK - 1} < rig.accept_counts, "a kind of draft did not occur"
    assert any(lanes == 3 and extends for lanes, extends in rig.widths) or count < 7


def test_plain_text_is_the_cpu_engines(weights: LlamaWeights) -> None:
    rig_over(engine_over(PagedLlama(weights, PAGE_SIZE)), None).run(riders(weights, 4, 1, num_wanted=6))


def test_only_the_drafters_turn_lies_between_enter_and_leave(weights: LlamaWeights) -> None:
    """The upload before, the step inside, the download after: the drafter waits for no copy."""
    engine, ring = engine_over(PagedLlama(weights, PAGE_SIZE)), a_ring(32)
    engine.prepare_drafting(contract(), ring)
    engine.join(1, SamplingParams())
    ring.count.fill_(-7)
    number = engine._number
    engine._results.words(number)[:] = -7

    def enter() -> None:
        assert engine._lane_control.device[NUM_JOINS] == 1, "the lane was not uploaded"
        assert (ring.count == -7).all(), "the step ran before its turn"

    def leave() -> None:
        assert ring.count[0] == 0 and ring.base[0] == 3, "the step did not publish in its turn"
        assert (engine._results.words(number) == -7).all(), "results were downloaded in the drafter's turn"

    begin = [ExtendRows(1, 0, [5, 6, 7], True, 0)]
    pages = [PageEntry(1, i, 1 + i) for i in range(2)]
    ticket = engine.launch(Launch(extends=begin, draft_rows=[], pages=pages), enter, leave)
    assert engine.results_to_host(ticket).extend_finite.all()


def test_drafts_by_messages_are_verified_and_states_come_back(weights: LlamaWeights) -> None:
    """The inline hand-off: two lanes and a prompt beside them, rows of the last set_drafts."""
    llama, rng = Llama(weights), random.Random(SEED)
    prompts = [[rng.randrange(VOCAB) for _ in range(count)] for count in (5, 3, 6)]
    answers = [cpu_answer(llama, prompt, SamplingParams(), 8) for prompt in prompts]
    engine, ring = engine_over(PagedLlama(weights, PAGE_SIZE)), a_ring(32)
    engine.prepare_drafting(contract(), ring, by_messages=True)
    for lane in range(3):
        engine.join(lane, SamplingParams())
    pages = [PageEntry(lane, i, 1 + 4 * lane + i) for lane in range(3) for i in range(4)]
    begin = [ExtendRows(lane, 0, prompts[lane], True) for lane in (0, 1)]
    ticket = engine.launch(Launch(extends=begin, draft_rows=[], pages=pages))
    assert engine.results_to_host(ticket).extend_tokens.tolist() == [answers[0][0], answers[1][0]]
    states = engine.captured_to_host(ticket)
    _assert_states(llama, [prompts[0], prompts[1]], [(0, 5), (0, 3)], states)

    wrong = (answers[1][2] + 1) % VOCAB
    engine.set_drafts([[0, 0, 0], answers[0][1:4], [answers[1][1], wrong, answers[1][3]]])
    # The ring says otherwise.
    ring.drafts.fill_(VOCAB)
    more = [ExtendRows(2, 0, prompts[2][:4], False)]
    ticket = engine.launch(Launch(extends=more, lanes=[1, 0], draft_rows=[2, 1], drafts_inline=True))
    results = engine.results_to_host(ticket)
    assert results.num_accepted.tolist() == [1, 3] and not results.num_clamped.any()
    assert results.tokens[0, :2].tolist() == answers[1][1:3] and results.tokens[1].tolist() == answers[0][1:5]
    texts = [prompts[2], prompts[1] + answers[1], prompts[0] + answers[0]]
    states = engine.captured_to_host(ticket)
    # Of the block with a wrong draft the rows up to it count.
    kept = torch.cat((states[:6], states[8:]))
    _assert_states(llama, texts, [(0, 4), (3, 5), (5, 9)], kept)

    ticket = engine.launch(Launch(lanes=[0, 1], draft_rows=[-1, -1]))
    results = engine.results_to_host(ticket)
    assert results.tokens[:, 0].tolist() == [answers[0][5], answers[1][3]] and not results.num_accepted.any()


def _assert_states(
    llama: Llama, texts: list[list[int]], spans: list[tuple[int, int]], states: torch.Tensor
) -> None:
    """states are those of the texts' positions, a whole forward over each text says."""
    wanted = []
    for ids, (start, stop) in zip(texts, spans, strict=True):
        ((_, captured),) = run_pieces(llama, [[Piece(0, ids, stop)]], taps=TAPS)
        wanted.append(captured[start:stop])
    torch.testing.assert_close(states, torch.cat(wanted), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_draft_that_leads_to_nan_spoils_neither_its_lane_nor_another(weights: LlamaWeights) -> None:
    """By the model's kernels: a wild row stays out of its tile. A prompt that leads there fails alone, and
    zeroed pages are as good as new."""
    llama, rng = Llama(weights), random.Random(SEED)
    prompts = [[rng.randrange(VOCAB - 1) for _ in range(count)] for count in (5, 3)]
    answers = [cpu_answer(llama, prompt, SamplingParams(), 8) for prompt in prompts]
    poison = next(token for token in range(VOCAB) if token not in sum(prompts + answers, []))
    shared = weights.shared
    embedding = shared.embedding.clone()
    embedding[poison] = float("nan")
    spoiled = replace(weights, shared=replace(shared, embedding=embedding))
    engine, ring = engine_over(kernel_llama(spoiled)), a_ring(32)
    engine.prepare_drafting(contract(), ring)
    for lane in range(3):
        engine.join(lane, SamplingParams())
    pages = [PageEntry(lane, i, 1 + 4 * lane + i) for lane in range(3) for i in range(4)]
    begin = [
        ExtendRows(0, 0, prompts[0], True, 0), ExtendRows(1, 0, prompts[1][:2], False),
        ExtendRows(2, 0, [poison], True, 1),
    ]  # fmt: skip
    results = engine.results_to_host(engine.launch(Launch(extends=begin, draft_rows=[], pages=pages)))
    assert results.extend_finite.tolist()[::2] == [True, False]
    assert results.extend_tokens[0] == answers[0][0]
    engine.zero_pages([9, 10, 11, 12])
    ring.drafts[0] = torch.tensor([answers[0][1], poison, answers[0][3]])

    more = [ExtendRows(1, 2, prompts[1][2:], True, 1)]
    results = engine.results_to_host(engine.launch(Launch(extends=more, lanes=[0], draft_rows=[0])))
    assert results.num_accepted.tolist() == [1] and results.finite.tolist() == [True]
    assert results.tokens[0, :2].tolist() == answers[0][1:3]
    assert results.extend_finite.tolist() == [True] and results.extend_tokens.tolist() == [answers[1][0]]

    # The lane that failed has a new request, on the pages that held NaN.
    engine.join(2, SamplingParams())
    again = [ExtendRows(2, 0, prompts[1], True, 2)]
    entries = [PageEntry(2, i, 9 + i) for i in range(4)]
    launch = Launch(extends=again, lanes=[1, 0], draft_rows=[-1, -1], pages=entries)
    results = engine.results_to_host(engine.launch(launch))
    assert results.tokens[:, 0].tolist() == [answers[1][1], answers[0][3]] and results.finite.all()
    assert results.extend_finite.tolist() == [True] and results.extend_tokens.tolist() == [answers[1][0]]


def test_many_short_prompts_take_a_graph_with_room_for_all_of_them(weights: LlamaWeights) -> None:
    engine = DeviceEngine(
        PagedLlama(weights, PAGE_SIZE), num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_lanes=5,
        max_len=MAX_LEN, extend_rows_max=64, extends_max=5,
    )  # fmt: skip
    llama = Llama(weights)
    for number in (1, 2, 5):
        prompts = [[7 * lane + number] for lane in range(number)]
        for lane in range(number):
            engine.join(lane, SamplingParams())
        extends = [ExtendRows(lane, 0, prompt, True) for lane, prompt in enumerate(prompts)]
        pages = [PageEntry(lane, 0, lane + 1) for lane in range(number)]
        results = engine.results_to_host(engine.launch(Launch(extends=extends, pages=pages)))
        wanted = [cpu_answer(llama, prompt, SamplingParams(), 1)[0] for prompt in prompts]
        assert results.extend_tokens.tolist() == wanted


def test_launches_beyond_the_pinned_buffers_are_a_bug_of_the_caller(weights: LlamaWeights) -> None:
    engine = engine_over(PagedLlama(weights, PAGE_SIZE))
    engine.join(0, SamplingParams())
    step = Launch(lanes=[0])
    tickets = [engine.launch(step) for _ in range(LAUNCHES_IN_FLIGHT_MAX)]
    with pytest.raises(AssertionError, match="unread"):
        engine.launch(step)
    for ticket in tickets:
        engine.results_to_host(ticket)
    with pytest.raises(KeyError):
        engine.results_to_host(tickets[0])
    engine.results_to_host(engine.launch(step))


def test_a_draft_row_beyond_the_drafts_is_a_bug_of_the_caller(weights: LlamaWeights) -> None:
    engine = engine_over(PagedLlama(weights, PAGE_SIZE))
    engine.prepare_drafting(contract(), a_ring(32))
    engine.set_drafts([[1] * (BLOCK - 1)])
    for row, drafts_inline in ((1, True), (NUM_LANES, False)):
        with pytest.raises(AssertionError, match="draft row"):
            engine.launch(Launch(lanes=[0], draft_rows=[row], drafts_inline=drafts_inline))
    engine.set_drafts([[1] * BLOCK])
    with pytest.raises(AssertionError, match="draft row"):
        engine.launch(Launch(lanes=[0], draft_rows=[0], drafts_inline=True))


def test_drafting_is_prepared_once_for_a_contract_and_ring(weights: LlamaWeights) -> None:
    heard: list[tuple[int, int]] = []
    engine = DeviceEngine(
        PagedLlama(weights, PAGE_SIZE), num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_lanes=NUM_LANES,
        max_len=MAX_LEN, extend_rows_max=EXTEND_ROWS,
        on_captured=lambda done, total: heard.append((done, total)),
    )  # fmt: skip
    # Batches of 5, 4, 2 and 1, and prompts.
    assert heard == [(i, 5) for i in range(1, 6)]
    ring = a_ring(32)
    for draft, number in ((contract(), 10), (contract(), 10)):
        engine.prepare_drafting(draft, ring)
        assert len(heard) == number
    engine.prepare_drafting(contract(), a_ring(32))
    assert len(heard) == 15
    with pytest.raises(AssertionError):
        engine.prepare_drafting(contract(BLOCK - 1), ring)


def one_plain_token(engine: DeviceEngine, prompt: list[int]) -> int:
    engine.join(0, SamplingParams())
    pages = [PageEntry(0, i, 1 + i) for i in range(4)]
    ticket = engine.launch(Launch(extends=[ExtendRows(0, 0, prompt, True)], pages=pages))
    return int(engine.results_to_host(ticket).extend_tokens[0])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), RuntimeError("CUDA error: out of memory")])
def test_drafting_that_runs_out_of_memory_is_given_up_and_not_tried_again_at_once(
    weights: LlamaWeights, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ring = engine_over(PagedLlama(weights, PAGE_SIZE)), a_ring(32)
    free = [1 << 30]
    monkeypatch.setattr(engine, "_free_bytes", lambda: free[0])
    engine._fit = DraftFit(lambda: free[0])
    engine.prepare_drafting(contract(), ring)
    num_tries = 0

    def fail(*args: object) -> None:
        nonlocal num_tries
        num_tries += 1
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(engine, "_capture", fail)
        for _ in range(3):
            with pytest.raises(DraftDoesNotFit) as caught:
                engine.prepare_drafting(contract(), a_ring(32))
            assert caught.value.mismatch.field == "block_size"
            assert f"{BLOCK}, of 2 layers" in str(caught.value.mismatch.theirs)
        assert num_tries == 1
        free[0] *= 2
        with pytest.raises(DraftDoesNotFit):
            engine.prepare_drafting(contract(), a_ring(32))
        assert num_tries == 2
    assert dict(engine.memory_report())["rows and logits of verifies"] == 0
    prompt = [5, 9, 2]
    assert one_plain_token(engine, prompt) == cpu_answer(Llama(weights), prompt, SamplingParams(), 1)[0]
    free[0] *= 2
    engine.prepare_drafting(contract(), ring)


def test_drafting_that_cannot_fit_is_not_tried_and_leaves_what_there_is(
    weights: LlamaWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, ring = engine_over(PagedLlama(weights, PAGE_SIZE)), a_ring(32)
    engine.prepare_drafting(contract(), ring)
    engine._fit = DraftFit(lambda: 0)
    wide = 4 * BLOCK
    shape = RingShape(NUM_LANES, wide, wide - 1, len(TAPS) * 32, torch.float32, EXTEND_ROWS)
    with pytest.raises(DraftDoesNotFit, match="block_size: ours what fits .* free"):
        engine.prepare_drafting(contract(wide), Ring.local(shape, "cpu"))
    # As wide as what is there: nothing more is needed.
    monkeypatch.setattr(engine, "_capture", lambda *args: pytest.fail("it was prepared before"))
    engine.prepare_drafting(contract(), ring)


def test_an_error_that_is_no_lack_of_memory_is_no_fault_of_the_drafters(
    weights: LlamaWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_over(PagedLlama(weights, PAGE_SIZE))

    def fail(*args: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(engine, "_capture", fail)
    with pytest.raises(RuntimeError, match="illegal"):
        engine.prepare_drafting(contract(), a_ring(32))
