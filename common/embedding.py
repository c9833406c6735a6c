"""The two matrices that target and drafter share: embedding and lm_head of the target's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common import limits
from common.contract import TargetContract
from common.errors import CheckpointError
from common.weights import Checkpoint, fingerprint, flag_field, int_field, random_normal, read_config

EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
# Checkpoints name everything but lm_head under this prefix.
PREFIX = "model."


@dataclass(frozen=True)
class SharedWeights:
    """embedding and lm_head, both `[vocab_rows, hidden_size]`; one tensor when tied."""

    embedding: torch.Tensor
    lm_head: torch.Tensor
    fingerprint: str


def take_shared_weights(checkpoint: Checkpoint, config: dict[str, Any], dtype: torch.dtype) -> SharedWeights:
    """Take both from an open checkpoint (prefix `model.` stripped), cast to dtype, on its device."""
    shape = _shape(config)
    stored = {EMBEDDING: checkpoint.take(EMBEDDING, shape)}
    tied = flag_field(config, "tie_word_embeddings")
    if tied:
        # Some files store a tied head once more.
        checkpoint.ignore(LM_HEAD)
    elif LM_HEAD in checkpoint:
        stored[LM_HEAD] = checkpoint.take(LM_HEAD, shape)
    else:
        raise CheckpointError("lm_head.weight", "must exist when tie_word_embeddings is false", given=None)
    embedding = stored[EMBEDDING].to(dtype)
    lm_head = embedding if tied else stored[LM_HEAD].to(dtype)
    return SharedWeights(embedding, lm_head, fingerprint(stored))


def random_shared_weights(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device | str, seed: int
) -> SharedWeights:
    """Both at random, as config (the content of a config.json) shapes them: equal for equal arguments, so
    that target and drafter can each make them."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = {EMBEDDING: random_normal(_shape(config), dtype, generator)}
    if not flag_field(config, "tie_word_embeddings"):
        drawn[LM_HEAD] = random_normal(_shape(config), dtype, generator)
    embedding = drawn[EMBEDDING]
    return SharedWeights(embedding, drawn.get(LM_HEAD, embedding), fingerprint(drawn))


def load_shared_weights(
    directory: Path, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[SharedWeights, TargetContract]:
    """What a drafter needs of the target's checkpoint, and the contract that follows from it."""
    config = read_config(directory)
    checkpoint = Checkpoint(directory, strip_prefix=PREFIX, device=device)
    shared = take_shared_weights(checkpoint, config, dtype)
    return shared, target_contract(config, shared, dtype)


def _shape(config: dict[str, Any]) -> tuple[int, int]:
    vocab_rows = int_field(config, "vocab_size", 1, limits.VOCAB_ROWS_MAX)
    return vocab_rows, int_field(config, "hidden_size", 1, limits.HIDDEN_SIZE_MAX)


def target_contract(config: dict[str, Any], shared: SharedWeights, dtype: torch.dtype) -> TargetContract:
    """The target's side of the model contract, from its checkpoint alone."""
    return TargetContract(
        hidden_size=shared.embedding.shape[1],
        num_layers=int_field(config, "num_hidden_layers", 1, limits.LAYERS_MAX),
        vocab_rows=shared.embedding.shape[0],
        dtype=str(dtype).removeprefix("torch."),
        weights_fingerprint=shared.fingerprint,
    )
