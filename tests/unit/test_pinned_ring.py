"""Words between host and device, on a CPU: tests/gpu runs the engines that use them."""

from __future__ import annotations

import torch

from common.pinned_ring import PinnedRing


def test_a_launch_has_the_hosts_buffer_of_the_launch_as_many_before_as_may_be_in_flight() -> None:
    ring = PinnedRing(4, 3, torch.device("cpu"))
    for number in range(3):
        ring.words(number)[:] = number
    assert [ring.words(number)[0] for number in range(6)] == [0, 1, 2, 0, 1, 2]


def test_only_the_first_words_travel_and_only_those_of_the_launch() -> None:
    ring = PinnedRing(4, 2, torch.device("cpu"))
    ring.words(0)[:], ring.words(1)[:] = 7, 8
    ring.upload(1, 3)
    assert ring.device.tolist() == [8, 8, 8, 0]
    ring.device.fill_(9)
    ring.download(2, 2)
    assert ring.words(2).tolist() == [9, 9, 7, 7] and ring.words(1).tolist() == [8] * 4
