"""How fast a step could be at best: the bytes of weights it must read over the speed of reading memory.

Both are measured or counted here, in the same run as what is compared with them. Knows nothing of
services.
"""

from __future__ import annotations

import json
import math
import struct
import time
from pathlib import Path

import torch

_PROBE_BYTES = 256 * 1024 * 1024
_PROBE_ROUNDS = 5
# Weights are fp32 in memory on a CPU, whatever they are in the file.
_BYTES_PER_ELEMENT = 4


def read_bandwidth_bytes_s() -> float:
    """Bytes a second that a pure read reaches here: the best of a few sums over a buffer no cache holds."""
    buffer = torch.ones(_PROBE_BYTES // 4)
    best_s = math.inf
    for _ in range(_PROBE_ROUNDS):
        started = time.perf_counter()
        buffer.sum()
        best_s = min(best_s, time.perf_counter() - started)
    return _PROBE_BYTES / best_s


def weight_bytes(model_dir: Path) -> dict[str, int]:
    """Bytes in memory of each tensor of a checkpoint, from the headers of its safetensors files."""
    sizes = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
        for name, entry in header.items():
            if name != "__metadata__":
                sizes[name] = math.prod(entry["shape"]) * _BYTES_PER_ELEMENT
    return sizes


def step_floor_bytes(model_dir: Path, draft_dir: Path | None) -> int:
    """Bytes that a step reads at least: all of the target but single rows of an embedding that is not
    also the head; with a draft, all of the draft and the head once more."""
    target = weight_bytes(model_dir)
    embedding = next(size for name, size in target.items() if name.endswith("embed_tokens.weight"))
    untied_head = next((size for name, size in target.items() if name.endswith("lm_head.weight")), None)
    floor = sum(target.values()) - (embedding if untied_head is not None else 0)
    if draft_dir is not None:
        floor += sum(weight_bytes(draft_dir).values()) + (untied_head or embedding)
    return floor
