"""Written conversations on disk and in memory: shards of equal width, and batches drawn from them.

A shard is one safetensors file; it is whole or absent, so an interrupted synthesis goes on with the next
missing one. Knows ids, roles and lengths; nothing of how they were written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tools.train.generate import ANSWER

# Rows with fewer learnable tokens cost a forward and teach next to nothing.
ANSWER_TOKENS_MIN = 32
# Batches are padded to a multiple of this: few shapes to compile, little padding.
LENGTH_STEP = 384


@dataclass(frozen=True)
class Corpus:
    """tokens `[N, L]` int32, roles `[N, L]` int8, lengths `[N]` int64 (the rest of a row is padding),
    temperature `[N]` at which the answers were sampled."""

    tokens: torch.Tensor
    roles: torch.Tensor
    lengths: torch.Tensor
    temperature: torch.Tensor

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that can be learned."""
        inside = torch.arange(self.tokens.shape[1], device=self.lengths.device) < self.lengths.unsqueeze(1)
        return int(((self.roles == ANSWER) & inside).sum())

    def take(self, rows: torch.Tensor, length: int | None = None) -> Corpus:
        """Some rows, cut to a common length."""
        picked = (self.tokens[rows, :length], self.roles[rows, :length], self.lengths[rows])
        return Corpus(*picked, self.temperature[rows])

    def worth_learning(self) -> Corpus:
        """Only rows with enough answer tokens."""
        inside = torch.arange(self.tokens.shape[1], device=self.lengths.device) < self.lengths.unsqueeze(1)
        enough = ((self.roles == ANSWER) & inside).sum(dim=1) >= ANSWER_TOKENS_MIN
        return self.take(enough.nonzero().squeeze(1))

    def to(self, device: torch.device) -> Corpus:
        """The same on a device: 5 bytes a token, so tens of millions fit beside the model."""
        return Corpus(*(tensor.to(device) for tensor in vars(self).values()))

    def epoch(self, seed: int, epoch: int, batch_rows: int) -> list[tuple[torch.Tensor, int]]:
        """Rows and padded length of each batch of an epoch, the same for the same arguments.

        Shuffled, sorted by length within stretches of 64 batches, and the batches shuffled again; a last
        smaller batch is left out.
        """
        rng = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self), generator=rng)
        lengths = self.lengths.cpu()
        batches = []
        for stretch in order.split(64 * batch_rows):
            by_length = stretch[lengths[stretch].argsort(stable=True)]
            for rows in by_length.split(batch_rows):
                if len(rows) == batch_rows:
                    padded = -(-int(lengths[rows].max()) // LENGTH_STEP) * LENGTH_STEP
                    batches.append((rows, min(padded, self.tokens.shape[1])))
        return [batches[i] for i in torch.randperm(len(batches), generator=rng)]


def save_shard(corpus: Corpus, path: Path) -> None:
    """Write a shard whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({name: tensor.contiguous().cpu() for name, tensor in vars(corpus).items()}, part)
    os.replace(part, path)


def load_shards(paths: list[Path]) -> Corpus:
    """All rows of some shards, which must have one width."""
    shards = [load_file(path) for path in paths]
    return Corpus(**{name: torch.cat([shard[name] for shard in shards]) for name in shards[0]})
