"""What the core is made of, whichever device it runs on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from common.contract import Mismatch, TargetContract
from services.target.core.core import Closable
from services.target.core.drafter_status import LinkState
from services.target.core.request_loop import RequestLoop
from services.target.core.roster import Roster
from services.target.model.llama import LlamaConfig


class LoadedModel(Protocol):
    """Weights, whatever is made of them."""

    @property
    def config(self) -> LlamaConfig: ...

    @property
    def contract(self) -> TargetContract: ...


class RemoteParty(Protocol):
    """The drafter as callers are told of it; from any thread."""

    @property
    def state(self) -> LinkState: ...

    @property
    def mismatches(self) -> Sequence[Mismatch]: ...

    @property
    def num_sessions(self) -> int: ...

    @property
    def block_size(self) -> int | None: ...


@dataclass(frozen=True)
class CoreParts:
    """remote is None without a drafter. prepare is called on the core's thread before its first step."""

    roster: Roster
    loop: RequestLoop
    drafter: Closable
    remote: RemoteParty | None
    prepare: Callable[[], None]
