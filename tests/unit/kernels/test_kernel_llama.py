"""The target's forward by kernels, in Triton's interpreter; tests/gpu has a real width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointError
from services.target.model.kernel_llama import KernelLlama
from services.target.model.llama import LlamaWeights
from services.target.model.named_shapes import NAMED_SHAPES
from tests.builders import build_tiny_llama_dir
from tests.kernel_checks import kernel_llama as checks
from tests.kernel_checks.kernel_llama import Sizes

SEED = 20261210
VARIANTS: dict[str, dict[str, Any]] = {
    "Qwen3, untied": {"qwen3": True, "tied": False, "num_layers": 2},
    "Llama, three heads a group": {"num_heads": 3, "num_kv_heads": 1, "num_layers": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_prompt_chunks_blocks_and_single_rows_give_what_torch_gives(variant: str, tmp_path: Path) -> None:
    directory = build_tiny_llama_dir(tmp_path, SEED, **VARIANTS[variant])
    weights = LlamaWeights.load(directory, torch.float32)
    checks.check_equals_torch(weights, SEED, Sizes((9, 5), (3, 7), block=4, page_size=4))


def test_chunks_above_64_rows_give_what_torch_gives(tmp_path: Path) -> None:
    directory = build_tiny_llama_dir(tmp_path, SEED, num_layers=2, num_heads=2, num_kv_heads=1, qwen3=True)
    weights = LlamaWeights.load(directory, torch.float32)
    checks.check_equals_torch(weights, SEED, Sizes((50, 20), (50,), block=2, page_size=16))


@pytest.mark.slow
@pytest.mark.usefixtures("products_in_order")
def test_a_rows_bits_do_not_depend_on_its_company(tmp_path: Path) -> None:
    directory = build_tiny_llama_dir(tmp_path, SEED, num_layers=2, vocab_size=64, qwen3=True)
    weights = LlamaWeights.load(directory, torch.float32)
    sizes = Sizes((5, 9, 3), (9,), block=2, page_size=4, row_independent=True)
    checks.check_a_rows_bits_do_not_depend_on_its_company(weights, SEED, sizes)


def test_heads_that_the_attention_kernel_does_not_know_are_refused_by_name() -> None:
    for head_dim in (8, 24):
        shape = NAMED_SHAPES["tiny"] | {"head_dim": head_dim}
        weights = LlamaWeights.random(shape, torch.float32, "cpu", SEED)
        with pytest.raises(CheckpointError, match="head_dim"):
            KernelLlama(weights, page_size=4, num_rows_max=4, num_keys_max=8, max_positions=8)
