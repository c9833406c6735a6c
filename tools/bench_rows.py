"""What the bench measures in each mode of the services, and of a peer: a round in, its figures into a row.

Knows services through their client and metrics page; must not know flags, tables or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from tools.bench_result import Row
from tools.closed_loop import at_once, common_window
from tools.local_stack import LocalStack
from tools.peer_transformers import TransformersPeer
from tools.scrape import mean_ms, scrape
from tools.side_by_side import accept_length
from tools.target_client import Answer, GenerateOptions, ReceivedDelta, TargetClient

PLAIN, INLINE, TRANSFORMERS = "plain", "inline", "transformers"
TARGET_STEP = "tandem_target_step_time_seconds"
DRAFTER_STEP = "tandem_drafter_draft_time_seconds"


@dataclass(frozen=True)
class Load:
    """The work of each round: the same prompts, numbered, and the same number of tokens in every mode."""

    prompts: Sequence[list[int]]
    options: GenerateOptions

    def of_round(self, turn: int, concurrency: int) -> list[int]:
        """Numbers of the prompts that a round asks."""
        return [(turn + i) % len(self.prompts) for i in range(concurrency)]


def service_round(row: Row, turn: int, load: Load, client: TargetClient, stack: LocalStack) -> None:
    """A round against the services, with drafts if the row's mode says so."""
    options = replace(load.options, drafting=row.mode == INLINE)
    numbers = load.of_round(turn, row.concurrency)
    before, drafter_before = scrape(stack.target_metrics_url), scrape(stack.drafter_metrics_url)
    answers = at_once([partial(client.generate, load.prompts[n], options) for n in numbers])
    after, drafter_after = scrape(stack.target_metrics_url), scrape(stack.drafter_metrics_url)
    phases = mean_ms(before, after, TARGET_STEP, "phase")
    if row.mode == INLINE:
        drafter = mean_ms(drafter_before, drafter_after, DRAFTER_STEP, "phase")
        phases |= {f"drafter_{phase}": ms for phase, ms in drafter.items()}
        row.accept_length.append(accept_length([answer.finished for answer in answers]))
    row.phases_ms.append(phases)
    _add(row, numbers, [answer.deltas for answer in answers])
    row.step_ms.append(_step_ms(answers))


def peer_round(row: Row, turn: int, load: Load, peer: TransformersPeer) -> None:
    """A round of the peer; one request at a time is all it does."""
    (number,) = load.of_round(turn, 1)
    assert load.options.max_new_tokens is not None
    deltas = peer.generate(load.prompts[number], load.options.max_new_tokens)
    _add(row, [number], [deltas])
    row.step_ms.append(1000 * (deltas[-1].at_s - deltas[0].at_s) / (len(deltas) - 1))
    row.phases_ms.append({})


def _add(row: Row, numbers: Sequence[int], deltas: Sequence[list[ReceivedDelta]]) -> None:
    row.tok_s.append(common_window(deltas).tok_s)
    for number, of_request in zip(numbers, deltas, strict=True):
        tokens = [token for delta in of_request for token in delta.token_ids]
        row.token_ids.setdefault(number, []).append(tokens)


def _step_ms(answers: Sequence[Answer]) -> float:
    """Mean time between a request's steps, on the target's clock. Its first step is prefill's end."""
    finished = [answer.finished for answer in answers]
    return 1000 * sum(f.decode_s for f in finished) / max(sum(f.num_decode_steps - 1 for f in finished), 1)
