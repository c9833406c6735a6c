"""`python -m tests.gpu.time_model_steps OUT.json [--profile]`: the target's forward, lm_head and sampling as
one graph, at Qwen3-8B's shape with random weights; and where its time goes, kernel by kernel.

What a step of the service cannot be faster than, without staging, hand-off and host. Medians of replays.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from common.kernels.sampling import RowParams, SamplingWorkspace, sample
from common.layers.kernel_decoder import PagedRows
from services.target.model.kernel_llama import KernelLlama
from services.target.model.llama import LlamaWeights
from services.target.model.named_shapes import NAMED_SHAPES

PAGE_SIZE, KEYS = 16, 512
# Sequences and rows of each: plain decoding, then verifying blocks of 16.
SHAPES = [(1, 1), (4, 1), (8, 1), (16, 1), (32, 1), (1, 16), (4, 16), (8, 16), (16, 16), (32, 16)]
REPLAYS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(NAMED_SHAPES))
    parser.add_argument("--profile", action="store_true", help="also sum each kernel's time")
    parser.add_argument("--row-independent", action="store_true")
    args = parser.parse_args()
    with torch.inference_mode():
        rows = measure(args.shape, profile=args.profile, row_independent=args.row_independent)
    args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1))


def measure(shape: str, *, profile: bool, row_independent: bool) -> list[dict[str, Any]]:
    """A row for each shape: ms of a replay, and µs by kernel."""
    weights = LlamaWeights.random(NAMED_SHAPES[shape], torch.bfloat16, "cuda", 1)
    num_rows_max = max(s * r for s, r in SHAPES)
    model = KernelLlama(
        weights, page_size=PAGE_SIZE, num_rows_max=num_rows_max, num_keys_max=4096, max_positions=4096,
        row_independent=row_independent,
    )  # fmt: skip
    layers, kv_heads, head_dim = model.kv_shape
    pages = KEYS // PAGE_SIZE
    num_slots = (max(s for s, _ in SHAPES) * pages + 1) * PAGE_SIZE
    kv = torch.randn(layers, 2, num_slots, kv_heads, head_dim, dtype=torch.bfloat16, device="cuda")
    hidden = torch.zeros(num_rows_max, model.config.hidden_size, dtype=torch.bfloat16, device="cuda")
    logits = torch.zeros(num_rows_max, model.vocab_rows, dtype=torch.bfloat16, device="cuda")
    workspace = SamplingWorkspace.allocate(num_rows_max, model.vocab_rows, "cuda")
    rows = []
    for num_sequences, each in SHAPES:
        graph = _record(model, kv, hidden, logits, workspace, num_sequences, each)
        ms = _replay_ms(graph)
        row: dict[str, Any] = {"sequences": num_sequences, "rows": each, "ms": round(ms, 4)}
        if profile:
            row["kernels_us"] = _kernels_us(graph)
        rows.append(row)
        print(f"{num_sequences:3} x {each:2}: {ms:7.3f} ms", flush=True)
        for name, us in list(row.get("kernels_us", {}).items())[:14]:
            print(f"      {us:8.1f} us  {name}", flush=True)
    return rows


def _record(
    model: KernelLlama, kv: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor,
    workspace: SamplingWorkspace, num_sequences: int, each: int,
) -> torch.cuda.CUDAGraph:  # fmt: skip
    def new(values: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return values.to("cuda", dtype)

    num_rows, pages = num_sequences * each, KEYS // PAGE_SIZE
    table = torch.randperm(num_sequences * pages).view(num_sequences, pages) + 1
    places = torch.arange(KEYS - each, KEYS)
    slots = (table[:, places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE).flatten()
    rows = PagedRows(
        new(places.repeat(num_sequences)), new(slots), new(table),
        new(torch.full((num_sequences,), KEYS)), each,
    )  # fmt: skip
    ids = new(torch.randint(0, model.vocab_rows, (num_rows,)))
    zeros = new(torch.zeros(num_rows))
    params = RowParams(
        temperature=zeros.float(), top_k=zeros, top_p=zeros.float() + 1, min_p_reach=zeros.float(),
        seed=zeros.long(), position=zeros.long(),
    )  # fmt: skip
    chosen, finite = torch.empty_like(zeros), torch.empty_like(zeros)

    def step() -> None:
        model.forward(ids, kv, rows, hidden[:num_rows])
        model.logits(hidden[:num_rows], logits[:num_rows])
        sample(logits[:num_rows], params, chosen, finite, workspace, pdl=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    # What the graph reads must outlive this call.
    graph.inputs = (ids, rows, params, chosen, finite)  # type: ignore[attr-defined]
    return graph


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[5:])


def _kernels_us(graph: torch.cuda.CUDAGraph) -> dict[str, float]:
    """µs of each kernel in one replay, the longest first."""
    replays = 3
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    total: dict[str, float] = collections.defaultdict(float)
    for event in profiler.events():
        total[event.name[:70]] += event.device_time_total / replays
    return dict(sorted(((name, round(us, 1)) for name, us in total.items()), key=lambda item: -item[1]))


if __name__ == "__main__":
    main()
