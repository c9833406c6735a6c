"""The two matrices that target and drafter share: embedding and lm_head of the target's checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common import limits
from common.contract import TargetContract
from common.errors import CheckpointError
from common.weights import Checkpoint, fingerprint, flag_field, int_field, read_config

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
    """Take both from an open checkpoint (prefix `model.` stripped), cast to dtype."""
    hidden_size = int_field(config, "hidden_size", 1, limits.HIDDEN_SIZE_MAX)
    vocab_rows = int_field(config, "vocab_size", 1, limits.VOCAB_ROWS_MAX)
    stored = {EMBEDDING: checkpoint.take(EMBEDDING, (vocab_rows, hidden_size))}
    tied = flag_field(config, "tie_word_embeddings")
    if tied:
        # Some files store a tied head once more.
        checkpoint.ignore(LM_HEAD)
    elif LM_HEAD in checkpoint:
        stored[LM_HEAD] = checkpoint.take(LM_HEAD, (vocab_rows, hidden_size))
    else:
        raise CheckpointError("lm_head.weight", "must exist when tie_word_embeddings is false", given=None)
    embedding = stored[EMBEDDING].to(dtype)
    lm_head = embedding if tied else stored[LM_HEAD].to(dtype)
    return SharedWeights(embedding, lm_head, fingerprint(stored))


def load_shared_weights(directory: Path, dtype: torch.dtype) -> tuple[SharedWeights, TargetContract]:
    """What a drafter needs of the target's checkpoint, and the contract that follows from it."""
    config = read_config(directory)
    shared = take_shared_weights(Checkpoint(directory, strip_prefix=PREFIX), config, dtype)
    return shared, target_contract(config, shared, dtype)


def target_contract(config: dict[str, Any], shared: SharedWeights, dtype: torch.dtype) -> TargetContract:
    """The target's side of the model contract, from its checkpoint alone."""
    return TargetContract(
        hidden_size=shared.embedding.shape[1],
        num_layers=int_field(config, "num_hidden_layers", 1, limits.LAYERS_MAX),
        vocab_rows=shared.embedding.shape[0],
        dtype=str(dtype).removeprefix("torch."),
        weights_fingerprint=shared.fingerprint,
    )
