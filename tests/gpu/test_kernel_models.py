"""Both models' forwards by kernels, compiled, four layers of Qwen3-8B's width; the checks are those of
tests/unit/kernels. The reference is torch in fp32 over the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from common.embedding import SharedWeights, random_shared_weights, target_contract
from services.drafter.model.dflash_weights import Draft
from services.drafter.model.named_shapes import NAMED_DRAFT_SHAPES
from services.target.model.llama import LlamaWeights
from services.target.model.named_shapes import NAMED_SHAPES

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(300),  # compiles
]
if torch.cuda.is_available():
    from services.target.model.kernel_llama import KernelLlama
    from tests.kernel_checks import kernel_dflash, kernel_llama
    from tests.kernel_checks.paged_rows import Pages, for_kernels
    from tests.paged_runs import Piece

SEED = 20261212
DTYPES = [torch.bfloat16, torch.float32]
TARGET: dict[str, Any] = NAMED_SHAPES["qwen3-8b"] | {
    "num_hidden_layers": 4, "vocab_size": 8192, "max_position_embeddings": 4096, "eos_token_id": 2,
}  # fmt: skip
DRAFT: dict[str, Any] = NAMED_DRAFT_SHAPES["qwen3-8b"] | {
    "num_hidden_layers": 3, "num_target_layers": 4, "vocab_size": 8192, "max_position_embeddings": 4096,
    "dflash_config": {"mask_token_id": 8191, "target_layer_ids": [0, 1, 2]},
    "layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 100,
}  # fmt: skip


def lively_target(dtype: torch.dtype) -> LlamaWeights:
    weights = LlamaWeights.random(TARGET, dtype, "cuda", SEED)
    kernel_llama.liven_norms(weights, SEED)
    return weights


def lively_draft(dtype: torch.dtype) -> tuple[Draft, SharedWeights]:
    shared = random_shared_weights(TARGET, dtype, "cuda", SEED)
    draft = Draft.random(DRAFT, shared, target_contract(TARGET, shared, dtype), SEED)
    kernel_dflash.liven_norms(draft, SEED)
    return draft, shared


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompt_chunks_blocks_and_single_rows_give_what_torch_gives(dtype: torch.dtype) -> None:
    """Up to 400 rows a step, so cuBLAS has its share; sequences of one chunk of keys and of several."""
    sizes = kernel_llama.Sizes((700, 37, 211), (150, 201, 67), block=16, page_size=16)
    kernel_llama.check_equals_torch(lively_target(dtype), SEED, sizes)


def test_a_rows_bits_do_not_depend_on_its_company() -> None:
    """32 sequences verify together, 512 rows, then alone, then row by row."""
    prompts = tuple(20 + 41 * i % 300 for i in range(32))
    sizes = kernel_llama.Sizes(prompts, (133, 320), block=16, page_size=16, row_independent=True)
    kernel_llama.check_a_rows_bits_do_not_depend_on_its_company(lively_target(torch.bfloat16), SEED, sizes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contexts_and_drafts_are_those_of_torch(dtype: torch.dtype) -> None:
    """One sequence, and twelve whose 180 drafts exceed what the greedy head takes."""
    draft, shared = lively_draft(dtype)
    for contexts in ((300,), tuple(30 + 53 * i % 400 for i in range(12))):
        kernel_dflash.check_contexts_and_drafts_equal_torch(draft, shared, SEED, contexts, page_size=16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_row_that_is_not_finite_is_flagged_alone(dtype: torch.dtype) -> None:
    kernel_dflash.check_a_wild_row_is_flagged_alone(*lively_draft(dtype), SEED)


def recorded(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A graph of body, which has run once before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_a_recorded_forward_replays_what_ran_eagerly_on_other_inputs(num_sequences: int) -> None:
    """16 rows through our GEMM and 128 through cuBLAS, launches overlapped as they are served."""
    weights, block = lively_target(torch.bfloat16), 16
    num_rows, taps = num_sequences * block, (0, 2)
    model = KernelLlama(
        weights, page_size=16, num_rows_max=num_rows, num_keys_max=64, max_positions=64
    )
    layers, kv_heads, head_dim = model.kv_shape
    pages = Pages(num_sequences * 4, 16, SEED)
    step = [Piece(i, [], 40 + block, start=40) for i in range(num_sequences)]
    rows = for_kernels(pages, step, "cuda", group=4, dtype=model.dtype, padding=0, ragged=False)
    kv = torch.randn(
        layers, 2, pages.pool.num_slots, kv_heads, head_dim, device="cuda", dtype=model.dtype,
    )  # fmt: skip
    hidden, captured, logits = (
        torch.zeros(num_rows, width, device="cuda", dtype=model.dtype)
        for width in (model.config.hidden_size, 2 * model.config.hidden_size, model.vocab_rows)
    )
    ids = torch.zeros(num_rows, dtype=torch.int32, device="cuda")

    def body() -> None:
        model.forward(ids, kv, rows, hidden, captured, taps)
        model.logits(hidden, logits)

    graph = recorded(body)
    for _ in range(3):
        ids.random_(0, model.vocab_rows)
        before = kv.clone()
        graph.replay()
        replayed = [tensor.clone() for tensor in (logits, captured, kv)]
        kv.copy_(before)
        body()
        for got, wanted in zip(replayed, (logits, captured, kv), strict=True):
            assert torch.equal(got, wanted)
