"""A request inside the target, its states, and the events that leave it. No torch, no grpc."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from common import limits
from common.errors import InvalidRequest, TandemError
from common.paged_kv import PageTable

if TYPE_CHECKING:
    from services.target.core.lanes_scheduler import Ride


@dataclass(frozen=True)
class SamplingParams:
    """How a token is chosen; values are already checked (see `check`)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def check(self) -> None:
        """Raise InvalidRequest for a field out of range."""
        limits.check_range("sampling.temperature", self.temperature, 0.0, limits.TEMPERATURE_MAX)
        if 0 < self.temperature < limits.TEMPERATURE_MIN:
            limit = f"0 (greedy) or at least {limits.TEMPERATURE_MIN}"
            raise InvalidRequest("sampling.temperature", limit=limit, given=self.temperature)
        limits.check_range("sampling.top_k", self.top_k, 0, limits.VOCAB_ROWS_MAX)
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidRequest("sampling.top_p", limit="above 0 and at most 1", given=self.top_p)
        limits.check_range("sampling.min_p", self.min_p, 0.0, 1.0)
        limits.check_range("sampling.seed", self.seed, 0, limits.SEED_MAX)


class Phase(enum.Enum):
    """Where a request is. One that was preempted is WAITING with tokens already committed."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


# A request leaves FINISHED never, and gets there exactly once (I2).
TRANSITIONS = {
    Phase.WAITING: {Phase.RUNNING, Phase.FINISHED},
    Phase.RUNNING: {Phase.WAITING, Phase.FINISHED},
    Phase.FINISHED: set(),
}


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class TokensCommitted(NamedTuple):
    """Tokens that are irrevocably part of the output; from_draft says which a draft had proposed."""

    token_ids: list[int]
    from_draft: list[bool]


@dataclass(frozen=True)
class RequestFinished:
    """The one terminal event of a request that ended as it should."""

    reason: FinishReason
    matched_token_id: int | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_decode_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    seed: int
    queue_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class RequestFailed:
    """The one terminal event of a request that the service could not finish."""

    error: TandemError


@dataclass(frozen=True)
class RequestRefused:
    """The one event of a request that was not admitted, where that is learned only after `submit`: from a
    core in another process. A core itself never emits it."""

    error: TandemError


Event = TokensCommitted | RequestFinished | RequestFailed | RequestRefused


# Compared by identity: each is one caller's, whatever its fields say.
@dataclass(eq=False)
class Request:
    """One request. Created by the front with checked fields; afterwards only the core touches it.

    tokens is the prompt followed by what was committed; cached_len counts the tokens whose K/V is
    stored, or will be by what was launched. In steady decoding cached_len = committed_len - 1 and the
    last token is the anchor.
    """

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    drafting: bool
    emit: Callable[[Event], None]
    """Called from the core's thread; must not block."""
    clock: Callable[[], float] = time.monotonic

    session_id: int = 0
    """Filled by the core at admission; unique in this process."""
    page_table: PageTable | None = None
    """Filled by the scheduler while the request is RUNNING."""
    ride: Ride | None = None
    """Filled by a scheduler with lanes; stays after a preemption, for what is still in flight."""

    len_max: int = field(init=False)
    """Tokens when no more may be committed. The context limit is inside max_new_tokens already."""
    tokens: list[int] = field(default_factory=list)
    cached_len: int = 0
    phase: Phase = Phase.WAITING
    num_decode_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    submitted_at: float = 0.0
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.len_max = len(self.prompt) + self.max_new_tokens
        self.submitted_at = self.clock()

    @property
    def committed_len(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self.len_max - len(self.tokens)

    @property
    def remaining_len(self) -> int:
        """Tokens whose K/V is not stored yet; 1 in steady decoding."""
        return self.committed_len - self.cached_len

    def move_to(self, phase: Phase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase} to {phase}"
        self.phase = phase

    def finish(self, reason: FinishReason, matched_token_id: int | None = None) -> RequestFinished:
        """Move to FINISHED and build the terminal event; the caller emits it."""
        self.move_to(Phase.FINISHED)
        now = self.clock()
        started = self.started_at if self.started_at is not None else now
        first = self.first_token_at if self.first_token_at is not None else now
        last = self.last_token_at if self.last_token_at is not None else first
        return RequestFinished(
            reason=reason,
            matched_token_id=matched_token_id,
            num_prompt_tokens=len(self.prompt),
            num_output_tokens=self.num_output_tokens,
            num_decode_steps=self.num_decode_steps,
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            seed=self.sampling.seed,
            queue_s=started - self.submitted_at,
            prefill_s=first - started,
            decode_s=last - first,
        )
