"""What a draft would have saved on text that is already there: accept lengths without a service.

Greedy text is exactly what serving at temperature 0 would verify against; on sampled text it is what
serving with that text's noise would.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Acceptance:
    """accept_length: tokens committed by a verify, mean over the steps of serving these texts.
    by_row[k-1]: share of steps whose first k drafts were all accepted. num_steps: how many verifies."""

    accept_length: float
    by_row: list[float]
    num_steps: int


def measure_acceptance(hits: torch.Tensor, anchors: torch.Tensor) -> Acceptance:
    """Walk each text as serving would.

    hits `[N, P, K]` bool: the draft at anchor p of text n got row k right (False past the answer's end).
    anchors `[N, P]` bool: answer tokens that another answer token follows. A walk starts at the first of
    an answer (the token that prefill gave) and goes from p to p + num_accepted + 1.
    """
    accepted = hits.long().cumprod(dim=-1).sum(dim=-1).cpu()
    steps_by_accepted = torch.zeros(hits.shape[-1] + 1, dtype=torch.int64)
    for row_accepted, row_anchors in zip(accepted.tolist(), anchors.tolist(), strict=True):
        position = 0
        while position < len(row_anchors):
            if row_anchors[position]:
                steps_by_accepted[row_accepted[position]] += 1
                position += row_accepted[position]
            position += 1
    num_steps = max(int(steps_by_accepted.sum()), 1)
    at_least = steps_by_accepted.flip(0).cumsum(0).flip(0)[1:].double() / num_steps
    return Acceptance(int(anchors.sum()) / num_steps, [round(x, 4) for x in at_least.tolist()], num_steps)
