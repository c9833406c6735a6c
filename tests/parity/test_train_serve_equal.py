"""Training and serving compute the same: states, context and draft logits, in fp32.

Tolerance 1e-4 on logits of size about 3: both sides are fp32 and sum in different orders.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from common.embedding import load_shared_weights
from common.layers.attention import RaggedBatch, Span
from common.layers.rope import build_rope_table
from common.weights import Checkpoint, read_config
from services.drafter.model.dflash import DFlash
from services.drafter.model.dflash_config import DFlashConfig
from services.drafter.model.dflash_weights import take_weights
from services.target.model.llama import Llama
from tests.builders import build_tiny_draft_dir, build_tiny_llama_dir
from tools.train.blocks import attention_bias
from tools.train.dense_target import DenseTarget
from tools.train.draft_forward import draft_hidden

SEED = 20261202
TOLERANCE = 1e-4
LENGTH, VOCAB = 40, 192


@pytest.fixture
def rng() -> torch.Generator:
    print(f"seed {SEED}")
    return torch.Generator().manual_seed(SEED)


def _span(num_rows: int, num_keys: int) -> RaggedBatch:
    """Rows at the end of num_keys contiguous slots, which begin at slot 0."""
    positions = torch.arange(num_keys - num_rows, num_keys)
    return RaggedBatch(positions, positions, [Span(0, num_rows, slice(0, num_keys), num_keys)])


@pytest.mark.parametrize("qwen3", [False, True])
def test_states_captured_in_training_are_those_the_served_target_captures(
    tmp_path: Path, rng: torch.Generator, qwen3: bool
) -> None:
    directory = build_tiny_llama_dir(tmp_path / "target", SEED, vocab_size=VOCAB, qwen3=qwen3)
    tokens = torch.randint(0, VOCAB, (3, LENGTH), generator=rng)
    captured = DenseTarget(directory, torch.device("cpu"), torch.float32).capture(tokens, (2, 0))

    served = Llama.load(directory, torch.float32)
    c = served.config
    for row, expected in zip(tokens, captured, strict=True):
        kv = torch.zeros(c.num_layers, 2, LENGTH, c.num_kv_heads, c.head_dim)
        _, states = served.forward(row, kv, _span(LENGTH, LENGTH), (2, 0))
        assert states is not None
        torch.testing.assert_close(states, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("block_size", [4, 8])
def test_logits_at_an_anchor_in_training_are_those_the_drafter_serves(
    tmp_path: Path, rng: torch.Generator, block_size: int
) -> None:
    target_dir = build_tiny_llama_dir(tmp_path / "target", SEED, vocab_size=VOCAB)
    draft_dir = build_tiny_draft_dir(
        tmp_path / "draft", target_dir, SEED, block_size=block_size, num_layers=3, target_layer_ids=(0, 1, 2)
    )
    target = DenseTarget(target_dir, torch.device("cpu"), torch.float32)
    raw = read_config(draft_dir)
    config = DFlashConfig.from_json(raw)
    weights, _ = take_weights(Checkpoint(draft_dir), config, torch.float32)
    rope = build_rope_table(config.head_dim, config.max_len + block_size, raw)

    tokens = torch.randint(0, VOCAB, (2, LENGTH), generator=rng)
    anchors = torch.randperm(LENGTH, generator=rng)[:10].view(2, 5).sort(dim=1).values
    anchors[0, 0], anchors[1, -1] = 1, LENGTH - 1
    positions = anchors.unsqueeze(-1) + torch.arange(block_size)
    ids = torch.full_like(positions, config.mask_token_id)
    ids[..., 0] = tokens.gather(1, anchors)
    captured = target.capture(tokens, config.captured_layer_ids)
    bias = attention_bias(anchors, LENGTH, block_size, torch.float32)
    hidden = draft_hidden(weights, config, captured, ids, positions, bias, target.embedding, rope)
    trained = linear(hidden, target.lm_head)

    served = DFlash.load(draft_dir, *load_shared_weights(target_dir, torch.float32))
    for row in range(2):
        for block, anchor in enumerate(anchors[row].tolist()):
            num_slots = anchor + block_size
            kv = torch.zeros(config.num_layers, 2, num_slots, config.num_kv_heads, config.head_dim)
            context = torch.arange(anchor)
            served.append_context(captured[row, :anchor], context, context, kv)
            rows = served.block_hidden(ids[row, block], kv, _span(block_size, num_slots))
            torch.testing.assert_close(
                served.logits(rows), trained[row, block], atol=TOLERANCE, rtol=TOLERANCE
            )
