"""Tensors of a step: rows in, chosen tokens and captured hidden states out.

Owns the KV storage. Knows scheduled rows, not why they were scheduled; nothing of drafters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from common.layers.attention import RaggedBatch, Span, key_slots
from common.paged_kv import PagePool
from services.target.core.request import SamplingParams
from services.target.core.sampling import choose_tokens

if TYPE_CHECKING:
    from services.target.core.scheduler import Batch


class TargetModel(Protocol):
    """What the engine needs of a model family; see `model/llama.py` for the meaning."""

    dtype: torch.dtype

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """num_layers, num_kv_heads, head_dim."""

    def forward(
        self,
        token_ids: torch.Tensor,
        kv: torch.Tensor,
        batch: RaggedBatch,
        captured_layer_ids: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class StepOutput:
    """chosen[i]: the target's tokens for the i-th scheduled request, one more than its draft has;
    empty when it does not sample, None when its logits were not finite.
    captured `[N, num_captured_layers * H]`, or None when nothing was captured."""

    chosen: list[list[int] | None]
    captured: torch.Tensor | None


class Engine:
    """Runs batches on one device."""

    def __init__(self, model: TargetModel, pool: PagePool, device: str = "cpu") -> None:
        num_layers, num_kv_heads, head_dim = model.kv_shape
        self._model = model
        self._page_size = pool.page_size
        self._device = torch.device(device)
        # Zeros, so that memory never written is finite; reads are bounded by length anyway.
        self._kv = torch.zeros(
            (num_layers, 2, pool.num_slots, num_kv_heads, head_dim), dtype=model.dtype, device=self._device
        )

    @torch.inference_mode()
    def run(self, batch: Batch, captured_layer_ids: tuple[int, ...]) -> StepOutput:
        """Forward over all rows, then choose a token at each row that asks for one."""
        token_ids = torch.tensor(
            [token for s in batch.scheduled for token in s.row_ids], dtype=torch.int64, device=self._device
        )
        hidden, captured = self._model.forward(token_ids, self._kv, self._ragged(batch), captured_layer_ids)
        return StepOutput(self._choose(batch, hidden), captured)

    def zero_pages(self, pages: list[int]) -> None:
        """Overwrite pages that held numbers which were not finite."""
        for page in pages:
            self._kv[:, :, page * self._page_size : (page + 1) * self._page_size].zero_()

    def _ragged(self, batch: Batch) -> RaggedBatch:
        positions: list[int] = []
        slots: list[int] = []
        spans: list[Span] = []
        for s in batch.scheduled:
            table = s.request.page_table
            assert table is not None
            keys = key_slots(table.pages, self._page_size, s.stop)
            spans.append(Span(len(positions), len(positions) + s.num_rows, keys, s.stop))
            positions += range(s.start, s.stop)
            slots += table.slots(s.start, s.stop)
        return RaggedBatch(
            torch.tensor(positions, dtype=torch.int64, device=self._device),
            torch.tensor(slots, dtype=torch.int64, device=self._device),
            spans,
        )

    def _choose(self, batch: Batch, hidden: torch.Tensor) -> list[list[int] | None]:
        """lm_head only where a token is chosen: the last row of the tokens and every draft row."""
        rows: list[int] = []
        params: list[SamplingParams] = []
        positions: list[int] = []
        row_start = 0
        for s in batch.scheduled:
            row_stop = row_start + s.num_rows
            if s.samples:
                count = 1 + len(s.draft)
                rows += range(row_stop - count, row_stop)
                params += [s.request.sampling] * count
                # The token chosen at a row stands one position after it.
                positions += range(s.stop - count + 1, s.stop + 1)
            row_start = row_stop
        if not rows:
            return [[] for _ in batch.scheduled]
        logits = self._model.logits(hidden[torch.tensor(rows, device=self._device)])
        finite = torch.isfinite(logits.amax(dim=-1))
        # Nothing is chosen from these rows; zeros keep the arithmetic of choosing sound.
        logits.masked_fill_(~finite.unsqueeze(-1), 0.0)
        tokens, is_finite = _tokens_to_host(choose_tokens(logits, params, positions), finite)

        chosen: list[list[int] | None] = []
        taken = 0
        for s in batch.scheduled:
            count = 1 + len(s.draft) if s.samples else 0
            good = all(is_finite[taken : taken + count])
            chosen.append(tokens[taken : taken + count] if good else None)
            taken += count
        return chosen


def _tokens_to_host(tokens: torch.Tensor, finite: torch.Tensor) -> tuple[list[int], list[bool]]:
    """Waits for the device."""
    return tokens.tolist(), finite.tolist()
