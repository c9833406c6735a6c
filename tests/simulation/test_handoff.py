"""Histories of target and drafter over a link that fails, with a clock that only the test moves.

SEEDS=200 runs so many histories of each kind; SEED=17 runs that one alone.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict

import pytest

from common import limits
from common.paged_kv import PagePool
from services.target.core.drafter_sessions import SessionState
from services.target.core.remote_drafter import RemoteDrafter
from services.target.core.report import CoreStats, StepReport
from services.target.core.request import (
    Event,
    FinishReason,
    Request,
    RequestFinished,
    SamplingParams,
    TokensCommitted,
)
from services.target.core.scheduler import Scheduler
from services.target.core.step import StepLoop
from tests.simulation.world import (
    DEADLINE_S,
    LEASE_S,
    PAGE_SIZE,
    TARGET,
    Chances,
    Clock,
    Ledger,
    SimulatedLink,
    TargetEngine,
    truth,
)

KINDS = {
    "an honest drafter and a quiet link": Chances(),
    "messages that are repeated": Chances(repeat=0.3),
    "deaths and lost streams": Chances(kill=0.01, lose_stream=0.02),
    "hangs and slowness": Chances(hang=0.01, slow=0.1),
    "a drafter that breaks its word": Chances(spoil_reply=0.05),
    "numbers that are not finite": Chances(spoil_row=0.03),
    "everything at once": Chances(
        kill=0.005, lose_stream=0.005, hang=0.005, mismatch=0.005, slow=0.03, repeat=0.05, spoil_reply=0.01,
        spoil_row=0.005,
    ),
}  # fmt: skip
NUM_REQUESTS = 40
NUM_RUNNING_MAX = 8
# 13 rows a message, so that prompts are split; and room for a block of each running request.
TENSOR_BYTES_MAX = 160


def _seeds() -> list[int]:
    if "SEED" in os.environ:
        return [int(os.environ["SEED"])]
    return list(range(int(os.environ.get("SEEDS", "5"))))


class _Steps:
    """Observes steps; keeps the last report."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def observe_step(self, report: StepReport, stats: CoreStats) -> None:
        self.reports.append(report)

    def observe_first_token(self, request: Request) -> None: ...

    def observe_tokens(self, request: Request, count: int, interval_s: float) -> None: ...

    def observe_finished(self, request: Request, finished: RequestFinished) -> None: ...

    def observe_failed(self, request: Request, reason: str) -> None:
        raise AssertionError(reason)


class History:
    """One seed's run."""

    def __init__(self, seed: int, chances: Chances) -> None:
        self.rng = random.Random(seed)
        self.chances = chances
        self.clock, self.ledger = Clock(), Ledger()
        # Small enough that sessions and pages run out now and then.
        self.link = SimulatedLink(
            self.clock, self.ledger, self.rng, chances,
            num_pages=self.rng.choice([24, 60, 400]), num_sessions_max=self.rng.choice([3, 64]),
        )  # fmt: skip
        self.drafter = RemoteDrafter(
            self.link, TARGET, "target", DEADLINE_S, self.ledger.observe_resync, self.clock
        )
        pool = PagePool(self.rng.choice([80, 400]), PAGE_SIZE)
        self.scheduler = Scheduler(pool, num_running_max=NUM_RUNNING_MAX, extend_rows_max=24)
        self.steps = _Steps()
        engine = TargetEngine(self.ledger, self.link, self.rng, chances)
        self.loop = StepLoop(self.scheduler, engine, self.drafter, self.steps, self.clock)  # type: ignore[arg-type]
        # From much faster than a probe's interval to slow beside it.
        self.pace_s = self.rng.choice([0.01, 0.1])
        self.requests: dict[int, Request] = {}
        self.events: dict[int, list[Event]] = defaultdict(list)

    def submit(self, num_prompt: int, max_new_tokens: int) -> Request:
        number = len(self.requests) + 1
        request = Request(
            request_id=str(number),
            prompt=[truth(number, p) for p in range(num_prompt)],
            sampling=SamplingParams(),
            max_new_tokens=max_new_tokens,
            stop_token_ids=frozenset(),
            drafting=self.rng.random() < 0.9,
            emit=self.events[number].append,
            clock=self.clock,
        )
        self.requests[number] = request
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        self.link.wait_for_replies()
        self.loop.step()
        self.link.wait(self.rng.uniform(0.0, self.pace_s))
        self.check()

    def check(self) -> None:
        """What holds after each step."""
        require = self.ledger.require
        require(self.scheduler.num_pages_unaccounted == 0, "I3: pages of the target")
        require(self.link.life.table.num_pages_unaccounted == 0, "I3: pages of the drafter")
        sessions = self.drafter._sessions
        # Those that ended since the last post are still among them.
        require(len(sessions._sessions) <= 2 * NUM_RUNNING_MAX, "I4: sessions without a request")
        require(sessions.num_open <= limits.SESSIONS_MAX, "I4: open sessions")
        require(len(sessions._closes) <= limits.DRAFT_ENTRIES_MAX, "I4: closes that wait")
        for number, request in self.requests.items():
            expected = [truth(number, p) for p in range(request.committed_len)]
            require(request.tokens == expected, f"I1: tokens of {number}")
        assert not self.ledger.violations, self.ledger.violations

    def run(self) -> None:
        while len(self.requests) < NUM_REQUESTS or self.loop.has_work:
            if len(self.requests) < NUM_REQUESTS and self.rng.random() < 0.15:
                self.submit(self.rng.randint(1, 60), self.rng.randint(1, 40))
            if self.rng.random() < 0.01:
                self.loop.abort(str(self.rng.randint(1, NUM_REQUESTS)))
            self.link.trouble()
            self.step()

    def check_endings(self) -> None:
        """I2 and I1: each request ended once, with the truth."""
        for number, events in self.events.items():
            assert [isinstance(event, RequestFinished) for event in events].count(True) == 1
            finished = events[-1]
            assert isinstance(finished, RequestFinished)
            tokens = [t for event in events if isinstance(event, TokensCommitted) for t in event.token_ids]
            request = self.requests[number]
            first = len(request.prompt)
            assert tokens == [truth(number, p) for p in range(first, first + len(tokens))]
            if finished.reason is FinishReason.LENGTH:
                assert len(tokens) == request.max_new_tokens

    def calm_down(self) -> None:
        """Trouble ends; whoever is left over goes when its lease is over."""
        self.chances.__dict__.update(Chances().__dict__)
        self.link.trouble()
        for _ in range(5):
            self.link.wait(LEASE_S / 4)
            self.step()
        self.link.life.table.expire()

    def check_nothing_is_left_to_leases(self) -> None:
        """Where no message was lost, every session was closed."""
        self.step()
        # Longer than the drafter hangs; nothing expires by itself.
        self.link.wait(4.0)
        if self.ledger.num_connections == 1 and self.link.status.stream is not None:
            assert self.link.life.table.num_sessions == 0

    def check_idle(self) -> None:
        """I3 and I5: nobody holds anything."""
        assert self.scheduler.pool.num_free == self.scheduler.pool.num_pages
        assert self.link.life.table.num_sessions == 0
        assert self.link.life.pool.num_free == self.link.life.pool.num_pages
        assert not self.drafter._sessions._sessions
        assert self.drafter.num_sessions == 0

    def check_drafting_comes_back(self) -> None:
        """A request that lives through trouble gets a draft in every step that can use one, soon after
        the trouble is over; unless it was itself at fault."""
        request = self.submit(20, 60)
        request.drafting = True
        trouble = Chances(**self.chances.__dict__)
        while request.num_output_tokens < 10:
            self.link.trouble()
            self.step()
        self.calm_down()
        assert request.room > 10, "some of its life is calm"
        spent = self.drafter._sessions._sessions[request.session_id].state is SessionState.SPENT
        self.chances.__dict__.update(Chances().__dict__)
        self.steps.reports.clear()
        while self.loop.has_work:
            self.step()
        plain = [reason for report in self.steps.reports for reason in report.plain]
        assert spent or plain == []
        self.chances.__dict__.update(trouble.__dict__)


@pytest.mark.parametrize("seed", _seeds())
@pytest.mark.parametrize("kind", KINDS)
def test_a_history_keeps_every_promise(kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"SEED={seed}")
    monkeypatch.setattr(limits, "TENSOR_BYTES_MAX", TENSOR_BYTES_MAX)
    history = History(seed, Chances(**KINDS[kind].__dict__))
    history.run()
    history.check_endings()
    history.check_nothing_is_left_to_leases()
    history.check_drafting_comes_back()
    history.calm_down()
    history.check_endings()
    history.check_idle()
