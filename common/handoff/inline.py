"""The inline transport: captured rows and drafts travel as bytes inside the stream's messages.

Works on a CPU and across hosts; the host waits for the reply. Packs a step into messages and checks
and unpacks replies. Knows the messages; knows no grpc (a Pipe carries the messages) and no beliefs
about sessions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from common import limits
from common.contract import DraftContract, TargetContract
from common.errors import InvalidTensor
from common.handoff.pipe import Pipe
from common.handoff.replies import Awaited, read_outcomes
from common.handoff.transport import Block, Collected, Extend, Outcome, SessionReport, Step
from common.pb.tandem.v1 import drafter_pb2 as pb
from common.wire import check_tensor, decode_tensor, dtype_from_name, encode_tensor


@dataclass(frozen=True)
class _Awaited(Awaited):
    """Also which of the sessions want a block."""

    blocks: frozenset[tuple[int, int]]


class InlineTransport:
    """A Transport over a Pipe."""

    def __init__(
        self,
        pipe: Pipe,
        target: TargetContract,
        draft: DraftContract,
        *,
        target_instance_id: str,
        drafter_instance_id: str,
    ) -> None:
        self._pipe = pipe
        self._target_instance_id = target_instance_id
        self._drafter_instance_id = drafter_instance_id
        self._vocab_rows = target.vocab_rows
        self._num_draft_tokens = draft.num_draft_tokens
        self._dtype = dtype_from_name(target.dtype)
        self._width = len(draft.captured_layer_ids) * target.hidden_size
        self._rows_max = limits.TENSOR_BYTES_MAX // (self._width * self._dtype.itemsize)
        self._next_step_id = 1
        self._awaited: deque[_Awaited] = deque()

    def post(self, step: Step, captured: torch.Tensor | None) -> bool:
        """See Transport.post."""
        if captured is not None:
            agreed = captured.dtype is self._dtype and captured.shape[1] == self._width
            assert agreed, "the layers that were captured are those of this drafter's contract"
        requests = pack(step, captured, self._rows_max)
        for step_id, request in enumerate(requests, self._next_step_id):
            request.step_id, request.target_instance_id = step_id, self._target_instance_id
        if not self._pipe.send(requests):
            return False
        self._next_step_id += len(requests)
        self._awaited.extend(_awaited(request) for request in requests)
        return True

    def collect(self, deadline: float) -> Collected:
        """See Transport.collect."""
        earlier: list[SessionReport] = []
        while self._awaited:
            reply = self._pipe.receive(deadline)
            if reply is None:
                break
            reports = list(self._read(reply, self._awaited.popleft()))
            if not self._awaited:
                return Collected(earlier, reports)
            earlier += reports
        return Collected(earlier, None)

    def _read(self, reply: pb.DraftResponse, awaited: _Awaited) -> Iterator[SessionReport]:
        """Reports on the sessions that the message named."""
        drafts = self._read_drafts(reply)
        for key, outcome, said in read_outcomes(reply, awaited, self._drafter_instance_id):
            draft = None
            if key in awaited.blocks and outcome is Outcome.OK and said.HasField("draft_row"):
                draft = drafts[said.draft_row] if said.draft_row < len(drafts) else None
            faulty = key in awaited.blocks and outcome is Outcome.OK and draft is None
            yield SessionReport(*key, outcome, said.context_len, draft, faulty)

    def _read_drafts(self, reply: pb.DraftResponse) -> list[list[int] | None]:
        """Drafts by row; None for a row with ids outside the vocabulary, no rows when type, shape or
        count are wrong."""
        num_blocks = sum(said.HasField("draft_row") for said in reply.outcomes)
        if num_blocks == 0:
            return []
        shape = (num_blocks, self._num_draft_tokens)
        try:
            check_tensor(reply.drafts, "drafts", torch.int32, shape)
        except InvalidTensor:
            return []
        rows = decode_tensor(reply.drafts, "drafts", torch.int32, shape).tolist()
        return [row if 0 <= min(row) and max(row) < self._vocab_rows else None for row in rows]


def pack(step: Step, captured: torch.Tensor | None, rows_max: int) -> list[pb.DraftRequest]:
    """The messages of a step, each with at most rows_max captured rows; the caller fills in ids.

    The first carries closes and opens, the last one asks for the blocks.
    """
    requests = [pb.DraftRequest(
        closes=[pb.CloseSession(session_id=c.session_id, epoch=c.epoch) for c in step.closes],
        opens=[
            pb.OpenSession(session_id=o.session_id, epoch=o.epoch, start_position=o.start_position)
            for o in step.opens
        ],
    )]  # fmt: skip
    for i, pieces in enumerate(_pieces(step.extends, rows_max)):
        if i:
            requests.append(pb.DraftRequest())
        requests[-1].extends.extend(
            pb.ExtendSession(session_id=e.session_id, epoch=e.epoch, position=e.position, num_rows=e.num_rows)
            for e in pieces
        )
        assert captured is not None, "an extend names captured rows"
        requests[-1].captured.CopyFrom(encode_tensor(_rows_to_host(captured, pieces)))
    requests[-1].drafts.extend(_draft_block(block) for block in step.blocks)
    return requests


def _pieces(extends: list[Extend], rows_max: int) -> Iterator[list[Extend]]:
    """Extends cut so that each list holds at most rows_max rows, in the same order."""
    pieces: list[Extend] = []
    room = rows_max
    for extend in extends:
        position, row = extend.position, extend.row_start
        while row < extend.row_stop:
            if room == 0:
                yield pieces
                pieces, room = [], rows_max
            count = min(room, extend.row_stop - row)
            pieces.append(Extend(extend.session_id, extend.epoch, position, row, row + count))
            position, row, room = position + count, row + count, room - count
    if pieces:
        yield pieces


def _rows_to_host(captured: torch.Tensor, pieces: list[Extend]) -> torch.Tensor:
    """The rows that the pieces name `[sum of rows, width]`, on the host."""
    rows = [captured[piece.row_start : piece.row_stop] for piece in pieces]
    return (rows[0] if len(rows) == 1 else torch.cat(rows)).cpu()


def _draft_block(block: Block) -> pb.DraftBlock:
    return pb.DraftBlock(
        session_id=block.session_id, epoch=block.epoch, position=block.position, anchor=block.anchor
    )


def _awaited(request: pb.DraftRequest) -> _Awaited:
    opens = {(entry.session_id, entry.epoch) for entry in request.opens}
    extends = {(entry.session_id, entry.epoch) for entry in request.extends}
    blocks = frozenset((entry.session_id, entry.epoch) for entry in request.drafts)
    return _Awaited(request.step_id, blocks | opens | extends, blocks)
