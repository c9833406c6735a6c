"""The model contract: every fact that target and drafter must share. No torch, no grpc.

A mismatch names the field and both values; the target then serves plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from common import limits

PROTOCOL_VERSION = 1


@dataclass(frozen=True)
class TargetContract:
    """What the target's checkpoint fixes. Both sides fill all of it, and each field must be equal."""

    hidden_size: int
    num_layers: int
    vocab_rows: int
    dtype: str
    weights_fingerprint: str


@dataclass(frozen=True)
class DraftContract:
    """What the draft checkpoint fixes; the target adopts it when `unfit` finds nothing.

    `captured_layer_ids` are 0-based decoder layers in the order of concatenation. `block_size`
    counts the rows of a draft block with its anchor.
    """

    captured_layer_ids: tuple[int, ...]
    block_size: int
    num_draft_tokens: int
    mask_token_id: int
    context_len_max: int
    weights_fingerprint: str


@dataclass(frozen=True)
class Mismatch:
    """One field on which the two sides differ."""

    field: str
    ours: object
    theirs: object

    def __str__(self) -> str:
        return f"{self.field}: ours {self.ours}, theirs {self.theirs}"


def mismatches(ours: TargetContract, theirs: TargetContract) -> list[Mismatch]:
    """Fields of the target contract that differ."""
    pairs = ((f.name, getattr(ours, f.name), getattr(theirs, f.name)) for f in fields(TargetContract))
    return [Mismatch(name, a, b) for name, a, b in pairs if a != b]


def unfit(target: TargetContract, draft: DraftContract) -> list[Mismatch]:
    """What in `draft` this target cannot serve; `ours` states what would be right."""
    wrong = []

    def require(ok: bool, field: str, ours: object, theirs: object) -> None:
        if not ok:
            wrong.append(Mismatch(field, ours, theirs))

    # The last layer's output is never captured: in published drafts it means different things
    # (before or after the final norm).
    last = target.num_layers - 2
    ids = draft.captured_layer_ids
    require(
        0 < len(ids) <= limits.CAPTURED_LAYERS_MAX,
        "captured_layer_ids",
        f"1 to {limits.CAPTURED_LAYERS_MAX} layers",
        list(ids),
    )
    require(
        all(0 <= i <= last for i in ids) and len(set(ids)) == len(ids),
        "captured_layer_ids",
        f"distinct ids from 0 to {last}",
        list(ids),
    )
    require(
        2 <= draft.block_size <= limits.BLOCK_SIZE_MAX,
        "block_size",
        f"2 to {limits.BLOCK_SIZE_MAX}",
        draft.block_size,
    )
    require(
        draft.num_draft_tokens == draft.block_size - 1,
        "num_draft_tokens",
        draft.block_size - 1,
        draft.num_draft_tokens,
    )
    require(
        0 <= draft.mask_token_id < target.vocab_rows,
        "mask_token_id",
        f"below {target.vocab_rows}",
        draft.mask_token_id,
    )
    require(
        draft.context_len_max >= draft.block_size,
        "context_len_max",
        f"at least {draft.block_size}",
        draft.context_len_max,
    )
    return wrong
