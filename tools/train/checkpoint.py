"""A training run's state on disk: weights and optimizer in safetensors, the rest in its header.

Whole or absent: a new checkpoint replaces the old one by a rename.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common.errors import CheckpointError
from tools.train.draft_weights import named_weights
from tools.train.trainer import Trainer

_PARTS = ("weight", "exp_avg", "exp_avg_sq")


def save_checkpoint(trainer: Trainer, run: dict[str, Any], path: Path) -> None:
    """Write the trainer's state. `run` names what must be the same for a run to go on (JSON values)."""
    tensors = {}
    for name, weight in named_weights(trainer.weights).items():
        state = trainer.optimizer.state.get(weight, {})
        tensors[f"{name}/weight"] = weight.detach()
        for part in _PARTS[1:]:
            tensors[f"{name}/{part}"] = state.get(part, torch.zeros_like(weight))
    path.parent.mkdir(parents=True, exist_ok=True)
    part_path = path.with_suffix(".part")
    header = {"step": str(trainer.step), "run": json.dumps(run, sort_keys=True)}
    save_file(
        {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()},
        part_path,
        metadata=header,
    )
    os.replace(part_path, path)


def load_checkpoint(trainer: Trainer, run: dict[str, Any], path: Path) -> None:
    """Put a saved state into a trainer. Raises CheckpointError when it belongs to another run."""
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        saved = json.loads(header.get("run", "{}"))
        for key, value in json.loads(json.dumps(run)).items():
            if saved.get(key) != value:
                raise CheckpointError(key, f"of the run to resume is {saved.get(key)}", given=value)
        trainer.step = int(header["step"])
        for name, weight in named_weights(trainer.weights).items():
            device = weight.device
            with torch.no_grad():
                weight.copy_(file.get_tensor(f"{name}/weight"))
            state: dict[str, torch.Tensor] = {
                part: file.get_tensor(f"{name}/{part}").to(device) for part in _PARTS[1:]
            }
            # AdamW keeps its own count, on the CPU unless it is fused.
            fused = trainer.optimizer.defaults["fused"]
            state["step"] = torch.tensor(float(trainer.step), device=device if fused else "cpu")
            trainer.optimizer.state[weight] = state
