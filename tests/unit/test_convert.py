"""`tandem convert` on small GGUF files: what the result holds, and that it comes whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from common.errors import CheckpointError, ConfigError
from tests.builders_gguf import NUM_LAYERS, llama_weights, write_gguf
from tools.convert import OUTPUT_FILES, convert_gguf
from tools.model_package import locate_packaged_file

SEED = 20261201


@pytest.fixture
def rng() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def run(source: Path, out: Path, sha256: str | None = None) -> bool:
    return convert_gguf(source, out, expected_sha256=sha256, console=Console(quiet=True))


def test_weights_come_out_under_checkpoint_names_with_rows_in_checkpoint_order(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weights = llama_weights(rng)
    run(write_gguf(tmp_path / "m.gguf", weights), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert len(found) == len(weights)
    for layer in range(NUM_LAYERS):
        for theirs, ours in (
            ("attn_norm", "input_layernorm"),
            ("attn_q", "self_attn.q_proj"),
            ("attn_k", "self_attn.k_proj"),
            ("attn_v", "self_attn.v_proj"),
            ("attn_output", "self_attn.o_proj"),
            ("ffn_norm", "post_attention_layernorm"),
            ("ffn_gate", "mlp.gate_proj"),
            ("ffn_up", "mlp.up_proj"),
            ("ffn_down", "mlp.down_proj"),
        ):
            expected = weights[f"blk.{layer}.{theirs}.weight"]
            np.testing.assert_array_equal(found[f"model.layers.{layer}.{ours}.weight"], expected, ours)
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], weights["token_embd.weight"])
    np.testing.assert_array_equal(found["model.norm.weight"], weights["output_norm.weight"])


def test_q4_1_blocks_hold_elements_0_to_15_in_their_low_nibbles(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weights = llama_weights(rng)
    name = "blk.1.ffn_up.weight"
    storage = gguf.GGMLQuantizationType.Q4_1
    run(write_gguf(tmp_path / "m.gguf", weights, quantize=lambda n: storage if n == name else None),
        tmp_path / "out")  # fmt: skip
    found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.1.mlp.up_proj.weight"]

    # A block of 32: float16 scale, float16 minimum, 16 bytes of two nibbles each.
    raw = gguf.quantize(weights[name], storage).tobytes()
    expected: list[np.float32] = []
    for start in range(0, len(raw), 20):
        scale, minimum = np.frombuffer(raw[start : start + 4], dtype="<f2").astype(np.float32)
        nibbles = raw[start + 4 : start + 20]
        expected += [scale * np.float32(byte & 15) + minimum for byte in nibbles]
        expected += [scale * np.float32(byte >> 4) + minimum for byte in nibbles]
    np.testing.assert_array_equal(found.ravel(), np.array(expected, dtype=np.float32))


@pytest.mark.parametrize("storage", ["F16", "BF16", "Q8_0", "Q5_0"])
def test_other_storage_types_come_out_as_their_dequantized_values(
    tmp_path: Path, rng: np.random.Generator, storage: str
) -> None:
    weights = llama_weights(rng)
    kind = gguf.GGMLQuantizationType[storage]
    run(write_gguf(tmp_path / "m.gguf", weights, quantize=lambda n: kind if "ffn_gate" in n else None),
        tmp_path / "out")  # fmt: skip
    found = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.mlp.gate_proj.weight"]
    original = weights["blk.0.ffn_gate.weight"]
    assert found.dtype == np.float32
    assert 0 < np.abs(found - original).max() < 0.2 * np.abs(original).max()


def test_a_tied_embedding_is_stored_once_and_an_untied_head_beside_it(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    weights = llama_weights(rng)
    run(write_gguf(tmp_path / "tied.gguf", weights), tmp_path / "tied")
    head = weights["token_embd.weight"] + 1
    run(write_gguf(tmp_path / "untied.gguf", weights | {"output.weight": head}), tmp_path / "untied")
    tied, untied = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("tied", "untied"))
    assert tied["tie_word_embeddings"] is True and untied["tie_word_embeddings"] is False
    assert "lm_head.weight" not in load_file(tmp_path / "tied" / "model.safetensors")
    found = load_file(tmp_path / "untied" / "model.safetensors")
    np.testing.assert_array_equal(found["lm_head.weight"], head)


def test_the_result_says_what_it_was_made_from_and_that_it_was_rounded(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    kind = gguf.GGMLQuantizationType.Q4_1
    run(write_gguf(tmp_path / "m.gguf", llama_weights(rng), quantize=lambda n: kind if "blk" in n and
        "norm" not in n else None), tmp_path / "out")  # fmt: skip
    source = json.loads((tmp_path / "out" / "config.json").read_text())["tandem_source"]
    assert source["file"] == "m.gguf" and "Q4_1" in source["weights"] and "dequantized" in source["weights"]
    assert "dequantized Q4_1 weights" in (tmp_path / "out" / "README.md").read_text()


def test_epsilon_is_the_decimal_that_the_authors_wrote(tmp_path: Path, rng: np.random.Generator) -> None:
    run(write_gguf(tmp_path / "m.gguf", llama_weights(rng)), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rms_norm_eps"] == 1e-5


def test_a_second_conversion_does_nothing(tmp_path: Path, rng: np.random.Generator) -> None:
    source = write_gguf(tmp_path / "m.gguf", llama_weights(rng))
    assert run(source, tmp_path / "out") is True
    before = {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in OUTPUT_FILES}
    assert run(source, tmp_path / "out") is False
    assert before == {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in OUTPUT_FILES}


@pytest.mark.parametrize("lost", OUTPUT_FILES[1:])
def test_an_incomplete_conversion_is_renewed(tmp_path: Path, rng: np.random.Generator, lost: str) -> None:
    source = write_gguf(tmp_path / "m.gguf", llama_weights(rng))
    run(source, tmp_path / "out")
    (tmp_path / "out" / lost).unlink()
    assert run(source, tmp_path / "out") is True
    assert (tmp_path / "out" / lost).is_file()


def test_a_changed_source_file_renews_the_conversion(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = llama_weights(rng)
    run(write_gguf(tmp_path / "m.gguf", weights), tmp_path / "out")
    weights["output_norm.weight"] += 1
    assert run(write_gguf(tmp_path / "m.gguf", weights), tmp_path / "out") is True
    found = load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(found, weights["output_norm.weight"])


def test_a_directory_that_is_no_conversion_is_left_alone(tmp_path: Path, rng: np.random.Generator) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"precious": true}')
    with pytest.raises(ConfigError, match="^out: "):
        run(write_gguf(tmp_path / "m.gguf", llama_weights(rng)), out)
    assert [file.name for file in out.iterdir()] == ["config.json"]


def test_a_corrupted_file_is_refused_by_its_checksum_and_leaves_nothing(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    source = write_gguf(tmp_path / "m.gguf", llama_weights(rng))
    damaged = bytearray(source.read_bytes())
    damaged[-100] ^= 1
    source.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"^sha256: of m\.gguf must be 0{64}, got '[0-9a-f]{64}'"):
        run(source, tmp_path / "out", sha256="0" * 64)
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.02, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused_and_leaves_nothing(
    tmp_path: Path, rng: np.random.Generator, kept: float
) -> None:
    source = write_gguf(tmp_path / "m.gguf", llama_weights(rng))
    whole = source.read_bytes()
    source.write_bytes(whole[: int(len(whole) * kept)])
    with pytest.raises(CheckpointError):
        run(source, tmp_path / "out")
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_what_is_no_plain_llama_is_refused_by_name(tmp_path: Path, rng: np.random.Generator) -> None:
    weights = llama_weights(rng)
    extra = weights | {"blk.0.attn_q_norm.weight": np.ones(4, dtype=np.float32)}
    lacking = {name: values for name, values in weights.items() if name != "blk.1.ffn_down.weight"}
    integers = weights | {"output.weight": np.ones((40, 96), dtype=np.int32)}
    nan = weights | {"output_norm.weight": np.full_like(weights["output_norm.weight"], np.nan)}
    cases = {
        "general.architecture": write_gguf(tmp_path / "a.gguf", weights, architecture="qwen3"),
        "llama.rope.scaling.type": write_gguf(
            tmp_path / "b.gguf", weights, alter=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        ),
        "llama.expert_count": write_gguf(tmp_path / "c.gguf", weights, alter=lambda w: w.add_expert_count(4)),
        "blk.0.attn_q_norm.weight": write_gguf(tmp_path / "d.gguf", extra),
        "blk.1.ffn_down.weight": write_gguf(tmp_path / "e.gguf", lacking),
        "output.weight": write_gguf(tmp_path / "f.gguf", integers),
        "output_norm.weight": write_gguf(tmp_path / "g.gguf", nan),
        "tokenizer.ggml.pre": write_gguf(tmp_path / "h.gguf", weights, pre_tokenizer="unheard-of"),
    }
    for named, source in cases.items():
        with pytest.raises(CheckpointError) as refused:
            run(source, tmp_path / "out")
        assert named in str(refused.value), (named, refused.value)
        assert not (tmp_path / "out").exists()


def test_an_unknown_package_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^package: must be one of"):
        locate_packaged_file("no-such-model")
    with pytest.raises(ConfigError, match="^gguf: must be a file"):
        run(tmp_path / "absent.gguf", tmp_path / "out")
