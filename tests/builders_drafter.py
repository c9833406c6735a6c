"""A drafter without its service, around a tiny random draft: what the drafter's tests share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from common.contract import TargetContract
from common.embedding import load_shared_weights
from common.handoff.transport import Extend
from common.paged_kv import PagePool
from services.drafter.engine import DraftEngine
from services.drafter.model.dflash import DFlash
from services.drafter.session import CloseReason
from services.drafter.session_table import SessionTable
from services.drafter.step import StepRunner
from tests.builders import build_tiny_draft_dir, build_tiny_llama_dir


@dataclass
class ManualClock:
    """Time that passes when a test says so."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class RecordedSessions:
    """A SessionObserver that remembers."""

    num_opened: int = 0
    closed: list[CloseReason] = field(default_factory=list)

    def observe_opened(self) -> None:
        self.num_opened += 1

    def observe_closed(self, reason: CloseReason) -> None:
        self.closed.append(reason)


def build_table(num_pages: int = 16, page_size: int = 4, **changes: Any) -> SessionTable:
    """A session table over its own pool; changes overwrite its settings."""
    settings: dict[str, Any] = {
        "num_sessions_max": 8,
        "context_len_max": 40,
        "block_size": 4,
        "lease_s": 30.0,
        "clock": ManualClock(),
        "observer": RecordedSessions(),
    }
    return SessionTable(PagePool(num_pages, page_size), **(settings | changes))


def build_draft_pair(directory: Path, seed: int, **draft: Any) -> tuple[Path, Path]:
    """Directories of a tiny target and of a draft that fits it."""
    target_dir = build_tiny_llama_dir(directory / "target", seed)
    return target_dir, build_tiny_draft_dir(directory / "draft", target_dir, seed + 1, **draft)


@dataclass
class Drafter:
    """A step runner and what it is made of."""

    model: DFlash
    engine: DraftEngine
    table: SessionTable
    runner: StepRunner
    target: TargetContract

    @property
    def captured_width(self) -> int:
        return len(self.model.contract.captured_layer_ids) * self.target.hidden_size

    @property
    def vocab_rows(self) -> int:
        return self.target.vocab_rows


def load_drafter(
    target_dir: Path,
    draft_dir: Path,
    *,
    num_pages: int = 64,
    page_size: int = 8,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Drafter:
    """Load a draft as the service does; changes overwrite the session table's settings."""
    shared, contract = load_shared_weights(target_dir, dtype)
    model = DFlash.load(draft_dir, shared, contract)
    pool = PagePool(num_pages, page_size)
    engine = DraftEngine(model, pool)
    settings: dict[str, Any] = {
        "num_sessions_max": 16,
        "context_len_max": model.contract.context_len_max,
        "block_size": model.contract.block_size,
        "lease_s": 30.0,
        "clock": ManualClock(),
        "observer": RecordedSessions(),
    }
    table = SessionTable(pool, **(settings | changes))
    runner = StepRunner(table, engine, contract.vocab_rows)
    return Drafter(model, engine, table, runner, contract)


def rows_in_order(*extends: tuple[int, int, int, int]) -> list[Extend]:
    """Extends (session, epoch, position, number of rows) whose rows lie in this order, as on the wire."""
    laid_out, row = [], 0
    for session_id, epoch, position, num_rows in extends:
        laid_out.append(Extend(session_id, epoch, position, row, row + num_rows))
        row += num_rows
    return laid_out
