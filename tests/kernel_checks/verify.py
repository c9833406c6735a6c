"""What the kernels around a verify must do, on whichever device they are run."""

from __future__ import annotations

import random

import torch

from common.kernels.verify import accept_drafts, assemble_block
from tests.reference.kernels import verify as reference

VOCAB = 50


def check_assembles_rows_and_clamps_ids(device: str, seed: int, *, pdl: bool = False) -> None:
    rng = random.Random(seed)
    for num_sequences, num_drafts in ((1, 1), (3, 7), (5, 15), (2, 4)):
        anchors = [rng.randrange(VOCAB) for _ in range(num_sequences)]
        odd = (-1, -(2**31), VOCAB, 2**31 - 1, 0, VOCAB - 1)
        drafts = [
            [rng.choice((rng.randrange(VOCAB), rng.choice(odd))) for _ in range(num_drafts)]
            for _ in range(num_sequences)
        ]
        positions = [rng.randrange(1000) for _ in range(num_sequences)]
        ids = torch.full((num_sequences, num_drafts + 1), -7, device=device)
        row_positions = torch.full_like(ids, -7)
        num_clamped = torch.full((num_sequences,), -7, dtype=torch.int32, device=device)
        # The ring is wider than the block that is read.
        ring = torch.full((num_sequences, num_drafts + 2), -9, dtype=torch.int32, device=device)
        ring[:, :num_drafts] = torch.tensor(drafts, dtype=torch.int32)
        assemble_block(
            torch.tensor(anchors, device=device), ring[:, :num_drafts],
            torch.tensor(positions, device=device), ids, row_positions, num_clamped, VOCAB, pdl=pdl,
        )  # fmt: skip
        for s in range(num_sequences):
            wanted = reference.assemble(anchors[s], drafts[s], positions[s], VOCAB)
            assert (ids[s].tolist(), row_positions[s].tolist(), int(num_clamped[s])) == wanted


def check_accepts_up_to_the_first_difference(device: str, seed: int, *, pdl: bool = False) -> None:
    rng = random.Random(seed)
    for num_rows in (1, 2, 5, 8, 16):
        num_sequences = 40
        chosen = [[rng.randrange(VOCAB) for _ in range(num_rows)] for _ in range(num_sequences)]
        ids = [[rng.randrange(VOCAB), *row[:-1]] for row in chosen]
        for row in ids:
            for place in range(1, num_rows):
                if rng.random() < 0.15:
                    row[place] = (row[place] + 1) % VOCAB
        draft_lens = [rng.choice((-1, num_rows - 1, rng.randrange(num_rows))) for _ in range(num_sequences)]
        positions = torch.tensor([rng.randrange(1000) for _ in range(num_sequences)], device=device)
        anchors = torch.tensor([row[0] for row in ids], device=device)
        before = positions.tolist()
        num_accepted = torch.full((num_sequences,), -7, dtype=torch.int32, device=device)
        accept_drafts(
            torch.tensor(chosen, device=device), torch.tensor(ids, device=device),
            torch.tensor(draft_lens, dtype=torch.int32, device=device), positions,
            num_accepted, anchors, positions, pdl=pdl,
        )  # fmt: skip
        for s in range(num_sequences):
            got = (int(num_accepted[s]), int(anchors[s]), int(positions[s]))
            if draft_lens[s] < 0:
                assert got == (0, ids[s][0], before[s])
            else:
                accepted, bonus = reference.accept(chosen[s], ids[s], draft_lens[s])
                assert got == (accepted, bonus, before[s] + accepted + 1)
