"""Many steps of mixed lengths, joins, leaves and cancels: memory stays flat, every page is accounted for.

Runs in legs; between two legs nothing is left to do, so that all must be free and memory can be compared.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from services.target.core.request import Request, SamplingParams
from tools.gpu_bench.contender import Contender
from tools.gpu_bench.core_load import Ask
from tools.gpu_bench.plan import GpuPlan
from tools.gpu_bench.prompts import Prompts

_LEGS = 20
# What the first legs allocate is kept: caches of kernels, arenas of the interpreter.
_WARM_LEGS = 4
# Each step, a request is cancelled so often: one in five of those that run for 50 steps at 8 at once.
_CANCEL_A_STEP = 0.03
# Arenas of the interpreter come and go; what leaks a little each step passes this within minutes.
_GROWTH_BYTES_MAX = 32 << 20


@dataclass(frozen=True)
class MemorySample:
    """Bytes: resident of this process and of the drafter's (0 without one), allocated by torch, and used on
    the device by everyone."""

    own_resident: int
    drafter_resident: int
    torch_allocated: int
    device_used: int

    @classmethod
    def take(cls, drafter_pid: int | None) -> MemorySample:
        """The device's figures are 0 without CUDA."""
        cuda = torch.cuda.is_available()
        free, total = torch.cuda.mem_get_info() if cuda else (0, 0)
        return cls(
            own_resident=_resident_bytes(os.getpid()),
            drafter_resident=0 if drafter_pid is None else _resident_bytes(drafter_pid),
            torch_allocated=torch.cuda.memory_allocated() if cuda else 0,
            device_used=total - free,
        )


@dataclass
class SoakResult:
    """What became of a soak. complaints: each one line, none when all held."""

    num_steps: int
    num_requests: int
    num_cancelled: int
    num_tokens: int
    memory: list[MemorySample]
    complaints: list[str]

    def as_json(self) -> dict[str, Any]:
        """For the file of results."""
        return asdict(self)


class Soak:
    """Puts one contender through it."""

    def __init__(self, plan: GpuPlan, contender: Contender, prompts: Prompts, seed: int) -> None:
        """plan.amount steps at plan.concurrency; answers are up to plan.max_new_tokens long."""
        self._plan = plan
        self._contender = contender
        self._prompts = prompts
        self._rng = random.Random(seed)
        self._leg_steps = 0
        self.result = SoakResult(0, 0, 0, 0, [], [])

    def run(self, check: Callable[[], None], on_steps: Callable[[int], None]) -> SoakResult:
        """All legs. check raises when the run shall end; on_steps hears the steps done."""
        (concurrency,) = self._plan.concurrency
        wanted = -(-self._plan.amount // _LEGS)
        result = self.result
        while result.num_steps < self._plan.amount:
            self._leg_steps = 0
            times, steps = self._contender.run(self._asks(wanted), concurrency, self._before_step)
            result.num_steps += len(steps)
            result.num_requests += len(times.answers)
            result.num_cancelled += sum(answer.aborted for answer in times.answers)
            result.num_tokens += sum(len(answer.token_ids) for answer in times.answers)
            result.complaints += self._contender.all_leftovers()
            del times, steps
            result.memory.append(MemorySample.take(self._contender.drafter_pid))
            on_steps(result.num_steps)
            check()
        result.complaints += grown(result.memory[_WARM_LEGS:])
        return result

    def _asks(self, num_steps: int) -> Iterator[Ask]:
        while self._leg_steps < num_steps:
            prompt = self._prompts.varied(self._rng)
            seed = self._rng.randrange(2**32)
            sampled = SamplingParams(temperature=0.8, top_p=self._plan.top_p, seed=seed)
            sampling = self._rng.choice((SamplingParams(), sampled))
            drafting = self._rng.random() < 0.9
            yield Ask(prompt, self._rng.randint(1, self._plan.max_new_tokens), sampling, drafting)

    def _before_step(self, running: dict[str, Request]) -> None:
        self._leg_steps += 1
        unaccounted = self._contender.stats().pages_unaccounted
        if unaccounted:
            self.result.complaints.append(f"target: {unaccounted} pages unaccounted")
        if self._rng.random() < _CANCEL_A_STEP:
            self._contender.loop.abort(self._rng.choice(list(running)))


def grown(samples: list[MemorySample]) -> list[str]:
    """A complaint for each figure whose last value is above its first by more than chance; of two or more."""
    complaints = []
    for name in ("own_resident", "drafter_resident", "torch_allocated", "device_used"):
        values = [getattr(sample, name) for sample in samples]
        if values and values[-1] - values[0] > _GROWTH_BYTES_MAX:
            complaints.append(f"memory: {name} grew by {(values[-1] - values[0]) >> 20} MiB")
    return complaints


def _resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
