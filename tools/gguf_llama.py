"""What a GGUF file of a Llama-family model holds, in the words of a Hugging Face Llama checkpoint.

Knows names, shapes and row orders; knows nothing of output directories or tokenizers. Everything else than
a plain Llama (rope scaling, experts, other architectures) is refused, never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from common.errors import CheckpointError

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufLlama:
    """An open GGUF file of a Llama-family model. The tensors stay on disk until they are asked for."""

    def __init__(self, path: Path) -> None:
        """Open and check the file. Raises CheckpointError for anything that is not a plain Llama."""
        try:
            self._reader = gguf.GGUFReader(path)
        except (ValueError, KeyError, IndexError, OverflowError, UnicodeDecodeError) as error:
            # The reader has no error of its own; on a truncated or damaged file any of these escapes it.
            raise CheckpointError("gguf", f"must be a whole GGUF file ({error})", given=path.name) from error
        self._require("general.architecture", "llama")
        for key in ("llama.rope.scaling.type", "llama.expert_count"):
            if self.field(key, None) not in (None, 0, "none"):
                raise CheckpointError(key, "is not converted", given=self.field(key))
        self._num_heads = self._size("llama.attention.head_count")
        self._num_kv_heads = self._size("llama.attention.head_count_kv", self._num_heads)
        self._num_layers = self._size("llama.block_count")
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._check_names()

    def field(self, key: str, *default: Any) -> Any:
        """Value of a metadata field. Without a default a missing one raises CheckpointError."""
        found = self._reader.get_field(key)
        if found is not None:
            return found.contents()
        if default:
            return default[0]
        raise CheckpointError(key, "is missing in the GGUF file", given=None)

    @property
    def quantization(self) -> str:
        """The storage type that most weights have, such as "Q4_1"."""
        names = [tensor.tensor_type.name for tensor in self._tensors.values() if len(tensor.shape) == 2]
        return max(set(names), key=names.count)

    @property
    def num_tensors(self) -> int:
        """How many tensors `tensors()` gives."""
        return len(self._tensors)

    def config(self) -> dict[str, Any]:
        """The contents of a Hugging Face `config.json` for these weights."""
        hidden_size = self._size("llama.embedding_length")
        head_dim = self._size("llama.attention.key_length", hidden_size // self._num_heads)
        rope_dim = self._size("llama.rope.dimension_count", head_dim)
        if rope_dim != head_dim:
            raise CheckpointError("llama.rope.dimension_count", f"must be {head_dim}", given=rope_dim)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": self._vocab_rows(),
            "hidden_size": hidden_size,
            "intermediate_size": self._size("llama.feed_forward_length"),
            "num_hidden_layers": self._num_layers,
            "num_attention_heads": self._num_heads,
            "num_key_value_heads": self._num_kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "max_position_embeddings": self._size("llama.context_length"),
            "rms_norm_eps": _shortest(self.field("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self.field("llama.rope.freq_base", 10000.0)),
            "rope_scaling": None,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id", None),
            "eos_token_id": self.field("tokenizer.ggml.eos_token_id", None),
            "pad_token_id": self.field("tokenizer.ggml.padding_token_id", None),
        }

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """Hugging Face name and float32 array of each tensor, in file order.

        Raises CheckpointError for a storage type that cannot be dequantized and for values that are
        not finite.
        """
        for name, tensor in self._tensors.items():
            try:
                weights = gguf.dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                given = tensor.tensor_type.name
                raise CheckpointError(name, "must be of a known quantization", given=given) from error
            if not np.isfinite(weights).all():
                raise CheckpointError(name, "must be finite", given="NaN or infinity")
            if ".attn_q." in name:
                weights = _half_split_rows(weights, self._num_heads)
            elif ".attn_k." in name:
                weights = _half_split_rows(weights, self._num_kv_heads)
            yield self._translate(name), np.ascontiguousarray(weights, dtype=np.float32)

    def _check_names(self) -> None:
        layers_seen: dict[int, set[str]] = {}
        for name in self._tensors:
            self._translate(name)
            if layer := _LAYER_TENSOR.fullmatch(name):
                layers_seen.setdefault(int(layer[1]), set()).add(layer[2])
        missing = [
            f"blk.{index}.{name}.weight"
            for index in range(self._num_layers)
            for name in _LAYER_NAMES
            if name not in layers_seen.get(index, set())
        ]
        missing += [name for name in ("token_embd.weight", "output_norm.weight") if name not in self._tensors]
        if missing:
            raise CheckpointError("tensors", f"{len(missing)} are missing, the first is", given=missing[0])
        if len(layers_seen) != self._num_layers:
            raise CheckpointError("llama.block_count", f"must be {len(layers_seen)}", given=self._num_layers)

    def _translate(self, name: str) -> str:
        if name in _OUTER_NAMES:
            return _OUTER_NAMES[name]
        layer = _LAYER_TENSOR.fullmatch(name)
        if layer is None or layer[2] not in _LAYER_NAMES:
            raise CheckpointError("tensors", "holds one that a plain Llama has not", given=name)
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"

    def _vocab_rows(self) -> int:
        # GGUF names dimensions innermost first, so the rows are the last.
        return int(self._tensors["token_embd.weight"].shape[-1])

    def _require(self, key: str, expected: str) -> None:
        if (given := self.field(key)) != expected:
            raise CheckpointError(key, f"must be {expected}", given=given)

    def _size(self, key: str, *default: int) -> int:
        given = self.field(key, *default)
        if not isinstance(given, int) or given < 1:
            raise CheckpointError(key, "must be a positive integer", given=given)
        return given


def _half_split_rows(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's interleaving of rotary pairs.

    GGUF stores the rows of each head so that a rotary pair is two neighbours (0, h, 1, h+1, … for
    h = head_dim/2); the checkpoint format here pairs row i with row i + h.
    """
    head_dim = weights.shape[0] // num_heads
    pairs = weights.reshape(num_heads, head_dim // 2, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32 (GGUF keeps 1e-5 as 9.999999747378752e-06)."""
    return float(np.format_float_scientific(np.float32(value), unique=True))
