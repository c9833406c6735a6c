"""Checkpoints: config.json and safetensors, nothing else. No pickle, no code from a checkpoint.

Headers are checked before anything is allocated; every tensor must be taken by the model exactly as
it is named and shaped, so that a loader can never load nothing in silence.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common import limits
from common.errors import CheckpointError

# Anything else is quantised, and its numbers mean nothing without the scales beside them.
_STORED_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory as a dict; CheckpointError when it is not one."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            "config.json", f"must be readable in the model directory ({error.strerror})", given=directory.name
        ) from None
    # RecursionError: JSON nested deeper than the parser goes.
    except (ValueError, RecursionError) as error:
        raise CheckpointError("config.json", f"must be JSON ({error})", given=directory.name) from None
    if not isinstance(config, dict):
        raise CheckpointError("config.json", "must be an object", given=type(config).__name__)
    return config


def int_field(config: dict[str, Any], key: str, low: int, high: int, default: int | None = None) -> int:
    """An integer of config.json within [low, high]. Missing or null is the default, an error without."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise CheckpointError(key, f"must be an integer from {low} to {high}", given=value)
    return value


def number_field(config: dict[str, Any], key: str, low: float, high: float) -> float:
    """A number of config.json within [low, high]; NaN never is."""
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise CheckpointError(key, f"must be a number from {low:g} to {high:g}", given=value)
    return float(value)


def flag_field(config: dict[str, Any], key: str) -> bool:
    """A boolean of config.json; missing or null is false."""
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise CheckpointError(key, "must be true or false", given=value)
    return bool(value)


class Checkpoint:
    """The tensors of a directory's *.safetensors, read when they are taken.

    Use: `take` each tensor the model has, then `finish`, which refuses a file with tensors that no
    one took.
    """

    def __init__(
        self, directory: Path, *, strip_prefix: str = "", device: torch.device | str = "cpu"
    ) -> None:
        """strip_prefix is removed from names that carry it, e.g. `model.`. Tensors come to lie on device."""
        self._device = device
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                "safetensors", "at least one *.safetensors file must exist", given=directory.name
            )
        self._files = {}
        self._where: dict[str, tuple[str, str]] = {}
        for path in files:
            opened = _open(path)
            self._files[path.name] = opened
            for stored in opened.keys():
                name = stored.removeprefix(strip_prefix)
                if name in self._where:
                    raise CheckpointError("safetensors", "a tensor stands in two files", given=name)
                self._where[name] = (path.name, stored)
        self._untaken = set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tensor `name`, which must have exactly `shape`, cast to `dtype` (None keeps it), on the device."""
        if name not in self._where:
            raise CheckpointError("safetensors", "a tensor is missing", given=name)
        file, stored = self._where[name]
        opened = self._files[file]
        actual = tuple(opened.get_slice(stored).get_shape())
        if actual != shape:
            raise CheckpointError(name, f"must have shape {list(shape)}", given=list(actual))
        self._untaken.discard(name)
        tensor = opened.get_tensor(stored)
        if tensor.dtype not in _STORED_TYPES:
            allowed = ", ".join(str(known).removeprefix("torch.") for known in _STORED_TYPES)
            raise CheckpointError(name, f"must be stored as one of {allowed}", given=str(tensor.dtype))
        return tensor.to(self._device, dtype or tensor.dtype)

    def ignore(self, name: str) -> None:
        """Name a tensor that is known and not needed (a tied lm_head stored twice)."""
        self._untaken.discard(name)

    def finish(self) -> None:
        """Raise CheckpointError if a tensor was never taken."""
        if self._untaken:
            raise CheckpointError("safetensors", "unexpected tensors", given=sorted(self._untaken)[:5])


def random_normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """What stands in for a trained weight: normal with deviation 0.02, drawn on the generator's device.

    Over normed rows of 4096 that gives products of deviation 1.3; 36 layers of them stay far inside bf16.
    """
    return torch.empty(shape, dtype=dtype, device=generator.device).normal_(std=0.02, generator=generator)


def fingerprint(tensors: dict[str, torch.Tensor], rows_max: int = 64) -> str:
    """A short name for weights: sha256 over names, types, shapes and evenly spaced rows.

    Rows rather than everything: 64 rows tell two checkpoints apart, and hashing gigabytes at start
    tells no more. Equal only for equal types, so both sides must hash what the file holds.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        step = max(1, tensor.shape[0] // rows_max)
        sample = tensor[::step].contiguous().view(torch.uint8).cpu().numpy()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(sample.tobytes())
    return digest.hexdigest()[:16]


def _open(path: Path) -> Any:
    """A file's tensors, not read yet: a mapping."""
    try:
        _check_header(path)
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError("safetensors", f"file is corrupted ({error})", given=path.name) from None
    except OSError as error:
        problem = f"must be readable ({error.strerror})"
        raise CheckpointError("safetensors", problem, given=path.name) from None


def _check_header(path: Path) -> None:
    """Refuse a file whose declared header or data cannot be in it, before the parser sees it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
    declared = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
    limit = min(size - 8, limits.SAFETENSORS_HEADER_BYTES_MAX)
    if declared is None or not 2 <= declared <= limit:
        raise CheckpointError("safetensors header", f"must be 2 to {max(limit, 0)} bytes", given=declared)
