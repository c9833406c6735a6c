"""Which draft blocks a batch teaches: anchors, block rows, labels, and what each row may see.

An anchor a stands at its own position; row k of its block learns token a + k; the context is positions
0 … a-1, as the drafter service has it when the anchor was just committed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tools.train.corpus import Corpus
from tools.train.generate import ANSWER


@dataclass(frozen=True)
class Blocks:
    """Draft blocks of a batch: b sequences, A anchors each, B rows a block, K = B - 1.

    anchors `[b, A]`; ids, positions `[b, A, B]`; labels `[b, A, K]`; learned `[b, A, K]` bool: the label
    is an answer token and so are all before it in the block. All ids int64.
    """

    anchors: torch.Tensor
    ids: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    learned: torch.Tensor


def anchor_candidates(batch: Corpus) -> torch.Tensor:
    """Positions `[b, L]` bool whose next token is an answer token: a response, or the last of a prompt."""
    length = batch.tokens.shape[1]
    inside = torch.arange(1, length, device=batch.tokens.device) < batch.lengths.unsqueeze(1)
    candidates = torch.zeros_like(batch.roles, dtype=torch.bool)
    candidates[:, :-1] = (batch.roles[:, 1:] == ANSWER) & inside
    return candidates


def draw_anchors(
    batch: Corpus, num_anchors: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct random anchors of each row, ascending: positions `[b, A]` and which of them are real.

    A row with fewer candidates than anchors is filled up with positions that teach nothing.
    """
    candidates = anchor_candidates(batch)
    score = torch.rand(candidates.shape, generator=generator, device=candidates.device) + candidates
    anchors = score.topk(num_anchors, dim=1).indices.sort(dim=1).values
    return anchors, candidates.gather(1, anchors)


def build_blocks(
    batch: Corpus, anchors: torch.Tensor, real: torch.Tensor, block_size: int, mask_token_id: int
) -> Blocks:
    """Blocks at the given anchors. `real` `[b, A]` bool: blocks that count."""
    length = batch.tokens.shape[1]
    positions = anchors.unsqueeze(-1) + torch.arange(block_size, device=anchors.device)
    # Labels past the end of the tensors repeat its last token, and do not count.
    within = positions.clamp(max=length - 1)
    flat = within.flatten(1)
    tokens = batch.tokens.long().gather(1, flat).view_as(positions)
    answered = (batch.roles.gather(1, flat).view_as(positions) == ANSWER) & (
        positions < batch.lengths.view(-1, 1, 1)
    )
    learned = answered[..., 1:].cumprod(dim=-1).bool() & real.unsqueeze(-1)
    ids = torch.full_like(tokens, mask_token_id)
    ids[..., 0] = tokens[..., 0]
    return Blocks(anchors, ids, positions, tokens[..., 1:], learned)


def attention_bias(
    anchors: torch.Tensor, context_len: int, block_size: int, dtype: torch.dtype
) -> torch.Tensor:
    """0 / -inf `[b, 1, A*B, context_len + A*B]`: a block sees the context before its anchor, and itself.

    In both directions inside the block; never another block.
    """
    num_rows, num_anchors = anchors.shape
    device = anchors.device
    context = torch.arange(context_len, device=device) < anchors.unsqueeze(-1)  # [b, A, L]
    context = context.unsqueeze(2).expand(-1, -1, block_size, -1).flatten(1, 2)
    block = torch.arange(num_anchors * block_size, device=device) // block_size
    own = (block.unsqueeze(1) == block.unsqueeze(0)).expand(num_rows, -1, -1)
    seen = torch.cat([context, own], dim=-1)
    bias = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return bias.unsqueeze(1)
