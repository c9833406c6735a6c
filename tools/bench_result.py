"""What a bench run found: rows of medians over rounds, and the JSON that keeps them.

Must not know how anything was measured, nor how it is shown.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Row:
    """A mode at a concurrency: what its rounds gave. Values of a round are appended in order."""

    mode: str
    concurrency: int
    tok_s: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    phases_ms: list[dict[str, float]] = field(default_factory=list)
    accept_length: list[float] = field(default_factory=list)
    token_ids: dict[int, list[list[int]]] = field(default_factory=dict)
    """Output tokens by the number of the prompt, of each time it was asked."""
    more: dict[str, list[float]] = field(default_factory=dict)
    """Further figures, by the key that they have in the JSON."""

    @property
    def measured(self) -> bool:
        """Whether a round was finished; an interrupted run has rows without one."""
        return bool(self.tok_s)

    @property
    def median_tok_s(self) -> float:
        return statistics.median(self.tok_s)

    def median_phases_ms(self) -> dict[str, float]:
        """Median of each phase over the rounds in which it occurred."""
        phases = {phase for of_round in self.phases_ms for phase in of_round}
        return {
            phase: statistics.median(r[phase] for r in self.phases_ms if phase in r)
            for phase in sorted(phases)
        }

    def as_json(self, floor_ms: float | None) -> dict[str, Any]:
        """floor_ms: what a step would take if it only read the weights; None when unknown."""
        step_ms = statistics.median(self.step_ms)
        row = {
            "mode": self.mode,
            "concurrency": self.concurrency,
            "tok_s": self.median_tok_s,
            "step_ms": step_ms,
            "phases_ms": self.median_phases_ms(),
            "floor_fraction": floor_ms / step_ms if floor_ms is not None else None,
        }
        if self.accept_length:
            row["accept_length"] = statistics.median(self.accept_length)
        return row | {key: statistics.median(values) for key, values in self.more.items()}


def run_rounds(
    rows: Sequence[Row], num_rounds: int, run: Callable[[Row, int], None], on_round: Callable[[Row], None]
) -> None:
    """All rows in each round, the next round in the opposite order: a machine that warms up or slows
    down in the meantime then treats all modes alike."""
    for turn in range(num_rounds):
        for row in rows if turn % 2 == 0 else reversed(rows):
            on_round(row)
            run(row, turn)


def same_tokens(rows: Sequence[Row]) -> bool:
    """Whether each prompt got the same tokens every time, in all of these rows."""
    seen: dict[int, set[tuple[int, ...]]] = {}
    for row in rows:
        for number, outputs in row.token_ids.items():
            seen.setdefault(number, set()).update(map(tuple, outputs))
    return all(len(outputs) == 1 for outputs in seen.values())


def as_json(
    rows: Sequence[Row],
    *,
    device: str,
    model_name: str,
    block_size: int,
    accept_kind: str,
    floors_ms: dict[str, float],
) -> dict[str, Any]:
    """The results as `--json` writes them; rows of which no round was finished are left out.

    floors_ms: by mode. accept_kind: `real` or `synthetic`.
    """
    measured = [row for row in rows if row.measured]
    lengths = [length for row in measured for length in row.accept_length]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": device,
        "model": model_name,
        "block_size": block_size,
        "accept": {"kind": accept_kind, "length": statistics.fmean(lengths) if lengths else None},
        "rows": [row.as_json(floors_ms.get(row.mode)) for row in measured],
    }


def write_json(path: Path, result: dict[str, Any]) -> None:
    """The file that is kept under docs/perf."""
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _commit() -> str | None:
    """The checkout's commit; in a copy without history, what TANDEM_COMMIT says."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("TANDEM_COMMIT")
