"""What a run of the bench on a GPU does: its options, checked against each other once.

Knows options and nothing else: no torch, no services, no files.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from common import limits
from common.errors import ConfigError

# What vLLM's figures in docs/performance.md were measured with.
PROMPT_TOKENS = 128
MAX_NEW_TOKENS = 384
# 200 prompts alone, one token a step of 5 ms: a minute.
IDENTITY_NEW_TOKENS = 64


class Mode(enum.StrEnum):
    """How drafts reach the target; the `mode` of a row."""

    PLAIN = "plain"
    INPROCESS = "inprocess"
    INLINE = "inline"
    DEVICE = "device"


class Job(enum.StrEnum):
    """What is done with the pair. One a run: each wants engines of its own."""

    ROWS = "rows"
    STREAMING = "streaming"
    IDENTITY = "identity"
    SOAK = "soak"


_DEFAULT_MODES = {
    Job.ROWS: "plain,inprocess,inline,device",
    Job.STREAMING: "plain",
    Job.IDENTITY: "plain,inprocess",
    Job.SOAK: "inprocess",
}
_DEFAULT_CONCURRENCY = {Job.ROWS: "1,8,32", Job.IDENTITY: "32", Job.SOAK: "8"}


@dataclass(frozen=True)
class GpuPlan:
    """A checked plan. Either `random_shape` is given, or `model` (and `draft`, unless all is plain).

    device is cuda or cuda:N; whether it is there is asked where torch is.
    synthetic_accept_length is None where acceptance is real. amount: prompts of IDENTITY, steps of SOAK,
    0 elsewhere.
    """

    device: str
    random_shape: str | None
    model: str | None
    draft: str | None
    job: Job
    modes: tuple[Mode, ...]
    concurrency: tuple[int, ...]
    prompt_tokens: int
    max_new_tokens: int
    num_rounds: int
    synthetic_accept_length: float | None
    row_independent: bool
    temperature: float
    top_p: float
    amount: int

    @property
    def drafted(self) -> bool:
        """Whether some mode needs a draft."""
        return any(mode is not Mode.PLAIN for mode in self.modes)

    @property
    def accept_kind(self) -> str:
        """`real` or `synthetic`; said wherever a figure that depends on it is shown."""
        return "real" if self.synthetic_accept_length is None else "synthetic"


def levels(text: str, field: str) -> tuple[int, ...]:
    """Numbers of requests at once; ConfigError names the field."""
    try:
        given = [int(part) for part in text.split(",")]
    except ValueError:
        given = []
    if not given or not all(1 <= level <= limits.REQUESTS_RUNNING_MAX for level in given):
        limit = limits.REQUESTS_RUNNING_MAX
        raise ConfigError(field, f"must be integers from 1 to {limit}, separated by commas", given=text)
    return tuple(dict.fromkeys(given))


def make_plan(
    *,
    device: str,
    random_shape: str | None,
    model: str | None,
    draft: str | None,
    modes: str | None,
    concurrency: str | None,
    prompt_tokens: int | None,
    max_new_tokens: int | None,
    num_rounds: int,
    synthetic_accept_length: float | None,
    row_independent: bool,
    streaming: str | None,
    identity: int | None,
    soak: int | None,
    temperature: float,
    top_p: float,
) -> GpuPlan:
    """The plan that the options ask for. ConfigError for a combination that cannot be meant."""
    jobs = {Job.STREAMING: streaming, Job.IDENTITY: identity, Job.SOAK: soak}
    asked = [job for job, given in jobs.items() if given is not None]
    if len(asked) > 1:
        raise ConfigError(asked[1], f"is a run of its own, as --{asked[0]} is", given=jobs[asked[1]])
    job = asked[0] if asked else Job.ROWS
    if random_shape is None and model is None:
        raise ConfigError("model", "must be given, or a shape with --random", given=None)
    for field, given in (("model", model), ("draft", draft)):
        if random_shape is not None and given is not None:
            raise ConfigError(field, "cannot be given together with --random", given=given)
    chosen = _modes(modes, job, has_draft=random_shape is not None or draft is not None)
    if synthetic_accept_length is not None:
        _check_synthetic(synthetic_accept_length, job, chosen)
    if streaming is not None and concurrency is not None:
        raise ConfigError("concurrency", "cannot be given together with --streaming", given=concurrency)
    at_once = levels(streaming, "streaming") if streaming is not None else _concurrency(concurrency, job)
    return GpuPlan(
        device=device,
        random_shape=random_shape,
        model=model,
        draft=draft,
        job=job,
        modes=chosen,
        concurrency=at_once,
        prompt_tokens=prompt_tokens or PROMPT_TOKENS,
        max_new_tokens=max_new_tokens or (IDENTITY_NEW_TOKENS if job is Job.IDENTITY else MAX_NEW_TOKENS),
        num_rounds=num_rounds,
        synthetic_accept_length=synthetic_accept_length,
        row_independent=row_independent,
        temperature=temperature,
        top_p=top_p,
        amount=identity or soak or 0,
    )


def _modes(text: str | None, job: Job, *, has_draft: bool) -> tuple[Mode, ...]:
    default = _DEFAULT_MODES[job] if has_draft else "plain"
    wanted = default if text is None else text
    try:
        modes = tuple(dict.fromkeys(Mode(part) for part in wanted.split(",")))
    except ValueError:
        known = ", ".join(Mode)
        raise ConfigError("modes", f"must be some of {known}, separated by commas", given=text) from None
    if not has_draft and modes != (Mode.PLAIN,):
        raise ConfigError("draft", "must be given for modes other than plain", given=None)
    if job is Job.SOAK and len(modes) != 1:
        raise ConfigError("modes", "must be one for --soak", given=text)
    if job is Job.IDENTITY and (Mode.PLAIN not in modes or len(modes) < 2):
        raise ConfigError("modes", "must be plain and one more for --identity", given=text)
    if job is Job.STREAMING and Mode.INPROCESS in modes:
        raise ConfigError("modes", "must be modes of the services for --streaming", given=text)
    return modes


def _concurrency(text: str | None, job: Job) -> tuple[int, ...]:
    at_once = levels(_DEFAULT_CONCURRENCY[job] if text is None else text, "concurrency")
    if job is not Job.ROWS and len(at_once) != 1:
        raise ConfigError("concurrency", f"must be one number for --{job}", given=text)
    return at_once


def _check_synthetic(length: float, job: Job, modes: tuple[Mode, ...]) -> None:
    """What depends on the draft's block size is checked when that is known."""
    if not (math.isfinite(length) and length >= 1):
        raise ConfigError("synthetic_accept_length", "must be at least 1", given=length)
    if job is Job.STREAMING:
        # The services have no way to set it.
        raise ConfigError("synthetic_accept_length", "exists inside the bench alone", given=length)
    if job is Job.IDENTITY:
        raise ConfigError("synthetic_accept_length", "gives tokens that mean nothing", given=length)
    if all(mode is Mode.PLAIN for mode in modes):
        raise ConfigError("synthetic_accept_length", "needs a mode with drafts", given=length)
