"""The target's and the draft's weights in this process: of checkpoints, or drawn at random on the device.

Random weights are equal for equal shapes on every process of one machine and device, so that a drafter
process fits this target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from common.contract import TargetContract
from common.embedding import SharedWeights, random_shared_weights, target_contract
from common.errors import ConfigError
from common.model_dir import resolve_model_dir
from services.drafter.model.dflash_weights import Draft
from services.drafter.model.named_shapes import NAMED_DRAFT_SHAPES
from services.target.model.llama import LlamaWeights
from services.target.model.named_shapes import NAMED_SHAPES
from tools.gpu_bench.floor import Floor, draft_bytes, kv_bytes, target_bytes
from tools.gpu_bench.plan import GpuPlan

_TARGET_SEED, _DRAFT_SEED = 1, 2


@dataclass(frozen=True)
class Pair:
    """What is loaded once and shared by all modes. draft is None where none is asked for."""

    name: str
    weights: LlamaWeights
    draft: Draft | None

    @classmethod
    def of(cls, plan: GpuPlan, dtype: torch.dtype, device: torch.device) -> Pair:
        """What the plan asks for. ConfigError or CheckpointError when it cannot be had."""
        if plan.random_shape is not None:
            check_shape(plan.random_shape)
            weights = random_target(plan.random_shape, dtype, device)
            shared, contract = weights.shared, weights.contract
            draft = random_draft(plan.random_shape, shared, contract) if plan.drafted else None
            return cls(f"{plan.random_shape} (random weights)", weights, draft)
        assert plan.model is not None
        directory = resolve_model_dir(plan.model, field="model")
        weights = LlamaWeights.load(directory, dtype, device)
        if plan.draft is None or not plan.drafted:
            return cls(directory.name, weights, None)
        draft_dir = resolve_model_dir(plan.draft, field="draft")
        return cls(directory.name, weights, Draft.load(draft_dir, weights.shared, weights.contract))

    @property
    def block_size(self) -> int | None:
        """Rows of a draft block; None without a draft."""
        return None if self.draft is None else self.draft.config.block_size

    def check(self, plan: GpuPlan) -> None:
        """ConfigError for what the plan asks and this pair cannot do."""
        limit, asked = self.weights.config.max_len, plan.prompt_tokens + plan.max_new_tokens
        if asked > limit:
            raise ConfigError("max_new_tokens", f"with the prompt must be at most {limit}", given=asked)
        length = plan.synthetic_accept_length
        if length is not None and self.block_size is not None and length > self.block_size:
            raise ConfigError("synthetic_accept_length", f"must be at most {self.block_size}", given=length)

    def floor(self, bandwidth_bytes_s: float) -> Floor:
        """What a step must read at least."""
        c, dtype = self.weights.config, self.weights.shared.embedding.dtype
        draft_weights = draft_kv = 0
        if self.draft is not None:
            d = self.draft.config
            draft_weights = draft_bytes(self.draft.weights, self.weights.shared.lm_head)
            draft_kv = kv_bytes((d.num_layers, d.num_kv_heads, d.head_dim), dtype)
        return Floor(
            bandwidth_bytes_s=bandwidth_bytes_s,
            target_bytes=target_bytes(self.weights),
            draft_bytes=draft_weights,
            target_kv_bytes=kv_bytes((c.num_layers, c.num_kv_heads, c.head_dim), dtype),
            draft_kv_bytes=draft_kv,
        )


def check_shape(name: str) -> None:
    """ConfigError unless both a target and a draft of this name have a shape."""
    known = sorted(NAMED_SHAPES.keys() & NAMED_DRAFT_SHAPES.keys())
    if name not in known:
        raise ConfigError("random", f"must be one of {', '.join(known)}", given=name)


def random_target(shape: str, dtype: torch.dtype, device: torch.device) -> LlamaWeights:
    """The target of a named shape."""
    return LlamaWeights.random(NAMED_SHAPES[shape], dtype, device, _TARGET_SEED)


def random_draft(shape: str, shared: SharedWeights, target: TargetContract) -> Draft:
    """The draft of a named shape, for a target with these matrices."""
    return Draft.random(NAMED_DRAFT_SHAPES[shape], shared, target, _DRAFT_SEED)


def random_shared(
    shape: str, dtype: torch.dtype, device: torch.device | str
) -> tuple[SharedWeights, TargetContract]:
    """What a drafter of this shape shares with the random target, and what that target asks of it."""
    config = NAMED_SHAPES[shape]
    shared = random_shared_weights(config, dtype, device, _TARGET_SEED)
    return shared, target_contract(config, shared, dtype)
