"""Loss of the draft's rows through the frozen lm_head, with its gradient, a few rows at a time.

Logits of all rows at once would be gigabytes (14,336 rows × 49,152 × fp32 = 2.8 GB, several times over),
so each piece's gradient with respect to the hidden rows is formed while its logits are at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch.nn.functional import linear

# Blocks whose logits exist at a time: 256 × 7 rows × 49,152 × fp32 = 350 MB.
BLOCKS_AT_ONCE = 256


class Weighting(StrEnum):
    """How much each row of a block counts: by a fixed decay, or by the chance of reaching it."""

    DECAY = "decay"
    DYNAMIC = "dynamic"


@dataclass(frozen=True)
class HeadLoss:
    """loss: scalar fp32; grad_hidden: d loss / d hidden, like hidden; hits `[N, K]` bool: row's argmax is
    its label (whether learned or not)."""

    loss: torch.Tensor
    grad_hidden: torch.Tensor
    hits: torch.Tensor


def decay_gamma(block_size: int) -> float:
    """γ of exp(-(k-1)/γ): 4, 5, 7 for blocks of 8, 10, 16, a straight line between and beyond."""
    return 4.0 + (block_size - 8) * 3.0 / 8.0


class BlockLoss:
    """Weighted cross-entropy of blocks. Stateless but for its (perhaps compiled) inner function."""

    def __init__(
        self, lm_head: torch.Tensor, block_size: int, weighting: Weighting, *, fused: bool = False
    ) -> None:
        self._lm_head = lm_head
        rows = torch.arange(block_size - 1, device=lm_head.device, dtype=torch.float32)
        self._decay = torch.exp(-rows / max(decay_gamma(block_size), 1.0))
        self._dynamic = weighting is Weighting.DYNAMIC
        self._piece: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
        self._piece = torch.compile(_piece, dynamic=False) if fused else _piece

    @torch.no_grad()
    def __call__(self, hidden: torch.Tensor, labels: torch.Tensor, learned: torch.Tensor) -> HeadLoss:
        """hidden `[N, K, H]` (rows 1…K of N blocks), labels `[N, K]` int64, learned `[N, K]` bool."""
        total = (learned * self._decay).sum().clamp(min=1e-6)
        pieces = [
            self._piece(h, self._lm_head, y, m, self._decay, total, self._dynamic)
            for h, y, m in zip(*(t.split(BLOCKS_AT_ONCE) for t in (hidden, labels, learned)), strict=True)
        ]
        losses, gradients, hits = zip(*pieces, strict=True)
        return HeadLoss(torch.stack(losses).sum(), torch.cat(gradients), torch.cat(hits))


def dynamic_weights(chances: torch.Tensor) -> torch.Tensor:
    """D-PACE: row k weighs Σ_{j≥k} Π_{i≤j} s_i with s = (1 + chance of the label) / 2; `[N, K]`.

    What the expected accept length gains, to first order, when row k gets better.
    """
    reached = (0.5 + 0.5 * chances).cumprod(dim=-1)
    return reached.flip(-1).cumsum(-1).flip(-1)


def _piece(
    hidden: torch.Tensor,
    lm_head: torch.Tensor,
    labels: torch.Tensor,
    learned: torch.Tensor,
    decay: torch.Tensor,
    total: torch.Tensor,
    dynamic: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = linear(hidden, lm_head).float()
    log_norm = logits.logsumexp(dim=-1)
    cross_entropy = log_norm - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    weights = learned * (dynamic_weights(torch.exp(-cross_entropy) * learned) if dynamic else decay) / total
    # d loss / d logits = weights · (softmax - one_hot); the one_hot part is a row of lm_head.
    softmax = torch.exp(logits - log_norm.unsqueeze(-1)) * weights.unsqueeze(-1)
    label_rows = lm_head[labels] * weights.unsqueeze(-1).to(lm_head.dtype)
    gradient = softmax.to(hidden.dtype) @ lm_head - label_rows
    return (cross_entropy * weights).sum(), gradient, logits.argmax(dim=-1) == labels
