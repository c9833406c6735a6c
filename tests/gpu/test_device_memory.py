"""The hand-off between real processes on one GPU: memory, flags, and what dies when one of them does."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from common.handoff.cuda_driver import DriverError, gpu_uuid
from common.handoff.descriptor_socket import DescriptorsRefused, fetch_descriptors, giving_descriptors
from common.handoff.device_memory import DeviceMemory, import_memory
from common.handoff.flags import FlagMemory
from common.handoff.ring import Ring
from common.handoff.watchdog import Watchdog
from services.target.core.ring_flags import StreamFlags
from tests.gpu.handoff_process import DEVICE, SHAPE, SLOT

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(60),
]

ROOT = Path(__file__).parents[2]
NUM_HAND_OVERS = 300
NUM_AHEAD = 3


class Process:
    """A process of tests/gpu/handoff_process.py. Some start ahead, since importing torch takes seconds."""

    _ahead: ClassVar[deque[subprocess.Popen[str]]] = deque()

    def __init__(self, *role: str) -> None:
        self._process = self._ahead.popleft() if self._ahead else self._start()
        while len(self._ahead) < NUM_AHEAD:
            self._ahead.append(self._start())
        self.tell(" ".join(role))

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.handoff_process"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    @classmethod
    def dismiss(cls) -> None:
        """End those that nobody needed."""
        while cls._ahead:
            process = cls._ahead.pop()
            process.kill()
            process.wait()

    def read(self) -> str:
        """Its next line."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        """Have it do something, and read its answer."""
        self.tell(line)
        return self.read()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Owner:
    """The target's side: memory, ring, flags of one connection."""

    def __init__(self) -> None:
        self.memory = DeviceMemory(SHAPE.num_bytes, DEVICE)
        self.ring = Ring.over(SHAPE, self.memory.tensor)
        self.flag_memory, self._flags_descriptor = FlagMemory.create()
        self.flag_memory.register()
        self.flags = StreamFlags(self.flag_memory.pair(SLOT), DEVICE)
        # A kernel is loaded when it is first launched, which waits for all that the device has to do; and
        # Python's lock is held meanwhile, without which the watchdog cannot help.
        torch.cuda._sleep(1)
        self.ring.anchor.fill_(0)
        self.ring.drafts.clone()
        assert self.is_well()

    @contextlib.contextmanager
    def drafter(self) -> Iterator[Process]:
        """A drafter that has mapped the ring; killed at the end."""
        drafter = asyncio.run(self._start_drafter())
        try:
            yield drafter
        finally:
            drafter.signal(signal.SIGCONT)
            drafter.kill()

    async def _start_drafter(self) -> Process:
        descriptor = self.memory.export()
        with tempfile.TemporaryDirectory() as parent:
            descriptors = [descriptor, self._flags_descriptor]
            async with giving_descriptors(descriptors, Path(parent)) as (path, token):
                drafter = Process("drafter", path, token.hex(), str(self.memory.num_bytes))
                assert await asyncio.to_thread(drafter.read) == "mapped"
        os.close(descriptor)
        return drafter

    def verify(self, sequence: int) -> None:
        """What a step leaves in the ring."""
        self.ring.anchor.fill_(sequence)
        self.ring.verify_captured.fill_(sequence % 7)
        self.flags.write_ready(sequence)

    def expected(self, sequence: int) -> list[int]:
        return [sequence + k + sequence % 7 for k in range(1, 16)]

    def is_well(self) -> bool:
        """Whether this process's context still computes, and the ring is its own."""
        self.ring.extend_captured.fill_(3)
        torch.cuda.synchronize()
        return bool((self.ring.extend_captured == 3).all())


@pytest.fixture(scope="module", autouse=True)
def crew() -> Iterator[None]:
    yield
    Process.dismiss()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    # Whatever a test that failed left waiting.
    owner.flags.release(1 << 29)


def until(event: torch.cuda.Event, within_s: float) -> float | None:
    """Seconds until the device came to the event; None when it did not."""
    began = time.monotonic()
    return time.monotonic() - began if within(within_s, event.query) else None


def within(seconds: float, is_so: Callable[[], bool]) -> bool:
    """Whether something came to be so."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if is_so():
            return True
        time.sleep(0.001)
    return False


def test_what_is_handed_over_is_right_every_time(owner: Owner) -> None:
    times = []
    with owner.drafter() as drafter:
        for sequence in range(1, NUM_HAND_OVERS + 1):
            began = time.perf_counter()
            owner.verify(sequence)
            drafter.tell(f"work {sequence}")
            owner.flags.await_done(sequence)
            drafts = owner.ring.drafts.clone()
            assert drafts.tolist() == [owner.expected(sequence)] * SHAPE.num_rows
            times.append(time.perf_counter() - began)
            assert drafter.read() == "enqueued"
    print(f"hand-over there and back: median {sorted(times)[len(times) // 2] * 1e6:.0f} us")


def test_steps_that_are_enqueued_ahead_wait_for_each_other(owner: Owner) -> None:
    """No host takes part between the first step and the last."""
    with owner.drafter() as drafter:
        for sequence in range(1, 51):
            assert drafter.ask(f"work {sequence}") == "enqueued"
        seen = torch.zeros(50, 15, dtype=torch.int32, device=DEVICE)
        for sequence in range(1, 51):
            owner.verify(sequence)
            owner.flags.await_done(sequence)
            seen[sequence - 1].copy_(owner.ring.drafts[5])
        assert seen.tolist() == [owner.expected(sequence) for sequence in range(1, 51)]


def test_enqueuing_costs_the_host_little(owner: Owner) -> None:
    with owner.drafter() as drafter:
        times = []
        for sequence in range(1, 201):
            began = time.perf_counter()
            owner.flags.write_ready(sequence)
            middle = time.perf_counter()
            drafter.tell(f"work {sequence}")
            again = time.perf_counter()
            owner.flags.await_done(sequence)
            times.append((middle - began, time.perf_counter() - again))
            assert drafter.read() == "enqueued"
        torch.cuda.synchronize()
    ready, wait = (sorted(column)[100] * 1e6 for column in zip(*times, strict=True))
    print(f"host time to enqueue: ready and its event {ready:.1f} us, wait {wait:.1f} us")
    # Both come once a step, whose host work may take 400 us.
    assert ready + wait < 100


def test_a_drafter_that_is_killed_before_it_worked_stops_the_owner_until_it_is_released(owner: Owner) -> None:
    with owner.drafter() as drafter:
        drafter.kill()
        owner.verify(1)
        owner.flags.await_done(1)
        after = torch.cuda.Event()
        after.record()
        assert until(after, 0.3) is None
        owner.flags.release(1)
        waited_s = until(after, 5)
        assert waited_s is not None
        print(f"released after {waited_s * 1e3:.1f} ms")
        assert owner.is_well()


def test_a_drafter_that_is_killed_with_work_enqueued_leaves_the_owner_unharmed(owner: Owner) -> None:
    with owner.drafter() as drafter:
        for sequence in range(1, 9):
            drafter.ask(f"work {sequence}")
        owner.verify(1)
        owner.flags.await_done(1)
        torch.cuda.synchronize()
        drafter.kill()
        # Its remaining steps wait for `ready` for ever, in a context that is gone.
        owner.verify(2)
        owner.flags.release(2)
        owner.flags.await_done(2)
        assert owner.is_well()
    with owner.drafter() as next_drafter:
        next_drafter.ask("work 3")
        owner.verify(3)
        owner.flags.await_done(3)
        assert owner.ring.drafts[0].tolist() == owner.expected(3)


def test_a_drafter_whose_owner_is_killed_keeps_its_context() -> None:
    owner = Process("owner")
    drafter = Process("drafter", *owner.read().split())
    try:
        assert drafter.read() == "mapped"
        assert drafter.ask("work 1") == "enqueued"
        owner.kill()
        assert drafter.ask("release 1") == "released"
        assert drafter.ask("compute") == "2000"
    finally:
        owner.kill()
        drafter.kill()


def test_the_watchdog_lets_the_stream_go_on_when_the_drafter_is_stopped(owner: Owner) -> None:
    missed = threading.Event()
    watchdog = Watchdog(owner.flags.release, 0.2, missed.set)
    watchdog.start()
    with owner.drafter() as drafter:
        drafter.ask("work 1")
        owner.verify(1)
        owner.flags.await_done(1)
        torch.cuda.synchronize()
        drafter.signal(signal.SIGSTOP)
        # The target's own work, longer than the deadline, is not the drafter's fault.
        torch.cuda._sleep(int(1e9))
        owner.ring.anchor.fill_(2)
        is_ready = owner.flags.write_ready(2)
        ready, after = torch.cuda.Event(), torch.cuda.Event()
        ready.record()
        watchdog.watch(2, is_ready, lambda: owner.flags.await_done(2))
        after.record()
        assert until(ready, 20) is not None
        waited_s = until(after, 20)
        assert waited_s is not None and 0.15 < waited_s < 2
        print(f"stopped drafter: the stream went on after {waited_s * 1e3:.0f} ms of a 200 ms deadline")
        assert missed.wait(5)
        assert owner.is_well()


def test_a_late_drafter_cannot_stop_the_owner_again(owner: Owner) -> None:
    """Two waits are on the stream; the drafter's first write comes after the release of both."""
    watchdog = Watchdog(owner.flags.release, 0.2, lambda: None)
    watchdog.start()
    with owner.drafter() as drafter:
        drafter.signal(signal.SIGSTOP)
        for sequence in (1, 2):
            is_ready = owner.flags.write_ready(sequence)
            watchdog.watch(sequence, is_ready, functools.partial(owner.flags.await_done, sequence))
            # Long enough that the write below comes between the two waits.
            torch.cuda._sleep(int(1e9))
        after = torch.cuda.Event()
        after.record()
        assert within(20, lambda: watchdog.has_tripped)
        drafter.signal(signal.SIGCONT)
        drafter.ask("work 1")
        drafter.ask("compute")
        assert until(after, 20) is not None
        assert owner.is_well()


def test_a_release_gets_past_any_number_of_waiting_streams() -> None:
    crowd = Process("crowd")
    try:
        assert crowd.read() == "mapped"
        reader = threading.Thread(target=lambda: answers.append(crowd.ask("wait 64")), daemon=True)
        answers: list[str] = []
        reader.start()
        reader.join(20)
        assert answers == ["all went on"]
    finally:
        crowd.kill()


def test_a_wrong_token_gets_nothing(owner: Owner) -> None:
    async def ask() -> None:
        descriptor = owner.memory.export()
        with tempfile.TemporaryDirectory() as parent:
            async with giving_descriptors([descriptor], Path(parent)) as (path, token):
                with pytest.raises(DescriptorsRefused):
                    await asyncio.to_thread(fetch_descriptors, path, bytes(len(token)), 1, 5.0)
        os.close(descriptor)

    asyncio.run(ask())


def test_memory_that_is_smaller_or_none_is_refused(owner: Owner) -> None:
    descriptor = owner.memory.export()
    with pytest.raises(DriverError):
        import_memory(descriptor, 2 * owner.memory.num_bytes, DEVICE)
    os.close(descriptor)
    foreign = os.memfd_create("not from a GPU")
    with pytest.raises(DriverError):
        import_memory(foreign, owner.memory.num_bytes, DEVICE)
    os.close(foreign)
    assert owner.is_well()


def test_memory_lives_as_long_as_a_tensor_over_it_and_no_longer() -> None:
    def free_bytes() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info(DEVICE)[0]

    before = free_bytes()
    # So much that what other processes take meanwhile does not count.
    num_bytes = before // 4
    memory = DeviceMemory(num_bytes, DEVICE)
    assert not bool(memory.tensor[:: 1 << 20].any())
    view = memory.tensor[-256:].view(torch.int32)
    assert before - free_bytes() >= num_bytes // 2
    del memory
    view.fill_(7)
    assert int(view.sum()) == 7 * 64
    del view
    assert before - free_bytes() < num_bytes // 2


def test_too_much_memory_is_an_error_that_names_the_call() -> None:
    with pytest.raises(DriverError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        DeviceMemory(1 << 42, DEVICE)


def test_a_gpu_has_one_name_in_all_processes() -> None:
    assert len(gpu_uuid(DEVICE)) == 16
    said = subprocess.run(
        [sys.executable, "-c",
         "import torch; from common.handoff.cuda_driver import gpu_uuid; "
         "print(gpu_uuid(torch.device('cuda', 0)).hex())"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    assert said == gpu_uuid(DEVICE).hex()
