"""Decoder of the Llama family (Llama, SmolLM2, Qwen3): weights, and one forward over a ragged batch.

Qwen3 norms the heads of q and k; the rest is alike. Knows tensors and slots; nothing of requests, sampling
or drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import embedding

from common import limits
from common.contract import TargetContract
from common.embedding import (
    PREFIX,
    SharedWeights,
    random_shared_weights,
    take_shared_weights,
    target_contract,
)
from common.errors import CheckpointError
from common.layers.attention import CAUSAL, RaggedBatch, paged_attention
from common.layers.linear import Weight, pack, project
from common.layers.mlp import swiglu
from common.layers.norm import rms_norm
from common.layers.rope import POSITIONS_BEYOND_CONTEXT, RopeTable, apply_rope, build_rope_table
from common.weights import Checkpoint, flag_field, int_field, number_field, random_normal, read_config

# Gives the tensor of a name (without `.weight`) and shape.
_Take = Callable[..., torch.Tensor]
_LLAMA, _QWEN3 = "LlamaForCausalLM", "Qwen3ForCausalLM"


@dataclass(frozen=True)
class LlamaConfig:
    """The keys of config.json that the forward needs. qk_norm: heads of q and k are normed (Qwen3)."""

    architecture: str
    qk_norm: bool
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    max_len: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_json(cls, config: dict[str, Any]) -> LlamaConfig:
        """Parse and check; CheckpointError names the key."""
        if config.get("architectures") not in ([_LLAMA], [_QWEN3]):
            raise CheckpointError(
                "architectures", f"must be [{_LLAMA}] or [{_QWEN3}]", given=config.get("architectures")
            )
        architecture = config["architectures"][0]
        _refuse_sliding_windows(config)
        for bias in ("attention_bias", "mlp_bias"):
            if flag_field(config, bias):
                raise CheckpointError(bias, "must be false", given=True)
        if config.get("hidden_act", "silu") != "silu":
            raise CheckpointError("hidden_act", "must be silu", given=config["hidden_act"])
        hidden_size = int_field(config, "hidden_size", 1, limits.HIDDEN_SIZE_MAX)
        num_heads = int_field(config, "num_attention_heads", 1, limits.HEADS_MAX)
        num_kv_heads = int_field(config, "num_key_value_heads", 1, num_heads, default=num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError("num_key_value_heads", f"must divide {num_heads}", given=num_kv_heads)
        vocab_size = int_field(config, "vocab_size", 1, limits.VOCAB_ROWS_MAX)
        # Published Llama configs leave it out; Qwen3's heads are wider than hidden_size divided among them.
        default_head_dim = hidden_size // num_heads if architecture == _LLAMA else None
        return cls(
            architecture=architecture,
            qk_norm=architecture == _QWEN3,
            hidden_size=hidden_size,
            intermediate_size=int_field(config, "intermediate_size", 1, limits.INTERMEDIATE_SIZE_MAX),
            num_layers=int_field(config, "num_hidden_layers", 1, limits.LAYERS_MAX),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=int_field(config, "head_dim", 2, limits.HEAD_DIM_MAX, default=default_head_dim),
            rms_norm_eps=number_field(config, "rms_norm_eps", 0, 1),
            vocab_size=vocab_size,
            max_len=int_field(config, "max_position_embeddings", 1, limits.CONTEXT_LEN_MAX),
            eos_token_ids=_eos_token_ids(config, vocab_size),
        )


def _refuse_sliding_windows(config: dict[str, Any]) -> None:
    """Qwen3's format has them, its released models do not."""
    if flag_field(config, "use_sliding_window"):
        raise CheckpointError("use_sliding_window", "must be false", given=True)
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise CheckpointError("layer_types", "must be full_attention throughout", given=kinds)


def _eos_token_ids(config: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """One id, a list of them, or none (missing or null)."""
    given = config.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if len(ids) > limits.STOP_TOKEN_IDS_MAX:
        raise CheckpointError("eos_token_id", f"at most {limits.STOP_TOKEN_IDS_MAX} ids", given=len(ids))
    return tuple(int_field({"eos_token_id": i}, "eos_token_id", 0, vocab_size - 1) for i in ids)


@dataclass(frozen=True)
class LlamaLayer:
    """Weights of a decoder layer; q, k, v and gate, up are stacked so that each is one GEMM.

    q_norm, k_norm `[head_dim]`, or None where the family has none.
    """

    input_norm: torch.Tensor
    qkv: Weight
    o: Weight
    post_norm: torch.Tensor
    gate_up: Weight
    down: Weight
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class LlamaWeights:
    """A checkpoint in memory, as it is: what the served model packs and the trainer reads."""

    config: LlamaConfig
    contract: TargetContract
    shared: SharedWeights
    layers: list[LlamaLayer]
    final_norm: torch.Tensor
    rope: RopeTable

    @classmethod
    def load(
        cls, directory: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> LlamaWeights:
        """Read config.json and safetensors of a directory; CheckpointError when they do not fit."""
        raw = read_config(directory)
        config = LlamaConfig.from_json(raw)
        checkpoint = Checkpoint(directory, strip_prefix=PREFIX, device=device)
        shared = take_shared_weights(checkpoint, raw, dtype)

        def take(name: str, *shape: int) -> torch.Tensor:
            return checkpoint.take(f"{name}.weight", shape, dtype)

        weights = cls._assemble(raw, config, shared, take)
        checkpoint.finish()
        return weights

    @classmethod
    def random(
        cls, config: dict[str, Any], dtype: torch.dtype, device: torch.device | str, seed: int
    ) -> LlamaWeights:
        """Untrained weights drawn on the device, norms 1, for measurements and tests of large shapes.

        config: the content of a config.json, for instance one of `named_shapes`. Logits stay finite.
        """
        generator = torch.Generator(device).manual_seed(seed + 1)

        def draw(name: str, *shape: int) -> torch.Tensor:
            if name.endswith("norm"):
                return torch.ones(shape, dtype=dtype, device=device)
            return random_normal(shape, dtype, generator)

        shared = random_shared_weights(config, dtype, device, seed)
        return cls._assemble(config, LlamaConfig.from_json(config), shared, draw)

    @classmethod
    def _assemble(
        cls, raw: dict[str, Any], config: LlamaConfig, shared: SharedWeights, take: _Take
    ) -> LlamaWeights:
        layers = [_take_layer(take, config, i) for i in range(config.num_layers)]
        final_norm = take("norm", config.hidden_size)
        max_positions = config.max_len + POSITIONS_BEYOND_CONTEXT
        rope = build_rope_table(config.head_dim, max_positions, raw, final_norm.device)
        contract = target_contract(raw, shared, final_norm.dtype)
        return cls(config, contract, shared, layers, final_norm, rope)


class Llama:
    """A served target. Weights are read-only; the KV cache is the caller's."""

    def __init__(self, weights: LlamaWeights) -> None:
        self.config = weights.config
        self.contract = weights.contract
        self.dtype = weights.shared.embedding.dtype
        self._embedding = weights.shared.embedding
        self._lm_head = pack(weights.shared.lm_head)
        self._layers = [_pack_layer(layer) for layer in weights.layers]
        self._final_norm = weights.final_norm
        self._rope = weights.rope

    @classmethod
    def load(cls, directory: Path, dtype: torch.dtype) -> Llama:
        """Read a checkpoint directory; CheckpointError when it does not fit."""
        return cls(LlamaWeights.load(directory, dtype))

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """num_layers, num_kv_heads, head_dim of the KV storage."""
        return self.config.num_layers, self.config.num_kv_heads, self.config.head_dim

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        batch: RaggedBatch,
        captured_layer_ids: Sequence[int] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run rows through all layers, storing their K/V.

        token_ids `[N]` int64; kv `[num_layers, 2, num_slots, num_kv_heads, head_dim]`, written at
        batch.slots. Returns the residual stream after the last layer `[N, H]` (not yet normed) and
        the captured hidden states `[N, len(captured_layer_ids) * H]`: the residual stream after each
        captured layer, in the order of the ids.
        """
        c = self.config
        rope = self._rope.at(batch.positions)
        captured: dict[int, torch.Tensor] = {}
        x = embedding(token_ids, self._embedding)
        for i, layer in enumerate(self._layers):
            x = x + self._attention(rms_norm(x, layer.input_norm, c.rms_norm_eps), layer, kv[i], batch, rope)
            x = x + swiglu(rms_norm(x, layer.post_norm, c.rms_norm_eps), layer.gate_up, layer.down)
            if i in captured_layer_ids:
                captured[i] = x
        if not captured_layer_ids:
            return x, None
        return x, torch.cat([captured[i] for i in captured_layer_ids], dim=-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and lm_head: `[N, H]` to `[N, vocab_rows]`, fp32."""
        return project(rms_norm(hidden, self._final_norm, self.config.rms_norm_eps), self._lm_head).float()

    def _attention(
        self, h: torch.Tensor, layer: LlamaLayer, kv: torch.Tensor, batch: RaggedBatch,
        rope: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        c = self.config
        heads = project(h, layer.qkv).view(h.shape[0], -1, c.head_dim)
        q_and_k = heads[:, : c.num_heads + c.num_kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = q_and_k.split([c.num_heads, c.num_kv_heads], dim=1)
            normed = (rms_norm(q, layer.q_norm, c.rms_norm_eps), rms_norm(k, layer.k_norm, c.rms_norm_eps))
            q_and_k = torch.cat(normed, dim=1)
        q, k = apply_rope(q_and_k, *rope).split([c.num_heads, c.num_kv_heads], dim=1)
        kv[0][batch.slots] = k
        kv[1][batch.slots] = heads[:, c.num_heads + c.num_kv_heads :]
        mixed = paged_attention(q, kv[0], kv[1], batch, CAUSAL, c.head_dim**-0.5)
        return project(mixed, layer.o)


def _take_layer(take: _Take, c: LlamaConfig, index: int) -> LlamaLayer:
    layer, attention, mlp = (f"layers.{index}{part}" for part in ("", ".self_attn", ".mlp"))
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    hidden, inner = c.hidden_size, c.intermediate_size
    return LlamaLayer(
        input_norm=take(f"{layer}.input_layernorm", hidden),
        qkv=torch.cat([
            take(f"{attention}.q_proj", q_size, hidden),
            take(f"{attention}.k_proj", kv_size, hidden),
            take(f"{attention}.v_proj", kv_size, hidden),
        ]),
        o=take(f"{attention}.o_proj", hidden, q_size),
        post_norm=take(f"{layer}.post_attention_layernorm", hidden),
        gate_up=torch.cat([take(f"{mlp}.gate_proj", inner, hidden), take(f"{mlp}.up_proj", inner, hidden)]),
        down=take(f"{mlp}.down_proj", hidden, inner),
        q_norm=take(f"{attention}.q_norm", c.head_dim) if c.qk_norm else None,
        k_norm=take(f"{attention}.k_norm", c.head_dim) if c.qk_norm else None,
    )  # fmt: skip


def _pack_layer(layer: LlamaLayer) -> LlamaLayer:
    return replace(
        layer,
        qkv=pack(layer.qkv),
        o=pack(layer.o),
        gate_up=pack(layer.gate_up),
        down=pack(layer.down),
    )
