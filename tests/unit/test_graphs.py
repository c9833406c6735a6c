"""Sizes that are captured, and bodies by key where there is nothing to capture. See tests/gpu for graphs."""

from __future__ import annotations

import pytest
import torch

from common.graphs import Graphs, bucket_for, buckets_up_to


@pytest.mark.parametrize("maximum", [1, 2, 3, 5, 8, 9, 100, 256, 2048])
def test_buckets_rise_to_the_maximum_and_leave_less_than_half_padding(maximum: int) -> None:
    buckets = buckets_up_to(maximum)
    assert buckets[-1] == maximum and buckets == sorted(set(buckets))
    for n in range(1, maximum + 1):
        bucket = bucket_for(buckets, n)
        assert n <= bucket < 2 * n
        assert 3 * n > 2 * bucket or bucket <= 8


def test_the_published_sizes_are_those_of_the_design() -> None:
    assert buckets_up_to(256) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    with pytest.raises(AssertionError):
        bucket_for([1, 2, 4], 5)


def test_on_a_cpu_a_body_runs_at_each_replay_and_not_before() -> None:
    graphs = Graphs(torch.device("cpu"), None)
    ran: list[str] = []
    heard: list[tuple[int, int]] = []
    graphs.capture_all(
        [("big", lambda: ran.append("big")), ("small", lambda: ran.append("small"))],
        lambda done, total: heard.append((done, total)),
    )
    assert heard == [(1, 2), (2, 2)] and ran == []
    assert "big" in graphs and "other" not in graphs
    graphs.replay("small")
    graphs.replay("big")
    graphs.replay("small")
    assert ran == ["small", "big", "small"]
    with pytest.raises(AssertionError):
        graphs.capture("big", lambda: None)
