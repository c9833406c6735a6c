"""Numbers between host and device, in pinned memory, so that neither side waits for the other's copy.

Knows words and launches' numbers; nothing of what the words mean.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Words = NDArray[np.int32]


class PinnedRing:
    """An int32 buffer on the device, and buffers of the host's, used in turn: one a launch in flight."""

    def __init__(self, num_words: int, num_hosts: int, device: torch.device) -> None:
        """num_hosts: launches that may be in flight. On a CPU nothing is pinned."""
        self.device = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._hosts = [
            torch.zeros(num_words, dtype=torch.int32, pin_memory=device.type == "cuda")
            for _ in range(num_hosts)
        ]
        self._words = [host.numpy() for host in self._hosts]

    def words(self, number: int) -> Words:
        """The host's buffer for a launch; its last user's results must have been read."""
        return self._words[number % len(self._words)]

    def upload(self, number: int, num_words: int) -> None:
        """Enqueue the copy of the first words to the device."""
        self.device[:num_words].copy_(self._host(number)[:num_words], non_blocking=True)

    def download(self, number: int, num_words: int) -> None:
        """Enqueue the copy of the first words to the host."""
        self._host(number)[:num_words].copy_(self.device[:num_words], non_blocking=True)

    def _host(self, number: int) -> torch.Tensor:
        return self._hosts[number % len(self._hosts)]
