"""Models without a checkpoint: named shapes, and weights drawn at random."""

from __future__ import annotations

import pytest
import torch

from common.contract import mismatches, unfit
from common.embedding import random_shared_weights, target_contract
from services.drafter.model.dflash_config import DFlashConfig
from services.drafter.model.dflash_weights import Draft
from services.drafter.model.named_shapes import NAMED_DRAFT_SHAPES
from services.target.model.llama import Llama, LlamaConfig, LlamaWeights
from services.target.model.named_shapes import NAMED_SHAPES
from tests.paged_runs import Piece, run_pieces

SEED = 20261213
TINY, TINY_DRAFT = NAMED_SHAPES["tiny"], NAMED_DRAFT_SHAPES["tiny"]


@pytest.mark.parametrize("name", NAMED_SHAPES)
def test_each_named_shape_is_a_config_with_a_draft_of_its_widths(name: str) -> None:
    target = LlamaConfig.from_json(NAMED_SHAPES[name])
    draft = DFlashConfig.from_json(NAMED_DRAFT_SHAPES[name])
    assert (target.hidden_size, target.num_layers, target.vocab_size, target.max_len) == (
        draft.hidden_size, draft.num_target_layers, draft.vocab_size, draft.max_len,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_random_target_gives_finite_logits_that_tell_tokens_apart(dtype: torch.dtype) -> None:
    model = Llama(LlamaWeights.random(TINY, dtype, "cpu", SEED))
    logits, _ = run_pieces(model, [[Piece(0, list(range(40)), 40)]])[0]
    assert logits.isfinite().all()
    assert len(set(logits.argmax(-1).tolist())) > 5


def test_both_services_draw_the_same_shared_weights_and_so_agree_on_the_contract() -> None:
    of_target = LlamaWeights.random(TINY, torch.float32, "cpu", SEED)
    shared = random_shared_weights(TINY, torch.float32, "cpu", SEED)
    of_drafter = target_contract(TINY, shared, torch.float32)
    assert torch.equal(of_target.shared.embedding, shared.embedding)
    assert torch.equal(of_target.shared.lm_head, shared.lm_head)
    assert not mismatches(of_target.contract, of_drafter)
    other = random_shared_weights(TINY, torch.float32, "cpu", SEED + 1)
    assert [m.field for m in mismatches(of_drafter, target_contract(TINY, other, torch.float32))] == [
        "weights_fingerprint"
    ]


def test_a_tied_head_is_the_embedding() -> None:
    shared = random_shared_weights(TINY | {"tie_word_embeddings": True}, torch.float32, "cpu", SEED)
    assert shared.lm_head is shared.embedding


def test_a_random_draft_fits_its_target_and_is_the_same_for_the_same_seed() -> None:
    shared = random_shared_weights(TINY, torch.bfloat16, "cpu", SEED)
    target = target_contract(TINY, shared, torch.bfloat16)
    draft, again, other = (Draft.random(TINY_DRAFT, shared, target, seed) for seed in (1, 1, 2))
    assert not unfit(target, draft.contract)
    assert draft.weights.fc.dtype == torch.bfloat16
    assert torch.equal(draft.weights.layers[1].down, again.weights.layers[1].down)
    assert draft.contract == again.contract != other.contract
