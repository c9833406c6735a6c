"""A real core on its own thread over a made-up model, whose engine a test can hold back or break."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from common.paged_kv import PagePool
from services.target.core.core import Core
from services.target.core.draft_source import NoDrafts
from services.target.core.engine import Engine
from services.target.core.request import Event, Request, SamplingParams, TokensCommitted
from services.target.core.scheduler import Scheduler
from services.target.core.step import StepLoop
from tests.core_rig import CountingModel, RecordedObserver

WAIT_S = 20.0


class Caller:
    """Keeps what a request emits; may be waited for."""

    def __init__(self, name: str, max_new_tokens: int = 5) -> None:
        self.tokens: list[int] = []
        self.terminals: list[Event] = []
        self.ended = threading.Event()
        self.begun = threading.Event()
        self.request = Request(
            name, [3, 4], SamplingParams(), max_new_tokens, frozenset(), True, self.receive
        )

    def receive(self, event: Event) -> None:
        self.begun.set()
        if isinstance(event, TokensCommitted):
            assert not self.terminals, "a token after the end"
            self.tokens += event.token_ids
        else:
            self.terminals.append(event)
            self.ended.set()

    def wait(self) -> Event:
        assert self.ended.wait(WAIT_S), f"{self.request.request_id} never ended"
        return self.terminals[0]


class Gate:
    """An engine that computes only while it is open, and raises when told to."""

    def __init__(self, engine: Engine) -> None:
        self.open = threading.Event()
        self.open.set()
        self.fault: Exception | None = None
        self._engine = engine

    def run(self, *args: Any) -> Any:
        assert self.open.wait(WAIT_S)
        if self.fault is not None:
            raise self.fault
        return self._engine.run(*args)

    def zero_pages(self, pages: list[int]) -> None:
        self._engine.zero_pages(pages)


class Source(NoDrafts):
    """A source that remembers that it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


class Bench:
    """A core over a made-up model."""

    def __init__(self, num_known_max: int = 64) -> None:
        pool = PagePool(400, 4)
        self.scheduler = Scheduler(pool, num_running_max=8, extend_rows_max=64)
        self.gate = Gate(Engine(CountingModel(), pool))
        self.observer, self.source = RecordedObserver(), Source()
        self.loop = StepLoop(self.scheduler, self.gate, self.source, self.observer)  # type: ignore[arg-type]
        self.num_failures = 0
        self.failed = threading.Event()
        self.core = Core(
            self.scheduler, self.loop, self.source,
            num_known_max=num_known_max, on_failure=self._on_failure, prepare=lambda: None,
        )  # fmt: skip

    def _on_failure(self) -> None:
        self.num_failures += 1
        self.failed.set()

    def submit(self, name: str, max_new_tokens: int = 5) -> Caller:
        caller = Caller(name, max_new_tokens)
        self.core.submit(caller.request)
        return caller


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
