"""The tokenizer of a GGUF file as `tokenizer.json` and `tokenizer_config.json`.

Only byte-level BPE with a pre-tokenizer that is known exactly: a wrong one still encodes, to ids that the
model was hardly trained on, so an unknown name is refused.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.errors import CheckpointError
from tools.gguf_llama import GgufLlama

# GGUF's token types.
_CONTROL = 3
_USER_DEFINED = 4


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Each digit alone, then GPT-2's split into byte-level words."""
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


_PRE_TOKENIZERS = {"smollm": _smollm, "gpt-2": _gpt2}


def build_tokenizer(model: GgufLlama) -> Tokenizer:
    """The tokenizer that the model was trained with. Raises CheckpointError for a kind not known."""
    if (kind := model.field("tokenizer.ggml.model")) != "gpt2":
        raise CheckpointError("tokenizer.ggml.model", "must be gpt2 (byte-level BPE)", given=kind)
    name = model.field("tokenizer.ggml.pre")
    if name not in _PRE_TOKENIZERS:
        raise CheckpointError("tokenizer.ggml.pre", f"must be one of {sorted(_PRE_TOKENIZERS)}", given=name)
    tokens = model.field("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in model.field("tokenizer.ggml.merges")]
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens", "must be distinct", given=len(tokens))
    if any(len(merge) != 2 for merge in merges):
        raise CheckpointError("tokenizer.ggml.merges", "must be pairs", given=len(merges))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[name]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = model.field("tokenizer.ggml.token_type")
    for added, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, kind in zip(tokens, kinds, strict=True) if kind == added]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in chosen])
    return tokenizer


def tokenizer_config(model: GgufLlama) -> dict[str, Any]:
    """The contents of `tokenizer_config.json`: special tokens by name, and the chat template."""
    tokens = model.field("tokenizer.ggml.tokens")
    named = {
        f"{role}_token": tokens[model.field(f"tokenizer.ggml.{key}_token_id")]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if model.field(f"tokenizer.ggml.{key}_token_id", None) is not None
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.field("llama.context_length"),
        "add_bos_token": model.field("tokenizer.ggml.add_bos_token", False),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        **named,
        "chat_template": model.field("tokenizer.chat_template", None),
    }
