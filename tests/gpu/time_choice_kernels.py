"""Times of sampling and of the kernels around a verify, as CUDA graphs.

    python -m tests.gpu.time_choice_kernels OUT.json

peaked: some 60 tokens hold the mass, as with a chat model; flat: tens of thousands do, the worst case of the
filters.
"""

from __future__ import annotations

import json
import math
import sys

import torch

from common.kernels.lanes import LaneState, Published, StagedRows, apply_updates
from common.kernels.sampling import RowParams, SamplingWorkspace, sample
from common.kernels.verify import RESULT_WORDS, BlockBatch, accept_blocks, stage_blocks
from tests.gpu.time_gemm_kernels import READ_BYTES_A_SECOND, VOCAB, median_us

LAUNCHES = 4


def params(num_rows: int, temperature: float, top_k: int, top_p: float, min_p_reach: float) -> RowParams:
    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    return RowParams(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p_reach=column(min_p_reach, torch.float32),
        seed=column(7, torch.int64),
        position=column(11, torch.int64),
    )


def time_sampling(num_rows: int) -> dict[str, float]:
    flat = (torch.randn(num_rows, VOCAB, device="cuda") * 2.5).bfloat16()
    peaked = flat.clone()
    peaked[:, :: VOCAB // 60] += 14
    space = SamplingWorkspace.allocate(num_rows, VOCAB, "cuda")
    chosen = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    finite = torch.empty(num_rows, dtype=torch.int32, device="cuda")
    times = {"floor": num_rows * VOCAB * 2 / READ_BYTES_A_SECOND * 1e6}
    for what, logits, row_params in (
        ("greedy", peaked, None),
        ("greedy rows among sampled ones", peaked, params(num_rows, 0, 0, 1, math.inf)),
        ("T", peaked, params(num_rows, 1, 0, 1, math.inf)),
        ("T, min-p", peaked, params(num_rows, 1, 0, 1, 3)),
        ("T, top-p", peaked, params(num_rows, 1, 0, 0.95, math.inf)),
        ("T, top-k", peaked, params(num_rows, 1, 50, 1, math.inf)),
        ("T, top-k, top-p", peaked, params(num_rows, 1, 50, 0.95, math.inf)),
        ("T, top-k, flat", flat, params(num_rows, 1, 50, 1, math.inf)),
        ("T, top-p, flat", flat, params(num_rows, 1, 0, 0.95, math.inf)),
    ):
        given = row_params or params(num_rows, 0, 0, 1, math.inf)
        times[what] = median_us(
            lambda _, logits=logits, given=given, row_params=row_params: sample(
                logits, given, chosen, finite, space, sampled=row_params is not None, pdl=True
            ),
            LAUNCHES,
        )
    times["torch argmax"] = median_us(lambda _: peaked.argmax(-1), LAUNCHES)
    return times


def time_verify(num_sequences: int, rows_each: int = 16) -> dict[str, float]:
    """Keys and pages as at 500 tokens; a control buffer without news."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device="cuda")

    lanes = LaneState.allocate(num_sequences, 64, "cuda")
    lanes.positions.fill_(500)
    staged = StagedRows.allocate(
        num_sequences * rows_each, num_sequences, num_sequences * rows_each, 64, "cuda"
    )
    each = torch.arange(num_sequences, dtype=torch.int32, device="cuda")
    control, num_clamped = zeros(16), zeros(num_sequences)
    batch = BlockBatch(each, each, zeros(num_sequences, rows_each - 1), control)
    chosen, finite = zeros(num_sequences, rows_each), zeros(num_sequences, rows_each)
    results = zeros(num_sequences, rows_each + RESULT_WORDS)
    ring = Published(zeros(num_sequences), zeros(num_sequences), zeros(num_sequences))
    return {
        "updates": median_us(lambda _: apply_updates(control, 16, lanes, pdl=True), 8),
        "stage": median_us(
            lambda _: stage_blocks(
                batch, lanes, staged, num_clamped, vocab_rows=VOCAB, page_size=16, positions_max=1024,
                pdl=True,
            ),
            8,
        ),  # fmt: skip
        "accept": median_us(
            lambda _: accept_blocks(
                chosen, finite, batch, lanes, staged, num_clamped, results, ring, pdl=True
            ),
            8,
        ),
    }


def main(path: str) -> None:
    found = {f"sampling {n}": time_sampling(n) for n in (1, 16, 64, 512)}
    found |= {f"verify {n}": time_verify(n) for n in (1, 32, 256)}
    with open(path, "w") as file:
        json.dump(found, file, indent=1)
    for name, times in found.items():
        print(name, "  ".join(f"{what} {us:.1f}" for what, us in times.items()))


if __name__ == "__main__":
    main(sys.argv[1])
