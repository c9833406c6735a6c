"""A chain of all kernels between matrix products, each reading what the one before wrote."""

from __future__ import annotations

import torch

from common.kernels.kv_store import store_context, store_qkv
from common.kernels.norm import add_rms_norm
from common.kernels.paged_attention import AttentionWorkspace, paged_attention
from common.kernels.swiglu import swiglu
from tests.kernel_checks.kv_store import rope_table

HEADS, KV_HEADS, DIM = 32, 8, 128
SEQUENCES, ROWS, LAYERS, KEYS = 2, 16, 20, 290


def run(device: str, dtype: torch.dtype, seed: int, *, pdl: bool) -> list[torch.Tensor]:
    """What the chain leaves behind: residual stream, projection, caches, flags."""
    rng = torch.Generator().manual_seed(seed)

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).to(device, dtype)

    num_rows, pages = SEQUENCES * ROWS, -(-KEYS // 16)
    table = (torch.randperm(SEQUENCES * pages, generator=rng) + 1).view(SEQUENCES, pages).int()
    positions = torch.arange(KEYS - ROWS, KEYS).repeat(SEQUENCES)
    slots = table[:, (KEYS - ROWS + torch.arange(ROWS)) // 16].long() * 16
    slots = (slots + (KEYS - ROWS + torch.arange(ROWS)) % 16).flatten()
    table, positions, slots = table.to(device), positions.to(device), slots.to(device)
    kv_lens = torch.full((SEQUENCES,), KEYS, dtype=torch.int32, device=device)
    cos, sin = rope_table(DIM, device)
    kv = new(LAYERS, 2, (SEQUENCES * pages + 1) * 16, KV_HEADS, DIM)
    qkv, weight, weights = new(num_rows, (HEADS + 2 * KV_HEADS) * DIM), new(DIM), new(LAYERS, DIM)
    x, wide = new(num_rows, HEADS * DIM // 2), new(HEADS * DIM // 2)
    context = torch.empty(num_rows, LAYERS * 2 * KV_HEADS * DIM, dtype=dtype, device=device)
    q, mixed = new(num_rows, HEADS, DIM), new(num_rows, HEADS, DIM)
    opened = torch.empty_like(x)
    finite = torch.zeros(num_rows, LAYERS, dtype=torch.uint8, device=device)
    workspace = AttentionWorkspace.allocate(KEYS, DIM, dtype, device)

    def chain() -> None:
        for layer in range(LAYERS):
            k, v = kv[layer]
            store_qkv(qkv, positions, slots, cos, sin, weight, weight, q, k, v, eps=1e-6, pdl=pdl)
            paged_attention(
                q, k, v, table, kv_lens, mixed, workspace, rows=ROWS, page_size=16, scale=DIM**-0.5,
                causal=True, pdl=pdl,
            )  # fmt: skip
            swiglu(mixed.view(num_rows, -1), opened, pdl=pdl)
            part = context[:, layer * HEADS * DIM // 2 : (layer + 1) * HEADS * DIM // 2]
            add_rms_norm(x, opened, wide, qkv[:, : HEADS * DIM // 2], eps=1e-6, captured=part, pdl=pdl)
        store_context(context, positions, slots, cos, sin, weights, kv, finite, eps=1e-6, pdl=pdl)

    before = [tensor.clone() for tensor in (x, qkv, kv)]
    chain()  # compiles
    for tensor, old in zip((x, qkv, kv), before, strict=True):
        tensor.copy_(old)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    graph.replay()
    torch.cuda.synchronize()
    return [x, qkv, kv, context, finite]
