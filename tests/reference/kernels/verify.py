"""What a verify takes in and gives out, one sequence and one token at a time."""

from __future__ import annotations


def assemble(anchor: int, draft: list[int] | None, num_rows: int, vocab_rows: int) -> tuple[list[int], int]:
    """Ids of the rows, and how many drafts had to be clamped."""
    given = [0] * (num_rows - 1) if draft is None else draft
    clamped = [min(max(token, 0), vocab_rows - 1) for token in given]
    return [anchor, *clamped], sum(a != b for a, b in zip(given, clamped, strict=True))


def accept(chosen: list[int], ids: list[int], draft_len: int) -> tuple[int, int]:
    """num_accepted and the bonus token."""
    num_accepted = 0
    while num_accepted < draft_len and ids[num_accepted + 1] == chosen[num_accepted]:
        num_accepted += 1
    return num_accepted, chosen[num_accepted]
