"""A drafter that knows what plain decoding gave and errs at chance: every accept length occurs.

With random weights a draft is hardly ever right, and a comparison of tokens with and without drafts would
see rejections only. Writes into the ring on the current stream, from device tensors. Exists in the bench
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from common.contract import DraftContract
from services.target.core.pipelined_source import PostedStep
from services.target.core.roster import Roster
from tools.gpu_bench.same_stream import SameStreamDrafter

if TYPE_CHECKING:
    from common.handoff.ring import Ring

# One draft token in so many is wrong: with 15 a block, 6 or 7 are accepted in the mean.
_WRONG_EVERY = 8
# Knuth's multiplicative hash: neighbouring positions err independently.
_SCATTER = 2654435761


class OracleDrafter(SameStreamDrafter):
    """A PipelinedDrafter for requests whose tokens were told by `learn`."""

    def __init__(
        self,
        draft: DraftContract,
        ring: Ring,
        roster: Roster,
        *,
        num_lanes: int,
        max_len: int,
        vocab_rows: int,
    ) -> None:
        """roster: finds a session's request. num_lanes: sessions at once."""
        super().__init__(draft, ring)
        self._roster = roster
        self._vocab_rows = vocab_rows
        self._truths: dict[tuple[int, ...], list[int]] = {}
        self._by_lane = torch.zeros(num_lanes, max_len, dtype=torch.int64, device=ring.drafts.device)
        self._ahead = torch.arange(1, draft.num_draft_tokens + 1, device=ring.drafts.device)
        self._free_lanes = list(range(num_lanes))
        self._lanes: dict[int, int] = {}

    def learn(self, prompt: list[int], output: list[int]) -> None:
        """What plain decoding gave after this prompt."""
        self._truths[tuple(prompt)] = prompt + output

    def post(self, step: PostedStep) -> None:
        for session_id in step.ended:
            lane = self._lanes.pop(session_id, None)
            if lane is not None:
                self._free_lanes.append(lane)
        self._rows = {row.session_id: i for i, row in enumerate(step.rows) if row is not None}
        if self._rows:
            self._write([0 if row is None else self._lane(row.session_id) for row in step.rows])

    def observe_completed(self, step_number: int, invalid: Sequence[int] = ()) -> None: ...

    def close(self) -> None: ...

    def _lane(self, session_id: int) -> int:
        lane = self._lanes.get(session_id)
        if lane is None:
            lane = self._lanes[session_id] = self._free_lanes.pop()
            request = next(r for r in self._roster.running if r.session_id == session_id)
            truth = torch.tensor(self._truths[tuple(request.prompt)])
            self._by_lane[lane, : len(truth)] = truth.to(self._by_lane.device)
        return lane

    @torch.inference_mode()
    def _write(self, lanes: list[int]) -> None:
        ring, count = self.ring, len(lanes)
        assert ring is not None
        positions = (ring.base[:count] + ring.count[:count]).to(torch.int64)[:, None] + self._ahead
        positions.clamp_(0, self._by_lane.shape[1] - 1)
        truth = self._by_lane[torch.tensor(lanes, device=positions.device)].gather(1, positions)
        is_wrong = (positions * _SCATTER >> 16) % _WRONG_EVERY == 0
        ring.drafts[:count] = torch.where(is_wrong, (truth + 1) % self._vocab_rows, truth).to(torch.int32)
