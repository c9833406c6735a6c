"""The kernel that measures how fast memory is read does read all of it."""

from __future__ import annotations

import random

import torch


def test_the_read_kernel_sums_every_element_of_each_chunk() -> None:
    # Here, while kernels are interpreted.
    from tools.gpu_bench.read_speed import chunk_sums

    seed = random.randrange(2**32)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(-1000, 1000, (3 * 8 * 64,), dtype=torch.int32, generator=generator)
    assert torch.equal(chunk_sums(source, 64, 1), source.view(3, -1).sum(dim=1, dtype=torch.int32))
