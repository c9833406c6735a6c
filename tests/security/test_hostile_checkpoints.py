"""Damaged and hostile checkpoints: one CheckpointError, before anything large is allocated, and nothing
of the machine's paths in it."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import CheckpointError
from services.target.model.llama import Llama
from tests.builders import build_tiny_llama_dir

SEED = 20261218
FILE = "model.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return build_tiny_llama_dir(tmp_path / "target", SEED)


def refused(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Llama.load(directory, torch.float32)
    message = str(caught.value)
    assert str(directory.parent) not in message, "a path of the machine is in the error"
    assert len(message) < 1000
    return caught.value


def header_of(content: bytes) -> tuple[dict, bytes]:
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(header: object, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def test_a_file_cut_at_any_place_is_refused(directory: Path) -> None:
    content = (directory / FILE).read_bytes()
    rng = random.Random(SEED)
    header_size = struct.unpack("<Q", content[:8])[0]
    cuts = [0, 1, 7, 8, 9, 8 + header_size // 2, 8 + header_size - 1, 8 + header_size, len(content) - 1]
    for cut in [*cuts, *(rng.randrange(len(content)) for _ in range(20))]:
        (directory / FILE).write_bytes(content[:cut])
        assert refused(directory).field.startswith("safetensors"), cut


def test_trailing_bytes_are_refused(directory: Path) -> None:
    with (directory / FILE).open("ab") as file:
        file.write(b"\0" * 8)
    assert refused(directory).field == "safetensors"


@pytest.mark.parametrize("declared", [0, 1, 2**31, 2**40, 2**63, 2**64 - 1])
def test_a_header_length_that_lies_is_refused_before_it_is_believed(directory: Path, declared: int) -> None:
    content = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(struct.pack("<Q", declared) + content[8:])
    error = refused(directory)
    assert error.field == "safetensors header"
    assert error.given == declared


def move_first(header: dict, offsets: list[int]) -> dict:
    name = next(key for key in header if key != "__metadata__")
    header[name]["data_offsets"] = offsets
    return header


@pytest.mark.parametrize(
    "spoil",
    [
        lambda header: move_first(header, [0, 2**62]),
        lambda header: move_first(header, [-4, 0]),
        lambda header: move_first(header, [8, 4]),
        lambda header: {**header, "evil": {"dtype": "F32", "shape": [2**60, 2**60], "data_offsets": [0, 4]}},
        lambda header: {**header, "evil": {"dtype": "F999", "shape": [1], "data_offsets": [0, 4]}},
        lambda header: {**header, "evil": "no tensor"},
        lambda header: list(header),
        lambda header: {},
    ],
    ids=["past the end", "negative", "backwards", "overflow", "unknown type", "no tensor", "a list", "empty"],
)
def test_a_header_whose_contents_lie_is_refused(directory: Path, spoil: Callable[[dict], object]) -> None:
    header, body = header_of((directory / FILE).read_bytes())
    (directory / FILE).write_bytes(with_header(spoil(header), body))
    assert refused(directory).field == "safetensors"


def test_random_damage_to_the_header_is_refused_or_harmless(directory: Path) -> None:
    content = (directory / FILE).read_bytes()
    header_size = struct.unpack("<Q", content[:8])[0]
    rng = random.Random(SEED + 1)
    num_refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(rng.choice([1, 1, 4])):
            damaged[rng.randrange(8 + header_size)] = rng.randrange(256)
        (directory / FILE).write_bytes(bytes(damaged))
        try:
            Llama.load(directory, torch.float32)
        except CheckpointError:
            num_refused += 1
    assert num_refused > 100


def test_a_missing_an_unexpected_and_a_misshapen_tensor_are_each_named(directory: Path) -> None:
    tensors = load_file(directory / FILE)
    name = "model.layers.2.self_attn.k_proj.weight"
    missing = {k: v for k, v in tensors.items() if k != name}
    save_file(missing, directory / FILE)
    assert refused(directory).given == "layers.2.self_attn.k_proj.weight"
    save_file(tensors | {"model.layers.9.mlp.up_proj.weight": torch.ones(1)}, directory / FILE)
    assert refused(directory).given == ["layers.9.mlp.up_proj.weight"]
    for wrong in (torch.ones(48, 32), torch.ones(32), torch.ones(1, 32, 48), torch.ones(33, 48)):
        save_file(tensors | {name: wrong}, directory / FILE)
        error = refused(directory)
        assert error.field == "layers.2.self_attn.k_proj.weight"
        assert error.given == list(wrong.shape)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b'"text"', b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_a_config_that_is_no_object_in_json_is_refused(directory: Path, content: bytes) -> None:
    (directory / "config.json").write_bytes(content)
    assert refused(directory).field == "config.json"


def test_directories_where_files_should_be_are_refused(directory: Path) -> None:
    (directory / "shard.safetensors").mkdir()
    assert refused(directory).field == "safetensors"
    (directory / "shard.safetensors").rmdir()
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    assert refused(directory).field == "config.json"


def test_a_directory_without_weights_and_one_with_pickles_only_are_refused(directory: Path) -> None:
    content = (directory / FILE).read_bytes()
    (directory / FILE).unlink()
    assert refused(directory).field == "safetensors"
    (directory / "pytorch_model.bin").write_bytes(content)
    assert refused(directory).field == "safetensors"
