"""argmax over logits that are written out, the lowest id among equals."""

from __future__ import annotations

import torch


def greedy_head(logits: torch.Tensor) -> list[int]:
    return [int((row == row.max()).nonzero()[0]) for row in logits.cpu()]
