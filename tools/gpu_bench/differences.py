"""Where two runs of the same prompts gave different tokens. Knows token ids and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Difference(NamedTuple):
    """A prompt whose output differs from the reference from `position` of the output on."""

    prompt: int
    position: int


def differences(reference: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> list[Difference]:
    """The first difference of each prompt that has one; a shorter output differs where it ends."""
    found = []
    for number, (a, b) in enumerate(zip(reference, other, strict=True)):
        if list(a) != list(b):
            same = next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
            found.append(Difference(number, min(len(a), len(b)) if same is None else same))
    return found
