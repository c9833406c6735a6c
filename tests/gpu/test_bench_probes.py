"""What the bench knows of the device: how fast it reads, and when the host waited for it unseen."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
if torch.cuda.is_available():
    from tools.gpu_bench.read_speed import read_bandwidth_to_host
    from tools.gpu_bench.sync_watch import SyncWatch

CUDA = torch.device("cuda")


def test_a_pure_read_is_not_faster_than_memory_can_be() -> None:
    # From a small card to several times an H200.
    assert 1e11 < read_bandwidth_to_host(CUDA) < 2e13


def test_only_an_operation_that_waits_is_found() -> None:
    watch, x = SyncWatch(), torch.ones(3, device=CUDA)
    with watch.watching():
        y = x + 1
        torch.cuda.synchronize()
    assert watch.found == []
    with watch.watching():
        y.sum().item()
    assert len(watch.found) == 1 and "test_bench_probes" in watch.found[0]
    with watch.watching():
        y.add_(1)
    assert len(watch.found) == 1
