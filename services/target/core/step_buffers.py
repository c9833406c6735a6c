"""Buffers from a step's rows to its tokens, allocated once at their largest, before any capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from common.kernels.lanes import StagedRows
from common.kernels.sampling import SamplingWorkspace, sample
from common.layers.kernel_linear import launches_may_overlap

if TYPE_CHECKING:
    from services.target.model.kernel_llama import KernelLlama


@dataclass(frozen=True)
class StepBuffers:
    """For up to N rows of S sequences with C choices.

    staged: the forward's input. hidden `[N, H]`: its output. last_rows `[S]` int32, last_hidden `[S, H]`:
    where only a sequence's last row chooses. num_clamped `[S]` int32. logits `[C, V]` of the model's type;
    chosen, finite `[C]` int32.
    """

    staged: StagedRows
    hidden: torch.Tensor
    last_rows: torch.Tensor
    last_hidden: torch.Tensor
    num_clamped: torch.Tensor
    logits: torch.Tensor
    chosen: torch.Tensor
    finite: torch.Tensor
    workspace: SamplingWorkspace

    @classmethod
    def allocate(
        cls, model: KernelLlama, num_rows: int, num_sequences: int, num_chosen: int, num_pages_each: int,
        device: torch.device,
    ) -> StepBuffers:  # fmt: skip
        """device: the model's, or `meta` to ask for num_bytes alone."""
        dtype, hidden_size = model.dtype, model.config.hidden_size

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            staged=StagedRows.allocate(num_rows, num_sequences, num_chosen, num_pages_each, device),
            hidden=zeros(num_rows, hidden_size, dtype=dtype),
            last_rows=zeros(num_sequences),
            last_hidden=zeros(num_sequences, hidden_size, dtype=dtype),
            num_clamped=zeros(num_sequences),
            logits=zeros(num_chosen, model.vocab_rows, dtype=dtype),
            chosen=zeros(num_chosen),
            finite=zeros(num_chosen),
            workspace=SamplingWorkspace.allocate(num_chosen, model.vocab_rows, device),
        )

    @property
    def num_bytes(self) -> int:
        """Of the parts that count."""
        w = self.workspace
        parts = (self.hidden, self.logits, w.best, w.noisy_best, w.steps, w.listed, w.listed_ids)
        return sum(part.nbytes for part in parts) + self.staged.page_table.nbytes

    def choose(self, model: KernelLlama, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A token at each of the rows hidden `[C, H]`, by the first C of the staged parameters: chosen and
        finite `[C]`."""
        count = hidden.shape[0]
        logits, chosen, finite = self.logits[:count], self.chosen[:count], self.finite[:count]
        model.logits(hidden, logits)
        sample(
            logits, self.staged.first(0, 0, count).params, chosen, finite, self.workspace,
            pdl=launches_may_overlap(model.device),
        )  # fmt: skip
        return chosen, finite


def buffer_bytes(
    model: KernelLlama, *, num_lanes: int, num_pages_each: int, extend_rows_max: int, extends_max: int,
    num_verify_rows: int,
) -> int:  # fmt: skip
    """What an engine will have of these: for prompts, for plain steps, and, unless num_verify_rows is 0, for
    verifies."""
    sizes = [(extend_rows_max, extends_max, extends_max)]
    sizes += [(num_rows, num_lanes, num_rows) for num_rows in (num_lanes, num_verify_rows) if num_rows]
    meta = torch.device("meta")
    planned = (StepBuffers.allocate(model, *size, num_pages_each, meta) for size in sizes)
    return sum(buffers.num_bytes for buffers in planned)
