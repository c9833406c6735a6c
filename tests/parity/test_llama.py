"""The target's forward against transformers and against a naive reference.

Tolerance, fp32: 2e-4 absolute and 1e-4 relative on random tiny models, whose logits are of size 5;
captured states 1e-4. Two correct implementations differ by some 1e-5 there. SmolLM2's logits reach 25
over 30 layers: 2e-3 and 1e-3.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.paged_kv import PagePool
from services.target.model.llama import Llama
from tests.builders import build_tiny_llama_dir
from tests.paged_runs import Piece, run_pieces
from tests.reference.naive_llama import NaiveLlama

SEED = 20261209
SMOLLM2 = Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct"
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads, tied": {},
    "one K/V head, untied": {"num_kv_heads": 1, "tied": False},
    "as many K/V heads, wide heads": {"num_kv_heads": 4, "head_dim": 32},
    "three heads a group, narrow heads": {
        "hidden_size": 72, "num_heads": 9, "num_kv_heads": 3, "head_dim": 8,
    },
    "linear scaling": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "linear scaling by its old name": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama3 scaling": {"rope_scaling": LLAMA3},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    "small theta, one layer": {"rope_theta": 100.0, "num_layers": 2},
    "Qwen3, untied": {"qwen3": True, "tied": False},
    "Qwen3, tied, heads wider than their share": {"qwen3": True, "head_dim": 32, "num_kv_heads": 1},
    "Qwen3, rope_parameters": {
        "qwen3": True, "rope_parameters": {"rope_type": "default", "rope_theta": 300.0}, "rope_theta": None,
    },
}  # fmt: skip


def transformers_forward(directory: Path, ids: list[int]) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Logits `[N, V]` and hidden_states of a dense run."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        out = model.eval()(torch.tensor([ids]), output_hidden_states=True)
    return out.logits[0], tuple(state[0] for state in out.hidden_states)


def some_ids(rng: random.Random, count: int, vocab: int = 192) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_captured_states_of_a_random_tiny_model_equal_those_of_transformers(
    variant: str, tmp_path: Path
) -> None:
    seed = SEED + list(VARIANTS).index(variant)
    print(f"seed {seed}")
    directory = build_tiny_llama_dir(tmp_path / "target", seed, **VARIANTS[variant])
    ids = some_ids(random.Random(seed), 150)
    theirs, hidden_states = transformers_forward(directory, ids)
    model = Llama.load(directory, torch.float32)
    last = model.config.num_layers - 2
    taps = (0, last) if last else (0,)
    logits, captured = run_pieces(model, [[Piece(0, ids, len(ids))]], taps=taps)[0]
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(
        captured, torch.cat([hidden_states[i + 1] for i in taps], dim=-1), rtol=1e-4, atol=1e-4
    )


def test_captured_states_come_in_the_order_of_the_ids_not_of_the_layers(tmp_path: Path) -> None:
    directory = build_tiny_llama_dir(tmp_path / "target", SEED)
    model, ids = Llama.load(directory, torch.float32), some_ids(random.Random(SEED), 20)
    _, states = NaiveLlama(directory).forward(ids)
    captured = run_pieces(model, [[Piece(0, ids, 20)]], taps=(2, 0, 1))[0][1]
    expected = torch.cat([states[2], states[0], states[1]], dim=-1)
    torch.testing.assert_close(captured.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("round_", range(4))
def test_a_paged_ragged_batch_equals_the_dense_forward_however_the_sequences_are_cut(
    round_: int, tmp_path: Path
) -> None:
    """Four sequences in odd chunks, extends beside single rows and blocks, on scattered pages that
    hold NaN from somebody before."""
    seed = SEED * 10 + round_
    print(f"seed {seed}")
    rng = random.Random(seed)
    directory = build_tiny_llama_dir(tmp_path / "target", seed)
    model, reference = Llama.load(directory, torch.float32), NaiveLlama(directory)
    sequences = [some_ids(rng, rng.randint(20, 60)) for _ in range(4)]
    done = [0] * len(sequences)
    steps: list[list[Piece]] = []
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        step = []
        for i in rng.sample(range(4), rng.randint(1, 4)):
            stop = min(len(sequences[i]), done[i] + rng.choice([1, 1, 4, 7, 13]))
            if stop > done[i]:
                step.append(Piece(i, sequences[i], stop, start=done[i]))
                done[i] = stop
        if step:
            steps.append(step)
    page_size = rng.choice([1, 3, 8, 16])
    pool = PagePool(num_pages=300 // page_size, page_size=page_size)
    rng.shuffle(pool._free)
    results = run_pieces(model, steps, taps=(0, 2), pool=pool, garbage=float("nan"))
    dense = [reference.forward(ids) for ids in sequences]
    for step, (logits, captured) in zip(steps, results, strict=True):
        row = 0
        for piece in step:
            expected, states = dense[piece.owner]
            rows, part = slice(row, row + piece.num_rows), slice(piece.start, piece.stop)
            torch.testing.assert_close(logits[rows].double(), expected[part], rtol=1e-4, atol=3e-4)
            both = torch.cat([states[0][part], states[2][part]], dim=-1)
            torch.testing.assert_close(captured[rows].double(), both, rtol=1e-4, atol=1e-4)
            row += piece.num_rows


def test_rows_written_again_after_a_rejected_draft_replace_what_the_draft_left(tmp_path: Path) -> None:
    directory = build_tiny_llama_dir(tmp_path / "target", SEED)
    model, rng = Llama.load(directory, torch.float32), random.Random(SEED + 5)
    truth, wrong = some_ids(rng, 40), some_ids(rng, 8)
    drafted = truth[:20] + wrong
    steps = [[Piece(0, truth, 19)], [Piece(0, drafted, 28, start=19)], [Piece(0, truth, 40, start=20)]]
    expected, _ = NaiveLlama(directory).forward(truth)
    logits, _ = run_pieces(model, steps, pool=PagePool(8, 8))[2]
    torch.testing.assert_close(logits.double(), expected[20:], rtol=1e-4, atol=3e-4)


def test_a_bfloat16_model_follows_its_fp32_self_within_bf16_rounding(tmp_path: Path) -> None:
    directory = build_tiny_llama_dir(tmp_path / "target", SEED, dtype=torch.bfloat16)
    ids = some_ids(random.Random(SEED), 30)
    (wide, _), (narrow, _) = (
        run_pieces(Llama.load(directory, dtype), [[Piece(0, ids, 30)]])[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert narrow.dtype == torch.float32
    # bf16 keeps 8 bits: errors of a percent or so a layer.
    assert (wide - narrow).abs().mean() < 0.05 * wide.abs().mean()


def test_packed_rows_do_not_depend_on_how_many_rows_share_the_call(tmp_path: Path) -> None:
    """What makes a drafted request give the very tokens of a plain one at near ties, too."""
    directory = build_tiny_llama_dir(tmp_path / "target", SEED, hidden_size=64, intermediate_size=160)
    model = Llama.load(directory, torch.float32)
    hidden = torch.randn(33, 64, generator=torch.Generator().manual_seed(SEED))
    together = model.logits(hidden)
    for count in (1, 2, 8, 9):
        assert torch.equal(model.logits(hidden[:count]), together[:count])


@pytest.mark.model
def test_logits_and_captured_states_of_smollm2_equal_those_of_transformers() -> None:
    rng, taps = random.Random(SEED), (1, 7, 14, 20, 27)
    ids = some_ids(rng, 300, vocab=49152)
    theirs, hidden_states = transformers_forward(SMOLLM2, ids)
    model = Llama.load(SMOLLM2, torch.float32)
    cuts = [0, 97, 98, 106, 231, 300]
    pool = PagePool(num_pages=60, page_size=16)
    rng.shuffle(pool._free)
    steps = [[Piece(0, ids, stop, start=start)] for start, stop in zip(cuts, cuts[1:], strict=False)]
    results = run_pieces(model, steps, taps=taps, pool=pool)
    logits, captured = (torch.cat(parts) for parts in zip(*results, strict=True))
    torch.testing.assert_close(logits, theirs, rtol=1e-3, atol=2e-3)
    expected = torch.cat([hidden_states[i + 1] for i in taps], dim=-1)
    # A few channels of SmolLM2's residual stream are in the thousands.
    torch.testing.assert_close(captured, expected, rtol=1e-3, atol=5e-3)
    assert torch.equal(logits.argmax(-1), theirs.argmax(-1))
