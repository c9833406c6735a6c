"""Target and drafter as processes on one device, and requests that are read by processes of their own.

A step with 32 requests sends 32 messages: one process that reads them all falls behind, and then its clock
says nothing of the target's.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.pb.tandem.v1 import target_pb2
from tests.builders import build_tiny_draft_dir, build_tiny_llama_dir
from tests.fault.crowd import Ask, eventually, wait_drafter
from tests.gpu.stream_reader import read_all
from tools.child_service import ChildService
from tools.local_stack import drafter_service, free_ports, target_service
from tools.scrape import Scrape, scrape
from tools.target_client import Answer, TargetClient

NUM_REQUESTS = 32
VOCAB_SIZE, MAX_LEN, BLOCK_SIZE = 512, 2048, 4
# Drafts are right now and then, and texts no constants.
FAVOURITE_BIAS = 6.0
DRAFT_DEADLINE_S = 0.25
# With cold caches each service compiles its kernels.
START_DEADLINE_S = 240.0
# More read no faster: the front sends from one process.
_NUM_READERS = 4
_STOP_GRACE_S = 3.0
_LOG_LINES = 40
_TARGET_FLAGS = (
    "--kv-tokens", "65536", "--num-running-max", str(NUM_REQUESTS), "--extend-rows-max", "64",
    "--fronts", "1", "--threads", "1",
)  # fmt: skip
_DRAFTER_FLAGS = (
    "--kv-tokens", "81920", "--num-sessions-max", "48", "--extend-rows-max", "64", "--threads", "1",
)  # fmt: skip


@dataclass(frozen=True)
class Numerics:
    """Where and in what type services compute so that a token does not depend on its batch."""

    device: str
    dtype: str

    @property
    def target_flags(self) -> tuple[str, ...]:
        alike = ("--device", self.device, "--dtype", self.dtype)
        return alike if self.device == "cpu" else (*alike, "--row-independent")

    @property
    def drafter_flags(self) -> tuple[str, ...]:
        return ("--device", self.device, "--dtype", self.dtype)


# The kernels' bits depend on no batch; they serve no float32. A CPU's products do in bfloat16.
ON_GPU, ON_CPU = Numerics("cuda", "bfloat16"), Numerics("cpu", "float32")


@dataclass(frozen=True)
class Party:
    """A service and its metrics page."""

    child: ChildService
    metrics_url: str

    @property
    def metrics(self) -> Scrape:
        return scrape(self.metrics_url)

    def value(self, name: str, **labels: str) -> float:
        """A sample of the page; the name without its prefix."""
        return self.metrics.value(f"tandem_{self.child.name}_{name}", **labels)


class TinyServices:
    """Services over one tiny checkpoint whose random draft is often right, each in a directory of its own."""

    def __init__(self, directory: Path, numerics: Numerics) -> None:
        """directory: short, for sockets lie in it."""
        self._directory, self._numerics = directory, numerics
        dtype = getattr(torch, numerics.dtype)
        self._model_dir = build_tiny_llama_dir(
            directory / "model", vocab_size=VOCAB_SIZE, max_len=MAX_LEN, hidden_size=128,
            intermediate_size=256, head_dim=32, favourite_token=7,
            favourite_bias=FAVOURITE_BIAS, dtype=dtype,
        )  # fmt: skip
        self._draft_dir = build_tiny_draft_dir(
            directory / "draft", self._model_dir, block_size=BLOCK_SIZE, dtype=dtype
        )
        self._children: list[ChildService] = []

    def __enter__(self) -> TinyServices:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as ending:
            for child in self._children:
                ending.callback(child.stop, _STOP_GRACE_S)
            for child in reversed(self._children):
                child.ask_to_end()
        # Their directory goes.
        for child in self._children:
            _print_log(child)

    def drafter(self, name: str, *flags: str, device: str | None = None) -> Party:
        """A drafter, not started, that is stopped in the end; on the services' device unless one is named."""
        numerics = replace(self._numerics, device=device or self._numerics.device)
        (port,) = free_ports(1)
        child = drafter_service(
            self._own(name), self._model_dir, self._draft_dir, metrics_port=port,
            flags=(*_DRAFTER_FLAGS, *numerics.drafter_flags, *flags),
        )  # fmt: skip
        return self._party(child, port)

    def target(
        self, name: str, drafter: Party, *flags: str, draft_deadline_s: float = DRAFT_DEADLINE_S
    ) -> Party:
        """A target of that drafter, likewise."""
        (port,) = free_ports(1)
        child = target_service(
            self._own(name), self._model_dir, drafter_address=drafter.child.address, metrics_port=port,
            flags=(*_TARGET_FLAGS, "--draft-deadline-s", str(draft_deadline_s),
                   *self._numerics.target_flags, *flags),
        )  # fmt: skip
        return self._party(child, port)

    def _own(self, name: str) -> Path:
        directory = self._directory / name
        directory.mkdir()
        return directory

    def _party(self, child: ChildService, port: int) -> Party:
        self._children.append(child)
        return Party(child, f"http://127.0.0.1:{port}/metrics")


def start(*parties: Party) -> None:
    """All at the same time, until each serves."""
    for party in parties:
        party.child.start()
    for party in parties:
        party.child.wait_serving(START_DEADLINE_S)


def stop(*parties: Party) -> None:
    for party in parties:
        party.child.stop(3.0)


def wait_for(target: Party, state: target_pb2.DrafterState, timeout_s: float = 30.0) -> None:
    with TargetClient(target.child.address) as client:
        wait_drafter(client, state, timeout_s)


def transport_of(target: Party) -> str:
    """The transport of the connection in use."""
    page, name = target.metrics, "tandem_target_handoff_transport"
    return next(t for t in page.labels_of(name, "transport") if page.value(name, transport=t) == 1)


def restart(party: Party) -> float:
    """Seconds until it serves."""
    began = time.monotonic()
    start(party)
    return time.monotonic() - began


def _print_log(child: ChildService) -> None:
    """Its last lines, for whoever reads of a failure; but for those of single requests."""
    if not child.log_path.exists():
        return
    lines = child.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line for line in lines if '"request_id"' not in line]
    print(f"--- {child.log_path}", *told[-_LOG_LINES:], sep="\n")


# --- readers ---------------------------------------------------------------------------------------


class Readers:
    """Processes that read streams."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(_NUM_READERS, multiprocessing.get_context("spawn"))
        # So that the first crowd does not wait for imports: long enough that each gets one.
        list(self._pool.map(time.sleep, [0.2] * _NUM_READERS))

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def answers(self, target: Party, asks: Sequence[Ask], *, drafting: bool = True) -> list[Answer]:
        """What the requests give, all at once."""
        return self._start(target, asks, drafting)()

    @contextmanager
    def crowd(self, target: Party, asks: Sequence[Ask]) -> Iterator[Callable[[], list[Answer]]]:
        """Go on once all the requests decode; the function waits for their ends."""
        before = _num_begun(target)
        collect = self._start(target, asks, True)
        eventually(lambda: _num_begun(target) == before + len(asks), "all decode", 30)
        # Some steps with drafts.
        time.sleep(0.1)
        yield collect

    def _start(self, target: Party, asks: Sequence[Ask], drafting: bool) -> Callable[[], list[Answer]]:
        wanted = [Ask(ask.prompt, replace(ask.options, drafting=drafting)) for ask in asks]
        shares = [wanted[i::_NUM_READERS] for i in range(_NUM_READERS) if wanted[i::_NUM_READERS]]
        futures = [self._pool.submit(read_all, target.child.address, share) for share in shares]

        def collect() -> list[Answer]:
            found: list[Answer | None] = [None] * len(asks)
            for i, future in enumerate(futures):
                found[i::_NUM_READERS] = [read.answer for read in future.result(150)]
            return [answer for answer in found if answer is not None]

        return collect


def _num_begun(target: Party) -> float:
    """Requests so far that had their first token."""
    return target.value("time_to_first_token_seconds_count")


# --- what answers say ------------------------------------------------------------------------------


def tokens(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def draft_counts(answers: Sequence[Answer]) -> tuple[int, int]:
    """Drafts that were verified, and draft tokens of them that were accepted."""
    finished = [answer.finished for answer in answers]
    return sum(f.num_drafts for f in finished), sum(f.num_accepted_tokens for f in finished)


def assert_met_by(answers: Sequence[Answer], fault_at_s: float) -> None:
    """The fault came when each request had some of its tokens and wanted more."""
    for answer in answers:
        assert answer.deltas[0].at_s < fault_at_s < answer.deltas[-1].at_s, "the fault met not all of them"


def longest_gap_s(answers: Sequence[Answer], after_s: float = 0.0) -> float:
    """The longest time between two messages of one request of which the second came after that moment."""
    return max(
        later.at_s - earlier.at_s
        for answer in answers
        for earlier, later in zip(answer.deltas, answer.deltas[1:], strict=False)
        if later.at_s > after_s
    )


def line(case: str, numbers: Mapping[str, object]) -> str:
    """What a case measured."""
    return f"served pair | {case} | " + ", ".join(f"{name} {value}" for name, value in numbers.items())
