"""What streaming costs the core's thread, with the front in its process and in processes of its own.

    python -m tests.time_fronts [--streams 1,32,128,256] [--fronts 0,1] [--step-ms 10] [--seconds 5]

A step loop without a model commits 4 tokens to each request, then waits as if for a device. Real gRPC clients
read the streams in a process of their own. Times are of the core's thread: `host` from the end of that wait
to the beginning of the next (emitting, handing over, taking commands), on the clock and of the CPU; `late`
from when the wait should have ended to when the thread went on. What the first has beyond the second, and the
third, is time that the interpreter's lock or the CPU was others'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import grpc

from common.address import Address, TcpAddress, UnixAddress
from common.log import configure_log
from common.metrics import CommonMetrics, Metrics
from common.pb.tandem.v1 import target_pb2, target_pb2_grpc
from common.rpc import HEALTH_METHODS, method_names
from services.target.core.core import Core
from services.target.core.report import CoreStats
from services.target.core.request import (
    FinishReason,
    Request,
    RequestFailed,
    RequestFinished,
    TokensCommitted,
)
from services.target.edge import Edge, InProcessFront
from services.target.front.facts import DrafterFacts, ServedModel
from services.target.front.servicer import SERVICE, TargetServicer
from services.target.fronts import FrontPlan, Fronts
from services.target.metrics import PREFIX, TargetMetrics

MODEL = ServedModel("none", "None", vocab_size=150_000, max_len=1 << 20, eos_token_ids=(2,), dtype="bfloat16")
TOKENS_A_STEP = [100_001, 90_002, 80_003, 70_004]
FROM_DRAFT = [True, True, True, False]


class IdleDevice:
    """A step loop and its roster, whose device does nothing for `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._running: dict[str, Request] = {}
        self._due: float | None = None
        self._woke = self._woke_cpu = 0.0
        self.measuring = threading.Event()
        self.host_s: list[float] = []
        self.host_cpu_s: list[float] = []
        self.late_s: list[float] = []

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def stats(self) -> CoreStats:
        return CoreStats(len(self._running), 0, 100_000, 100_000 - len(self._running), 0)

    def add(self, request: Request) -> None:
        self._running[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id).emit(_finished())

    def fail_all(self, error: Any, reason: str) -> None:
        while self._running:
            self._running.popitem()[1].emit(RequestFailed(error))

    def fail(self, request: Request, error: Any, reason: str) -> None:
        request.emit(RequestFailed(error))

    def step(self) -> None:
        if not self._running:
            self._due = None
            return
        now = time.perf_counter()
        if self._due is not None and self.measuring.is_set():
            self.host_s.append(now - self._woke)
            self.host_cpu_s.append(time.thread_time() - self._woke_cpu)
        self._due = now + self._step_s
        time.sleep(self._step_s)
        self._woke, self._woke_cpu = time.perf_counter(), time.thread_time()
        if self.measuring.is_set():
            self.late_s.append(self._woke - self._due)
        for request in self._running.values():
            request.emit(TokensCommitted(list(TOKENS_A_STEP), list(FROM_DRAFT)))


def _finished() -> Any:
    """An end with made-up numbers."""
    return RequestFinished(FinishReason.ABORT, None, 1, 1, 1, 0, 0, 0, 0, 0.0, 0.0, 0.0)


class NoDrafter:
    def close(self) -> None:
        return


async def read_streams(address: str, num_streams: int, seconds: float) -> None:
    """The client: reads all streams, and prints tokens and messages of the middle part."""
    channels = [grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)]
    stubs = [target_pb2_grpc.TargetServiceStub(channel) for channel in channels]
    counts = {"tokens": 0, "messages": 0}
    begun = 0

    async def read(number: int) -> None:
        nonlocal begun
        call = stubs[number % len(stubs)].Generate(
            target_pb2.GenerateRequest(request_id=f"s{number}", input_ids=[5])
        )
        first = True
        async for message in call:
            begun += first
            first = False
            counts["tokens"] += len(message.delta.token_ids)
            counts["messages"] += 1

    readers = [asyncio.create_task(read(i)) for i in range(num_streams)]
    while begun < num_streams:
        await asyncio.sleep(0.05)
    print("begun", flush=True)
    await asyncio.sleep(0.5)
    before, since, cpu = dict(counts), time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - since
    result = {f"{key}_per_s": round((counts[key] - before[key]) / elapsed) for key in counts}
    result["client_cpu"] = round((time.process_time() - cpu) / elapsed, 2)
    print(json.dumps(result), flush=True)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    os._exit(0)


async def measure(num_streams: int, num_fronts: int, step_s: float, seconds: float) -> dict[str, Any]:
    device = IdleDevice(step_s)
    metrics = Metrics(PREFIX, "none")
    observer = TargetMetrics(metrics)
    calls = CommonMetrics(metrics, [*method_names(SERVICE), *HEALTH_METHODS])
    with tempfile.TemporaryDirectory(prefix="td") as folder:
        listen: Address = UnixAddress(str(Path(folder) / "t.sock"))
        if num_fronts > 1:
            listen = TcpAddress("127.0.0.1", 0)
        edge = _open_edge(listen, num_fronts, observer, calls)
        core = Core(
            device, device, NoDrafter(), num_known_max=1024, prepare=lambda: None,
            on_failure=lambda: os._exit(1), announce=edge.announce,
        )  # type: ignore[arg-type]  # fmt: skip
        tasks = []
        address = await edge.start(core, lambda name, work: tasks.append(asyncio.ensure_future(work)))
        await edge.set_serving(True)
        core.start()
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.time_fronts", "--client", str(address), str(num_streams),
            str(seconds), stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert client.stdout is not None
        assert (await client.stdout.readline()).strip() == b"begun"
        await asyncio.sleep(0.5)
        device.measuring.set()
        cpu, since = time.process_time(), time.perf_counter()
        received = json.loads(await client.stdout.readline())
        device.measuring.clear()
        used = (time.process_time() - cpu) / (time.perf_counter() - since)
        await client.wait()
        for task in tasks:
            task.cancel()
        await asyncio.to_thread(core.stop)
        await edge.stop(0.5)
    return {
        "streams": num_streams, "fronts": num_fronts,
        "host_us": _figures(device.host_s), "host_cpu_us": _figures(device.host_cpu_s),
        "late_us": _figures(device.late_s),
        "core_process_cpu": round(used, 2), **received,
    }  # fmt: skip


def _open_edge(listen: Address, num_fronts: int, observer: TargetMetrics, calls: CommonMetrics) -> Edge:
    if num_fronts == 0:
        def make(core: Core) -> TargetServicer:
            return TargetServicer(
                core, MODEL, instance_id="i", drafter_facts=DrafterFacts,
                observe_rejected=observer.observe_rejected,
            )  # fmt: skip

        return InProcessFront(listen, make, calls)
    plan = FrontPlan(num_fronts, listen, "warning", "i", MODEL)
    return Fronts(plan, DrafterFacts, observer, calls.observe_server_call, calls.observe_event_loop_lag)


def _figures(seconds: list[float]) -> dict[str, float]:
    us = sorted(s * 1e6 for s in seconds)
    return {
        "median": round(statistics.median(us)), "mean": round(statistics.fmean(us)),
        "p99": round(us[int(0.99 * (len(us) - 1))]), "steps": len(us),
    }  # fmt: skip


def main() -> None:
    configure_log("warning", "target")
    if sys.argv[1:2] == ["--client"]:
        asyncio.run(read_streams(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])))
    parser = argparse.ArgumentParser(description="times of the core's thread with fronts here and elsewhere")
    parser.add_argument("--streams", default="1,32,128,256")
    parser.add_argument("--fronts", default="0,1")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    for num_streams in map(int, given.streams.split(",")):
        for num_fronts in map(int, given.fronts.split(",")):
            result = asyncio.run(measure(num_streams, num_fronts, given.step_ms / 1e3, given.seconds))
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
