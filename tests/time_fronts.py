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
import time
from typing import Any

import grpc

from common.address import Address, TcpAddress, UnixAddress
from common.log import configure_log
from common.pb.tandem.v1 import target_pb2, target_pb2_grpc
from tests.idle_target import IdleTarget

_NUM_CHANNELS = 4
_SETTLE_S = 0.5


async def read_streams(address: str, num_streams: int, seconds: float) -> None:
    """The client: reads all streams, and prints what came in the middle part."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    stubs = [
        target_pb2_grpc.TargetServiceStub(grpc.aio.insecure_channel(address, options))
        for _ in range(_NUM_CHANNELS)
    ]
    num_tokens, num_messages = [0] * num_streams, [0] * num_streams

    async def read(number: int) -> None:
        request = target_pb2.GenerateRequest(request_id=f"s{number}", input_ids=[5])
        async for message in stubs[number % _NUM_CHANNELS].Generate(request):
            num_tokens[number] += len(message.delta.token_ids)
            num_messages[number] += 1

    readers = [asyncio.create_task(read(i)) for i in range(num_streams)]
    while not all(num_messages):
        await asyncio.sleep(0.05)
    print("begun", flush=True)
    await asyncio.sleep(_SETTLE_S)
    before, since, cpu_since = (sum(num_tokens), sum(num_messages)), time.perf_counter(), time.process_time()
    await asyncio.sleep(seconds)
    elapsed = time.perf_counter() - since
    print(json.dumps({
        "tokens_per_s": round((sum(num_tokens) - before[0]) / elapsed),
        "messages_per_s": round((sum(num_messages) - before[1]) / elapsed),
        "client_cpu": round((time.process_time() - cpu_since) / elapsed, 2),
    }), flush=True)  # fmt: skip
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    os._exit(0)


async def measure(num_streams: int, num_fronts: int, step_s: float, seconds: float) -> dict[str, Any]:
    """One line of results."""
    with tempfile.TemporaryDirectory(prefix="td") as folder:
        listen: Address = UnixAddress(f"{folder}/t.sock")
        if num_fronts > 1:
            listen = TcpAddress("127.0.0.1", 0)
        target = IdleTarget(listen, num_fronts, step_s)
        address = await target.start()
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.time_fronts", "--client", str(address), str(num_streams),
            str(seconds), stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert client.stdout is not None
        assert (await client.stdout.readline()).strip() == b"begun"
        await asyncio.sleep(_SETTLE_S)
        target.device.measuring.set()
        cpu_since, since = time.process_time(), time.perf_counter()
        received = json.loads(await client.stdout.readline())
        target.device.measuring.clear()
        cpu = (time.process_time() - cpu_since) / (time.perf_counter() - since)
        await client.wait()
        await target.stop()
    device = target.device
    return {
        "streams": num_streams,
        "fronts": num_fronts,
        "host_us": _figures(device.host_s),
        "host_cpu_us": _figures(device.host_cpu_s),
        "late_us": _figures(device.late_s),
        "core_process_cpu": round(cpu, 2),
        **received,
    }


def _figures(seconds: list[float]) -> dict[str, int]:
    us = sorted(s * 1e6 for s in seconds)
    return {
        "median": round(statistics.median(us)), "mean": round(statistics.fmean(us)),
        "p99": round(us[int(0.99 * (len(us) - 1))]), "steps": len(us),
    }  # fmt: skip


def main() -> None:
    """Measure all combinations, a JSON line each."""
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
