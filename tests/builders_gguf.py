"""Small GGUF files of the Llama family, written with the format's own writer, for the conversion tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NUM_LAYERS, HIDDEN, FFN, NUM_HEADS, NUM_KV_HEADS, VOCAB = 2, 96, 64, 6, 2, 40
HEAD_DIM = HIDDEN // NUM_HEADS


def byte_symbols() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]


def llama_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random float32 weights of the tiny model, under GGUF's names but with rows as a checkpoint has them."""
    weights = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(NUM_LAYERS):
        weights |= {
            f"blk.{layer}.attn_norm.weight": (HIDDEN,),
            f"blk.{layer}.attn_q.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.attn_k.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": (NUM_KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": (HIDDEN, HIDDEN),
            f"blk.{layer}.ffn_norm.weight": (HIDDEN,),
            f"blk.{layer}.ffn_gate.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_up.weight": (FFN, HIDDEN),
            f"blk.{layer}.ffn_down.weight": (HIDDEN, FFN),
        }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}


def interleave_rotary_rows(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from halves (0…h−1, h…2h−1) to neighbours (0, h, 1, h+1, …), one row at a time."""
    out = np.empty_like(weights)
    head_dim = weights.shape[0] // num_heads
    for head in range(num_heads):
        for i in range(head_dim // 2):
            start = head * head_dim
            out[start + 2 * i] = weights[start + i]
            out[start + 2 * i + 1] = weights[start + i + head_dim // 2]
    return out


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    quantize: Callable[[str], gguf.GGMLQuantizationType | None] = lambda name: None,
    alter: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
) -> Path:
    """Write a tiny Llama. `quantize` names a tensor's storage type (None: as it is); `alter` adds fields."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    tokens = ["<|end|>", *byte_symbols()[33 : 33 + VOCAB - 2], '!"']
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (VOCAB - 1))
    writer.add_token_merges(['! "'])
    writer.add_eos_token_id(0)
    alter(writer)
    for name, values in weights.items():
        if ".attn_q." in name:
            values = interleave_rotary_rows(values, NUM_HEADS)
        elif ".attn_k." in name:
            values = interleave_rotary_rows(values, NUM_KV_HEADS)
        if (storage := quantize(name)) is not None:
            writer.add_tensor(name, gguf.quantize(values, storage), raw_dtype=storage)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
