"""Checkpoints: every tensor taken exactly as named and shaped; fields of config.json read with care."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.embedding import load_shared_weights
from common.errors import CheckpointError
from common.weights import Checkpoint, fingerprint, flag_field, int_field, number_field, read_config
from services.target.model.llama import Llama, LlamaConfig
from tests.builders import build_tiny_llama_dir

SEED = 20261217


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return build_tiny_llama_dir(tmp_path / "target", SEED)


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in changes.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors")


def change_config(directory: Path, **changes: Any) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())
    config |= changes
    (directory / "config.json").write_text(json.dumps(config))
    return config


def test_tensors_spread_over_several_files_are_found(directory: Path) -> None:
    whole = Llama.load(directory, torch.float32)
    tensors = load_file(directory / "model.safetensors")
    names = sorted(tensors)
    (directory / "model.safetensors").unlink()
    for i in range(3):
        save_file({name: tensors[name] for name in names[i::3]}, directory / f"model-{i}-of-3.safetensors")
    hidden = torch.randn(4, 48, generator=torch.Generator().manual_seed(SEED))
    assert torch.equal(Llama.load(directory, torch.float32).logits(hidden), whole.logits(hidden))


def test_a_tensor_in_two_files_is_refused(directory: Path) -> None:
    save_file({"model.norm.weight": torch.ones(48)}, directory / "extra.safetensors")
    with pytest.raises(CheckpointError, match="stands in two files.*norm.weight"):
        Llama.load(directory, torch.float32)


def test_an_untied_checkpoint_needs_its_head_and_a_tied_one_may_hold_it_twice(directory: Path) -> None:
    tied = Llama.load(directory, torch.float32)
    change_tensors(directory, **{"lm_head.weight": torch.zeros(192, 48)})
    hidden = torch.ones(1, 48)
    assert torch.equal(Llama.load(directory, torch.float32).logits(hidden), tied.logits(hidden))
    change_tensors(directory, **{"lm_head.weight": None})
    change_config(directory, tie_word_embeddings=False)
    with pytest.raises(CheckpointError) as caught:
        Llama.load(directory, torch.float32)
    assert caught.value.field == "lm_head.weight"


def test_both_sides_read_the_same_contract_from_one_checkpoint(directory: Path) -> None:
    shared, contract = load_shared_weights(directory, torch.float32)
    model = Llama.load(directory, torch.float32)
    assert contract == model.contract
    assert contract.weights_fingerprint == shared.fingerprint
    assert (contract.hidden_size, contract.num_layers, contract.vocab_rows) == (48, 4, 192)


def test_the_fingerprint_is_of_the_file_and_tells_weights_apart(directory: Path, tmp_path: Path) -> None:
    fingerprints = {
        "fp32": load_shared_weights(directory, torch.float32)[1],
        "bf16 from the same file": load_shared_weights(directory, torch.bfloat16)[1],
        "other": load_shared_weights(build_tiny_llama_dir(tmp_path / "o", SEED + 1), torch.float32)[1],
    }
    fp32, bf16, other = (c.weights_fingerprint for c in fingerprints.values())
    assert fp32 == bf16 != other


def test_a_fingerprint_depends_on_name_type_shape_and_content() -> None:
    base = torch.arange(12.0).view(4, 3)
    prints = {
        fingerprint({"a": base}), fingerprint({"b": base}), fingerprint({"a": base.view(3, 4)}),
        fingerprint({"a": base.half()}), fingerprint({"a": base + 1}),
    }  # fmt: skip
    assert len(prints) == 5
    assert fingerprint({"a": base, "b": base}) == fingerprint({"b": base.clone(), "a": base.clone()})


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
def test_every_floating_type_in_the_file_is_served_in_the_type_asked_for(
    tmp_path: Path, stored: torch.dtype
) -> None:
    directory = build_tiny_llama_dir(tmp_path / "target", SEED, dtype=stored)
    assert Checkpoint(directory, strip_prefix="model.").take("norm.weight", (48,)).dtype == stored
    assert Llama.load(directory, torch.float32).logits(torch.ones(1, 48)).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.bool])
def test_quantised_tensors_are_refused_not_read_as_numbers(directory: Path, dtype: torch.dtype) -> None:
    change_tensors(directory, **{"model.layers.1.mlp.up_proj.weight": torch.ones(96, 48).to(dtype)})
    with pytest.raises(CheckpointError) as caught:
        Llama.load(directory, torch.float32)
    assert caught.value.field == "layers.1.mlp.up_proj.weight"


# Field that the error must name, and the change to config.json.
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("architectures", {"architectures": ["MistralForCausalLM"]}),
    ("architectures", {"architectures": "LlamaForCausalLM"}),
    ("architectures", {"architectures": []}),
    ("architectures", {"architectures": None}),
    ("architectures", {"architectures": 5}),
    ("architectures", {"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}),
    ("head_dim", {"architectures": ["Qwen3ForCausalLM"], "head_dim": None}),
    ("use_sliding_window", {"use_sliding_window": True}),
    ("layer_types", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("layer_types", {"layer_types": "full_attention"}),
    ("attention_bias", {"attention_bias": True}),
    ("mlp_bias", {"mlp_bias": True}),
    ("mlp_bias", {"mlp_bias": "no"}),
    ("hidden_act", {"hidden_act": "gelu"}),
    ("hidden_size", {"hidden_size": None}),
    ("hidden_size", {"hidden_size": 0}),
    ("hidden_size", {"hidden_size": -48}),
    ("hidden_size", {"hidden_size": 48.0}),
    ("hidden_size", {"hidden_size": 1 << 40}),
    ("num_attention_heads", {"num_attention_heads": "4"}),
    ("num_key_value_heads", {"num_key_value_heads": 3}),
    ("num_key_value_heads", {"num_key_value_heads": 8}),
    ("head_dim", {"head_dim": 0}),
    ("head_dim", {"head_dim": 1 << 20}),
    ("head_dim", {"head_dim": None, "num_attention_heads": 1024, "num_key_value_heads": 2}),
    ("num_hidden_layers", {"num_hidden_layers": 0}),
    ("num_hidden_layers", {"num_hidden_layers": True}),
    ("num_hidden_layers", {"num_hidden_layers": 100_000}),
    ("intermediate_size", {"intermediate_size": []}),
    ("vocab_size", {"vocab_size": 1 << 30}),
    ("max_position_embeddings", {"max_position_embeddings": 1 << 40}),
    ("rms_norm_eps", {"rms_norm_eps": None}),
    ("rms_norm_eps", {"rms_norm_eps": "small"}),
    ("rms_norm_eps", {"rms_norm_eps": -1e-5}),
    ("rms_norm_eps", {"rms_norm_eps": float("nan")}),
    ("rope_theta", {"rope_theta": None}),
    ("rope_theta", {"rope_theta": "10000"}),
    ("tie_word_embeddings", {"tie_word_embeddings": "true"}),
    ("eos_token_id", {"eos_token_id": "</s>"}),
    ("eos_token_id", {"eos_token_id": 192}),
    ("eos_token_id", {"eos_token_id": -1}),
    ("eos_token_id", {"eos_token_id": [2, None]}),
    ("eos_token_id", {"eos_token_id": list(range(100))}),
]


@pytest.mark.parametrize(("field", "change"), WRONG)
def test_a_wrong_value_in_config_json_is_one_error_that_names_it(
    directory: Path, field: str, change: dict[str, Any]
) -> None:
    change_config(directory, **change)
    with pytest.raises(CheckpointError) as caught:
        Llama.load(directory, torch.float32)
    assert caught.value.field == field
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("given", "expected"), [(None, ()), (7, (7,)), ([7, 2], (7, 2)), ([], ()), ("absent", ())]
)
def test_eos_may_be_one_id_several_or_none(directory: Path, given: object, expected: tuple[int, ...]) -> None:
    config = change_config(directory, eos_token_id=given)
    if given == "absent":
        del config["eos_token_id"]
    assert LlamaConfig.from_json(config).eos_token_ids == expected


def test_fields_that_may_be_left_out_or_null_take_their_defaults(directory: Path) -> None:
    """Published configs have `"head_dim": null`."""
    config = change_config(directory, num_attention_heads=4)
    for gone in ("head_dim", "num_key_value_heads"):
        for changed in ({k: v for k, v in config.items() if k != gone}, config | {gone: None}):
            parsed = LlamaConfig.from_json(changed)
            assert (parsed.head_dim, parsed.num_kv_heads) == ((12, 2) if gone == "head_dim" else (16, 4))


@pytest.mark.parametrize("value", [None, True, 1.0, "1", 0, 11, [1]])
def test_an_integer_field_takes_integers_of_its_range_only(value: object) -> None:
    with pytest.raises(CheckpointError, match="key: must be an integer from 1 to 10"):
        int_field({"key": value}, "key", 1, 10)
    assert int_field({"key": 10}, "key", 1, 10) == 10


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf"), -0.1, 1.1])
def test_a_number_field_takes_numbers_of_its_range_only(value: object) -> None:
    with pytest.raises(CheckpointError, match="key: must be a number from 0 to 1"):
        number_field({"key": value}, "key", 0, 1)
    assert number_field({"key": 1}, "key", 0, 1) == 1.0


@pytest.mark.parametrize("value", [0, 1, "true", []])
def test_a_flag_is_true_false_or_missing(value: object) -> None:
    with pytest.raises(CheckpointError, match="key: must be true or false"):
        flag_field({"key": value}, "key")
    assert flag_field({"key": True}, "key") is True
    assert flag_field({}, "key") is flag_field({"key": None}, "key") is False


def test_config_json_must_be_there_and_be_an_object(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="config.json: must be readable"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="config.json: must be an object"):
        read_config(tmp_path)
