"""A round of the bench: some requests at once, and the decode rate while all of them decode.

Knows deltas and clocks; must not know which implementation produced them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier
from typing import TypeVar

from tools.target_client import ReceivedDelta

Result = TypeVar("Result")


@dataclass(frozen=True)
class Window:
    """The time in which every request of a round was decoding: from the last one's first message to the
    first one's last. What begins or ends alone would flatter one side or the other.

        request a   F────d──d──d──d──d──L
        request b       F──d──d──d──d──d──d──L
        window          [───────────────]
    """

    start_s: float
    stop_s: float
    num_tokens: int

    @property
    def tok_s(self) -> float:
        """Tokens a second, all requests together; 0 when the requests hardly met."""
        return self.num_tokens / (self.stop_s - self.start_s) if self.stop_s > self.start_s else 0.0


def common_window(rounds: Sequence[Sequence[ReceivedDelta]]) -> Window:
    """The window of a round's requests. Half-open at the start: a message pays for the time before it."""
    start_s = max(deltas[0].at_s for deltas in rounds)
    stop_s = min(deltas[-1].at_s for deltas in rounds)
    inside = (delta for deltas in rounds for delta in deltas if start_s < delta.at_s <= stop_s)
    return Window(start_s, stop_s, sum(len(delta.token_ids) for delta in inside))


def at_once(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Run the calls at the same time, each in a thread; returns their results in order."""
    gate = Barrier(len(calls))

    def run(call: Callable[[], Result]) -> Result:
        gate.wait()
        return call()

    with ThreadPoolExecutor(max_workers=len(calls)) as pool:
        return list(pool.map(run, calls))
