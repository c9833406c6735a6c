"""What the step loop asks of the device engine, and what it gets back. No torch.

A lane is the row that a running request has in the device's arrays. A ring row is a row of the batch of a
launch: the first ones are the decoding lanes, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.paged_kv import PageEntry


@dataclass(frozen=True)
class ExtendRows:
    """Tokens of a request whose K/V is not stored yet, from position `start` on.

    samples: they end the request's tokens, and the next one is chosen: it becomes the lane's anchor.
    ring_row: where that anchor is published for the drafter, -1 for nowhere.
    """

    lane: int
    start: int
    token_ids: list[int]
    samples: bool
    ring_row: int = -1


@dataclass
class Launch:
    """One step. No lane is named twice in extends and lanes together.

    lanes: those that decode; ring rows 0 … len(lanes) - 1. draft_rows: None is a plain step, a row each.
    Otherwise each lane verifies a block, whose drafts lie in that row of the drafts of the step before; -1
    is a block without drafts, of which nothing is accepted. An empty list makes extends capture states
    although no lane decodes. pages: entries that are new, applied before anything else.
    drafts_inline: draft_rows are rows of the last `set_drafts`, not of the ring.
    """

    extends: list[ExtendRows] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    draft_rows: list[int] | None = None
    pages: list[PageEntry] = field(default_factory=list)
    drafts_inline: bool = False


@dataclass(frozen=True)
class Ticket:
    """Names a launch until its results are read; also the shape of those."""

    number: int
    num_extends: int
    num_lanes: int
    rows_each: int
    num_extend_rows: int


@dataclass(frozen=True)
class Results:
    """What a launch did, in host memory that is the reader's own.

    tokens `[S, R]`: the target's token at each row; those up to num_accepted `[S]` are committed, R = 1 in a
    plain step. finite `[S]` bool: every committed token was chosen from finite logits. num_clamped `[S]`:
    drafts that were no ids of the vocabulary. extend_tokens, extend_finite `[F]` mean something where the
    extend samples. The times are the GPU's, 0 on a CPU: of the extends, of the decoding lanes, of all.
    """

    tokens: NDArray[np.int32]
    num_accepted: NDArray[np.int32]
    finite: NDArray[np.bool_]
    num_clamped: NDArray[np.int32]
    extend_tokens: NDArray[np.int32]
    extend_finite: NDArray[np.bool_]
    extend_s: float
    verify_s: float
    gpu_s: float
