"""Times of attention and the small kernels of a layer against their memory floors, as CUDA graphs.

    python -m tests.gpu.time_layer_kernels OUT.json

A graph holds one launch for each of so many layers that their K/V exceeds the L2 cache twice; a time is the
median of its replays over the number of layers.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from common.kernels import kv_store, norm, paged_attention, swiglu
from common.kernels.paged_attention import AttentionWorkspace, RaggedRows, Tile

READ_BYTES_A_SECOND, COPY_BYTES_A_SECOND = 4.64e12, 4.23e12  # of the H200
L2_BYTES = 60e6
QWEN3_8B, SMOLLM2 = (32, 8, 128), (9, 3, 64)
BF16 = torch.bfloat16
# A change of tile changes rows' bits everywhere: tried here, then written into Tile.of.
VARIANTS = {
    f"c{chunk}s{stages}": Tile(64, 64, chunk, 4, stages) for chunk, stages in ((128, 3), (128, 2), (256, 3))
}


def median_us(record: Callable[[], Any], launches: int, replays: int = 15) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        record()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            record()
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(replays):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            stop.record()
            times.append((start, stop))
        torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in times) * 1e3 / launches


def new(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=BF16, device="cuda")


class Setting:
    """S sequences of kv_len keys with R rows each, in so many layers' caches."""

    def __init__(self, heads: tuple[int, int, int], s: int, r: int, kv_len: int, page_size: int) -> None:
        num_heads, num_kv_heads, dim = heads
        self.bytes = s * kv_len * num_kv_heads * dim * 2 * 2 + 2 * s * r * num_heads * dim * 2
        self.layers = max(3, min(72, -(-int(2.2 * L2_BYTES) // self.bytes)))
        pages = -(-kv_len // page_size)
        self.kv = torch.randn(
            self.layers, 2, (s * pages + 1) * page_size, num_kv_heads, dim, dtype=BF16, device="cuda"
        )
        self.table = (torch.randperm(s * pages, device="cuda") + 1).view(s, pages).int()
        self.kv_lens = torch.full((s,), kv_len, dtype=torch.int32, device="cuda")
        self.q = torch.randn(s * r, num_heads, dim, dtype=BF16, device="cuda")
        self.out = torch.empty_like(self.q)
        self.rows: int | RaggedRows = r
        self.page_size, self.dim, self.kv_len = page_size, dim, kv_len

    def run(
        self, tile: Tile, split: bool, pdl: bool, workspace: AttentionWorkspace, layers: int
    ) -> None:
        Tile.of = classmethod(lambda cls, dtype: tile)  # type: ignore[method-assign, assignment]
        for layer in range(layers):
            paged_attention.paged_attention(
                self.q, self.kv[layer, 0], self.kv[layer, 1], self.table, self.kv_lens, self.out, workspace,
                rows=self.rows, page_size=self.page_size, scale=self.dim**-0.5, causal=True, split=split,
                pdl=pdl,
            )  # fmt: skip


def modes(s: int, heads: tuple[int, int, int]) -> dict[str, tuple[bool, bool]]:
    """Name, `split` and `pdl` of the launches worth a try."""
    found = {"walk": (False, False), "walk+pdl": (False, True)} if s >= 8 else {}
    if s * heads[1] <= 128:
        found |= {"split": (True, False), "split+pdl": (True, True)}
    return found


def compile_variant(name: str) -> None:
    """Into the cache on disk; run in a process of its own, many at once."""
    for heads in (QWEN3_8B, SMOLLM2):
        for s in (1, 8):
            setting = Setting(heads, s, 16 if heads == QWEN3_8B else 8, 200, 16)
            workspace = AttentionWorkspace.allocate(4096, heads[2], BF16, "cuda")
            for mode in modes(s, heads).values():
                setting.run(VARIANTS[name], *mode, workspace, 1)
    torch.cuda.synchronize()


def time_attention(results: list[dict[str, Any]]) -> None:
    torch.manual_seed(20261207)
    paged_attention.SPLIT_PAIRS_MAX = 128
    for heads, block in ((QWEN3_8B, 16), (SMOLLM2, 8)):
        workspace = AttentionWorkspace.allocate(4096, heads[2], BF16, "cuda")
        for s, r, kv_len in itertools.product((1, 8, 16, 32), (1, block), (512, 2048)):
            setting = Setting(heads, s, r, kv_len, 16)
            floor_us = setting.bytes / READ_BYTES_A_SECOND * 1e6
            us: dict[str, float] = {}
            wrong = []
            for name, tile in VARIANTS.items():
                bits = None
                for mode, how in modes(s, heads).items():
                    setting.out.zero_()
                    setting.run(tile, *how, workspace, 1)
                    bits = setting.out.clone() if bits is None else bits
                    if not torch.equal(setting.out, bits):
                        wrong.append(f"{name}/{mode}")
                    run = partial(setting.run, tile, *how, workspace, setting.layers)
                    us[f"{name}/{mode}"] = median_us(run, setting.layers)
            results.append({
                "kernel": "attention", "heads": heads, "S": s, "R": r, "kv": kv_len, "floor_us": floor_us,
                "us": us, "bits_differ": wrong,
            })  # fmt: skip
            best = sorted(us, key=us.__getitem__)[:4]
            print(
                f"{heads} S{s} R{r} kv{kv_len}: floor {floor_us:.2f} us, {floor_us / us[best[0]]:.0%} | "
                + "  ".join(f"{name} {us[name]:.2f}" for name in best)
                + (f" BITS DIFFER {wrong}" if wrong else ""),
                flush=True,
            )


def time_extend(results: list[dict[str, Any]]) -> None:
    tile = Tile.of(BF16)
    for rows, kv_len in ((2048, 2048), (256, 4096)):
        setting = Setting(QWEN3_8B, 1, rows, kv_len, 16)
        workspace = AttentionWorkspace.allocate(4096, 128, BF16, "cuda")
        us = median_us(partial(setting.run, tile, False, False, workspace, 3), 3, 5)
        q = setting.q.view(1, rows, 32, 128).transpose(1, 2)
        k = torch.randn(1, 8, kv_len, 128, dtype=BF16, device="cuda")
        mask = torch.ones(rows, kv_len, dtype=torch.bool, device="cuda").tril(kv_len - rows)
        peer = partial(
            torch.nn.functional.scaled_dot_product_attention, q, k, k,
            attn_mask=None if rows == kv_len else mask, is_causal=rows == kv_len, enable_gqa=True,
        )  # fmt: skip
        peer_us = median_us(peer, 1, 5)
        rate = 4 * 32 * 128 * rows * (kv_len - rows / 2) / us * 1e-6
        print(f"extend {rows} rows of {kv_len}: {us:.0f} us ({rate:.0f} TFLOP/s), torch {peer_us:.0f} us")
        results.append({"kernel": "extend", "rows": rows, "kv": kv_len, "us": us, "torch_us": peer_us})


# Launch of one input, the width of that input, and bytes moved for each of its bytes.
Job = tuple[Callable[[torch.Tensor], None], int, float]


def small_jobs(n: int) -> dict[str, Job]:
    at = torch.arange(n, device="cuda")
    table, weight, weights = new(n, 128).float(), new(128), new(5, 128)
    kv, finite = new(5, 2, n + 16, 8, 128), torch.empty(n, 5, dtype=torch.uint8, device="cuda")
    q, x, h, w, taps, inner = (
        new(n, 32, 128), new(n, 4096), new(n, 4096), new(4096), new(n, 5 * 4096), new(n, 12288)
    )  # fmt: skip
    rest = (at, at, table, table)
    add_norm = partial(norm.add_rms_norm, x, weight=w, out=h, eps=1e-6)
    store_qkv, store_context = kv_store.store_qkv, kv_store.store_context
    return {
        "store_qkv": (
            lambda y: store_qkv(y, *rest, weight, weight, q, kv[0, 0], kv[0, 1], eps=1e-6), 6144, 2
        ),
        "store_context": (lambda y: store_context(y, *rest, weights, kv, finite, eps=1e-6), 10240, 2),
        "add_rms_norm": (lambda y: add_norm(added=y), 4096, 4),
        "add_rms_norm+tap": (lambda y: add_norm(added=y, captured=taps[:, 4096:8192]), 4096, 5),
        "add_rms_norm+pdl": (lambda y: add_norm(added=y, pdl=True), 4096, 4),
        "swiglu": (lambda y: swiglu.swiglu(y, inner), 24576, 1.5),
    }  # fmt: skip


def time_small(results: list[dict[str, Any]]) -> None:
    def launch(job: Callable[[torch.Tensor], None], inputs: list[torch.Tensor]) -> None:
        for given in inputs:
            job(given)

    copies = 40  # launches of a graph, each with an input of its own
    for n in (1, 16, 128, 512):
        line = []
        for name, (job, width, passes) in small_jobs(n).items():
            inputs = [new(n, width) for _ in range(copies)]
            us = median_us(partial(launch, job, inputs), copies)
            floor_us = n * width * 2 * passes / COPY_BYTES_A_SECOND * 1e6
            results.append({"kernel": name, "rows": n, "us": us, "floor_us": floor_us})
            line.append(f"{name} {us:.2f} ({floor_us:.2f})")
        print(f"rows {n}, us (floor): " + "  ".join(line), flush=True)


def main() -> None:
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        pool.map(compile_variant, list(VARIANTS), chunksize=1)
    results: list[dict[str, Any]] = []
    for part in (time_small, time_extend, time_attention):
        try:
            part(results)
        finally:
            with open(sys.argv[1], "w") as file:
                json.dump(results, file)


if __name__ == "__main__":
    main()
