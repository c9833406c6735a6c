"""Where a text begins to repeat itself. Small models loop, and a draft that learns loops looks better than
it is.
"""

from __future__ import annotations

import torch

# Longest repeated passage looked for: a paragraph.
PERIOD_MAX = 96
# Tokens that must repeat before short periods count: code and tables repeat a little by right.
RUN_MIN = 24


def kept_lengths(tokens: torch.Tensor) -> torch.Tensor:
    """How much of each row to keep: tokens `[B, L]` to lengths `[B]` int64, L where nothing loops.

    A loop of period p is a run of at least max(RUN_MIN, 2p) tokens that equal the token p before; the
    row is cut where the second copy begins to count, so one repetition stays.
    """
    num_rows, length = tokens.shape
    index = torch.arange(length, device=tokens.device).expand(num_rows, -1)
    kept = torch.full((num_rows,), length, device=tokens.device)
    for period in range(1, min(PERIOD_MAX, length - 1) + 1):
        differs = torch.ones_like(tokens, dtype=torch.bool)
        differs[:, period:] = tokens[:, period:] != tokens[:, :-period]
        # Distance to the last token that differs = length of the run that ends here.
        run = index - torch.where(differs, index, -1).cummax(dim=1).values
        run_min = max(RUN_MIN, 2 * period)
        looping = run >= run_min
        first = torch.where(looping, index, length).amin(dim=1)
        kept = torch.minimum(kept, torch.where(first < length, first - run_min + 1, length))
    return kept
