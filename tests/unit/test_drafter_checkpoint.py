"""A draft directory that is incomplete, corrupted or made for another target is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.embedding import load_shared_weights
from common.errors import CheckpointError
from common.layers.attention import BIDIRECTIONAL, Mask
from services.drafter.model.dflash import DFlash
from services.drafter.model.dflash_config import DFlashConfig
from tests.builders import build_tiny_draft_dir, build_tiny_llama_dir

GONE = object()


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_llama_dir(tmp_path_factory.mktemp("target"), seed=51)


@pytest.fixture
def draft_dir(tmp_path: Path, target_dir: Path) -> Path:
    return build_tiny_draft_dir(tmp_path / "draft", target_dir, seed=52)


def load(draft_dir: Path, target_dir: Path) -> DFlash:
    shared, contract = load_shared_weights(target_dir, torch.float32)
    return DFlash.load(draft_dir, shared, contract)


def change_config(draft_dir: Path, key: str, value: object, nested: bool = False) -> None:
    path = draft_dir / "config.json"
    config = json.loads(path.read_text())
    place = config["dflash_config"] if nested else config
    if value is GONE:
        place.pop(key, None)
    else:
        place[key] = value
    path.write_text(json.dumps(config))


def change_tensors(draft_dir: Path, change: Any) -> None:
    path = draft_dir / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_draft_that_fits_says_what_it_asks(draft_dir: Path, target_dir: Path) -> None:
    contract = load(draft_dir, target_dir).contract
    assert (contract.block_size, contract.num_draft_tokens, contract.mask_token_id) == (4, 3, 3)
    assert contract.captured_layer_ids == (0, 2)
    assert contract.context_len_max == 256


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["DFlash2DraftModel"]),
        ("architectures", GONE),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("final_logit_softcapping", 30.0),
        ("input_embedding_scale", 2.0),
        ("hidden_size", 64),
        ("vocab_size", 200),
        ("num_target_layers", 5),
        ("num_target_layers", GONE),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", "2"),
        ("num_key_value_heads", 3),
        ("head_dim", GONE),
        ("head_dim", 15),
        ("rms_norm_eps", GONE),
        ("rms_norm_eps", "1e-6"),
        ("rope_theta", GONE),
        ("max_position_embeddings", 1 << 30),
        ("max_position_embeddings", 3),
        ("block_size", GONE),
        ("block_size", 1),
        ("block_size", 65),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["full_attention", "linear_attention"]),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("dflash_config", []),
        ("dflash_config", "taps"),
    ],
)
def test_a_key_that_is_wrong_or_missing_is_named(
    draft_dir: Path, target_dir: Path, key: str, value: object
) -> None:
    change_config(draft_dir, key, value)
    named = {
        "max_position_embeddings": "max_position_embeddings|context_len_max",
        "dflash_config": "dflash_config|mask_token_id",
        "layer_types": "layer_types|sliding_window",
    }
    with pytest.raises(CheckpointError, match=rf"^({named.get(key, key)}): .*, got "):
        load(draft_dir, target_dir)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mask_token_id", GONE),
        ("mask_token_id", 192),
        ("mask_token_id", -1),
        ("target_layer_ids", GONE),
        ("target_layer_ids", []),
        ("target_layer_ids", [0, True]),
        ("target_layer_ids", [0, 0]),
        ("target_layer_ids", [0, 3]),
        ("target_layer_ids", [0, -1]),
        ("block_size", 8),
    ],
)
def test_taps_mask_and_block_size_are_never_guessed(
    draft_dir: Path, target_dir: Path, key: str, value: object
) -> None:
    # target_layer_ids [0, 3]: the last layer's output means different things in different drafts.
    # block_size 8: the top level says 4.
    change_config(draft_dir, key, value, nested=True)
    with pytest.raises(CheckpointError, match=f"{key}|captured_layer_ids"):
        load(draft_dir, target_dir)


@pytest.mark.parametrize("nested", [True, False])
def test_block_size_may_stand_in_either_place(draft_dir: Path, target_dir: Path, nested: bool) -> None:
    change_config(draft_dir, "block_size", GONE)
    change_config(draft_dir, "block_size", 6, nested=nested)
    assert load(draft_dir, target_dir).contract.block_size == 6


def test_names_may_carry_the_prefix_model(draft_dir: Path, target_dir: Path) -> None:
    plain = load(draft_dir, target_dir).contract
    tensors = load_file(draft_dir / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, draft_dir / "model.safetensors")
    assert load(draft_dir, target_dir).contract == plain


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("fc.weight"), "a tensor is missing, got 'fc.weight'"),
        (lambda t: t.pop("layers.1.self_attn.k_norm.weight"), "a tensor is missing"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(2)}), "unexpected tensors, got .'lm_head.weight'"),
        (lambda t: t.update({"layers.2.mlp.up_proj.weight": torch.zeros(2)}), "unexpected tensors"),
        (lambda t: t.update({"norm.weight": torch.zeros(47)}), r"must have shape \[48\], got \[47\]"),
    ],
    ids=["no fc", "no k_norm", "a head", "a layer more", "a short norm"],
)  # fmt: skip
def test_missing_unexpected_and_misshapen_tensors_are_named(
    draft_dir: Path, target_dir: Path, change: Any, named: str
) -> None:
    change_tensors(draft_dir, change)
    with pytest.raises(CheckpointError, match=named):
        load(draft_dir, target_dir)


@pytest.mark.parametrize("damage", ["truncated", "huge header", "empty"])
def test_a_corrupted_file_is_named(draft_dir: Path, target_dir: Path, damage: str) -> None:
    path = draft_dir / "model.safetensors"
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "huge header":
        path.write_bytes(b"\xff" * 8 + content[8:])
    else:
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="safetensors"):
        load(draft_dir, target_dir)


def test_sliding_layers_are_causal_in_the_block_unless_the_checkpoint_says_otherwise(draft_dir: Path) -> None:
    config = json.loads((draft_dir / "config.json").read_text())
    config |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9}
    assert DFlashConfig.from_json(config).layer_masks == (BIDIRECTIONAL, Mask(causal=True, window=9))
    config["is_causal"] = False
    assert DFlashConfig.from_json(config).layer_masks == (BIDIRECTIONAL, Mask(causal=False, window=9))
    config["is_causal"] = "no"
    with pytest.raises(CheckpointError, match="is_causal"):
        DFlashConfig.from_json(config)
