"""Measures prompts with and without drafts on the same service, in turn, and says whether the tokens agree.

Decode speed is tokens after the first message over the time from the first message to the last, on the
client's clock: prefill is not in it, streaming is. Must not know text or how results are shown.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from common.pb.tandem.v1 import target_pb2
from tools.target_client import Answer, GenerateOptions, TargetClient


@dataclass
class Comparison:
    """One prompt's answers, plain and drafted; as many of one as of the other, taken in turn."""

    plain: list[Answer] = field(default_factory=list)
    drafted: list[Answer] = field(default_factory=list)

    @property
    def same_tokens(self) -> bool:
        """Whether all answers, plain and drafted, hold the same tokens for the same reason of ending."""
        endings = {(tuple(a.token_ids), a.finished.reason) for a in (*self.plain, *self.drafted)}
        return len(endings) == 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the plain answer."""
        return len(self.plain[0].token_ids)

    @property
    def plain_tok_s(self) -> float:
        """Decode speed of plain decoding, median of the rounds."""
        return statistics.median(map(decode_tok_s, self.plain))

    @property
    def drafted_tok_s(self) -> float:
        """Decode speed with drafts, median of the rounds."""
        return statistics.median(map(decode_tok_s, self.drafted))


def decode_tok_s(answer: Answer) -> float:
    """Tokens a second after the first message; 0 for an answer with a single message."""
    return answer.num_decoded / answer.decode_s if answer.decode_s > 0 else 0.0


def accept_length(finished: Sequence[target_pb2.Finished]) -> float:
    """Mean tokens committed by a verify, the target's own included; 1 when no draft was verified."""
    num_drafts = sum(f.num_drafts for f in finished)
    return 1 + sum(f.num_accepted_tokens for f in finished) / num_drafts if num_drafts else 1.0


def overall_tok_s(comparisons: Sequence[Comparison]) -> tuple[float, float]:
    """Decode speed over all prompts, plain and drafted: all tokens by the time they take at each prompt's
    median speed. Prompts too short to have a speed are left out; 0 when none is left."""
    timed = [c for c in comparisons if c.plain_tok_s and c.drafted_tok_s]
    if not timed:
        return 0.0, 0.0
    num_tokens = sum(c.num_tokens for c in timed)
    plain_s = sum(c.num_tokens / c.plain_tok_s for c in timed)
    drafted_s = sum(c.num_tokens / c.drafted_tok_s for c in timed)
    return num_tokens / plain_s, num_tokens / drafted_s


def speedup(comparisons: Sequence[Comparison]) -> float:
    """Drafted over plain decode speed, over all prompts; 0 when unknown."""
    plain_tok_s, drafted_tok_s = overall_tok_s(comparisons)
    return drafted_tok_s / plain_tok_s if plain_tok_s else 0.0


def compare(
    client: TargetClient,
    prompt: Sequence[int],
    options: GenerateOptions,
    *,
    num_rounds: int,
    on_answer: Callable[[Answer], None] = lambda _: None,
) -> Comparison:
    """Generate num_rounds times plain and drafted; the order changes from round to round, since a machine
    that warms up or throttles would otherwise favour one of the two."""
    comparison = Comparison()
    for turn in range(num_rounds):
        for drafting in (False, True) if turn % 2 == 0 else (True, False):
            answer = client.generate(prompt, replace(options, drafting=drafting))
            (comparison.drafted if drafting else comparison.plain).append(answer)
            on_answer(answer)
    return comparison
