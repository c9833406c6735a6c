"""Times of the few-row GEMMs against cuBLAS and the read limit, and of a whole step's GEMMs, as CUDA graphs.

    python -m tests.gpu.time_gemm_kernels OUT.json [--try]

--try also times tiles that are not in the plans, so that plans can be revised. A graph holds enough launches
over different weights to exceed the L2 cache several times; a time is the median of its replays.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import silu

from common.kernels.gemm_plans import GemmPlan, Tile, plan_for
from common.kernels.greedy_head import greedy_head, greedy_head_scratch
from common.kernels.small_gemm import GemmWorkspace, small_gemm

READ_BYTES_A_SECOND = 4.64e12  # of the H200
BF16 = torch.bfloat16
NUM_LAYERS, HIDDEN, INNER, VOCAB = 36, 4096, 12288, 151936  # Qwen3-8B
SHAPES = {
    "qkv": (6144, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER),
    "head": (VOCAB, HIDDEN),
}  # fmt: skip
LAUNCHES = {"qkv": 18, "o": 24, "gate_up": 6, "down": 9, "head": 2}
ROWS = (1, 8, 16, 32, 64, 128, 512)
# What the first sweep said should pay: more bytes in flight, three programs an SM.
CANDIDATES = {
    16: [
        Tile(64, 128, 16, 8), Tile(64, 128, 16, 10), Tile(64, 256, 16, 5), Tile(64, 64, 16, 14),
        Tile(64, 64, 16, 7), Tile(64, 128, 16, 3), Tile(64, 128, 16, 6),
    ],
    32: [Tile(64, 128, 32, s) for s in (4, 6, 8)] + [Tile(64, 64, 32, s) for s in (5, 7, 12)],
    64: [Tile(64, 128, 64, s) for s in (4, 5, 6)] + [Tile(64, 64, 64, s) for s in (4, 6, 10)]
    + [Tile(128, 64, 64, 3, num_warps=8), Tile(128, 64, 64, 6, num_warps=8)],
    128: [Tile(128, 64, 128, 5, num_warps=8), Tile(64, 64, 128, 4), Tile(64, 128, 128, 4)],
    512: [Tile(128, 64, 256, 3, num_warps=8), Tile(128, 64, 128, 3, num_warps=8)],
}  # fmt: skip


def new(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=BF16, device="cuda")


def median_us(record: Callable[[int], Any], launches: int, replays: int = 7) -> float:
    record(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            record(i)
    graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times) * 1e3 / launches


def compile_tile(job: tuple[str, int, Tile]) -> None:
    """In a process of its own, so that the cache on disk is warm when times are taken."""
    name, split, tile = job
    n, k = SHAPES[name]
    rows, out = tile.block_m, torch.empty(tile.block_m, n, dtype=BF16, device="cuda")
    space = GemmWorkspace.allocate(1 << 25, 1 << 15, "cuda")
    weight = torch.empty(n, k, dtype=BF16, device="cuda").zero_()
    for pdl in (True, False):
        small_gemm(new(rows, k), weight, out, space, GemmPlan(split, (tile,)), pdl=pdl)


class Step:
    """The weights of a model and one step's GEMMs over them."""

    def __init__(self) -> None:
        self.weights = {
            name: [new(n, k) * k**-0.5 for _ in range(1 if name == "head" else NUM_LAYERS)]
            for name, (n, k) in SHAPES.items()
        }
        self.space = GemmWorkspace.allocate(1 << 25, 1 << 15, "cuda")
        self.plans = {name: plan_for(n, k, 2) for name, (n, k) in SHAPES.items()}
        self.out = torch.empty(max(ROWS) * VOCAB, dtype=BF16, device="cuda")

    def rows_out(self, num_rows: int, n: int) -> torch.Tensor:
        return self.out[: num_rows * n].view(num_rows, n)

    def time_one(
        self, name: str, num_rows: int, plan: GemmPlan, *, pdl: bool = True
    ) -> float:
        n, k = SHAPES[name]
        x, y, weights = new(num_rows, k), self.rows_out(num_rows, n), self.weights[name]
        return median_us(
            lambda i: small_gemm(
                x, weights[i % len(weights)], y, self.space, plan, pdl=pdl
            ),
            LAUNCHES[name],
        )  # fmt: skip

    def time_cublas(self, name: str, num_rows: int) -> float:
        n, k = SHAPES[name]
        x, y, weights = new(num_rows, k), self.rows_out(num_rows, n), self.weights[name]
        return median_us(lambda i: torch.mm(x, weights[i % len(weights)].T, out=y), LAUNCHES[name])

    def time_step_us(self, num_rows: int, *, ours: bool, pdl: bool) -> float:
        """All GEMMs of a step, each reading what the one before wrote, with torch's own gate on both sides,
        so that the products alone differ."""
        x, qkv, a = new(num_rows, HIDDEN), new(num_rows, SHAPES["qkv"][0]), new(num_rows, HIDDEN)
        gate_up, inner, w = new(num_rows, 2 * INNER), new(num_rows, INNER), self.weights
        logits = self.rows_out(num_rows, VOCAB)

        def ours_once(_: int) -> None:
            for i in range(NUM_LAYERS):
                small_gemm(x, w["qkv"][i], qkv, self.space, self.plans["qkv"], pdl=pdl)
                small_gemm(qkv[:, :HIDDEN], w["o"][i], a, self.space, self.plans["o"], pdl=pdl)
                small_gemm(a, w["gate_up"][i], gate_up, self.space, self.plans["gate_up"], pdl=pdl)
                torch.mul(silu(gate_up[:, :INNER]), gate_up[:, INNER:], out=inner)
                small_gemm(inner, w["down"][i], x, self.space, self.plans["down"], pdl=pdl)
            small_gemm(x, w["head"][0], logits, self.space, self.plans["head"], pdl=pdl)

        def cublas_once(_: int) -> None:
            for i in range(NUM_LAYERS):
                torch.mm(x, w["qkv"][i].T, out=qkv)
                torch.mm(qkv[:, :HIDDEN], w["o"][i].T, out=a)
                torch.mm(a, w["gate_up"][i].T, out=gate_up)
                torch.mul(silu(gate_up[:, :INNER]), gate_up[:, INNER:], out=inner)
                torch.mm(inner, w["down"][i].T, out=x)
            torch.mm(x, w["head"][0].T, out=logits)

        return median_us(ours_once if ours else cublas_once, 1)

    def time_head_us(self, num_rows: int) -> tuple[float, float]:
        """Greedy head, and cuBLAS with argmax."""
        head, plan, x = self.weights["head"][0], self.plans["head"], new(num_rows, HIDDEN)
        scratch = greedy_head_scratch(num_rows, VOCAB, plan)
        best = torch.empty(scratch, dtype=torch.int64, device="cuda")
        chosen = torch.empty(num_rows, dtype=torch.int64, device="cuda")
        finite = torch.empty(num_rows, dtype=torch.int32, device="cuda")
        logits = self.rows_out(num_rows, VOCAB)
        ours = median_us(lambda _: greedy_head(x, head, best, chosen, finite, plan, pdl=True), 2)
        return ours, median_us(lambda _: torch.mm(x, head.T, out=logits).argmax(-1), 2)


def floor_us(name: str) -> float:
    n, k = SHAPES[name]
    return n * k * 2 / READ_BYTES_A_SECOND * 1e6


def splits_to_try(name: str) -> tuple[int, ...]:
    return (1,) if name in ("qkv", "gate_up", "head") else (1, 2)


def main(path: str, try_others: bool) -> None:
    jobs = {
        (name, plan_for(n, k, 2).split, tile)
        for name, (n, k) in SHAPES.items()
        for tile in plan_for(n, k, 2).tiles
    }
    if try_others:
        jobs |= {
            ("o", split, tile)
            for tiles in CANDIDATES.values() for tile in tiles for split in splits_to_try("o")
        }  # fmt: skip
    with multiprocessing.get_context("spawn").Pool(12) as pool:
        pool.map(compile_tile, sorted(jobs, key=repr), chunksize=1)

    step, found, lines = Step(), {}, []
    for num_rows in ROWS:
        for name in SHAPES:
            times = {
                "floor": floor_us(name),
                "cublas": step.time_cublas(name, num_rows),
                "ours": step.time_one(name, num_rows, step.plans[name]),
            }
            if try_others:
                for tile in CANDIDATES.get(num_rows, []):
                    for split in splits_to_try(name):
                        times[f"{split} {tile}"] = step.time_one(name, num_rows, GemmPlan(split, (tile,)))
            found[f"{name} {num_rows}"] = times
            best = min((us, what) for what, us in times.items() if what not in ("floor", "cublas"))
            lines.append(
                f"{name:8} {num_rows:4} rows  floor {times['floor']:6.1f}  cublas {times['cublas']:6.1f}  "
                f"ours {times['ours']:6.1f}  best {best}"
            )
    floor = sum(floor_us(name) * (1 if name == "head" else NUM_LAYERS) for name in SHAPES)
    for num_rows in ROWS:
        found[f"step {num_rows}"] = times = {
            "floor": floor,
            "cublas": step.time_step_us(num_rows, ours=False, pdl=False),
            "ours": step.time_step_us(num_rows, ours=True, pdl=False),
            "ours overlapped": step.time_step_us(num_rows, ours=True, pdl=True),
        }
        lines.append(f"step {num_rows:4} rows  " + "  ".join(f"{k} {v:.0f}" for k, v in times.items()))
    for num_rows in (15, 60, 240):
        found[f"greedy head {num_rows}"] = step.time_head_us(num_rows)
        ours, cublas = found[f"greedy head {num_rows}"]
        lines.append(f"greedy head {num_rows:4} rows  ours {ours:.0f}  cublas and argmax {cublas:.0f}")
    with open(path, "w") as file:
        json.dump(found, file, indent=1)
    print("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1], "--try" in sys.argv)
