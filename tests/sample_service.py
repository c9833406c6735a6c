"""A process that serves gRPC health and nothing else, for tests of whatever starts services.

python -m tests.sample_service ADDRESS [--fail | --not-serving | --ignore-sigterm]
"""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


def main(address: str, flags: list[str]) -> None:
    """Serve until SIGTERM."""
    if "--fail" in flags:
        sys.exit("error: threads: must be 1 to 9, got 0")
    # Blocked before gRPC's threads exist, so that the wait below is the only one to get it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    Path(address.removeprefix("unix:")).unlink(missing_ok=True)
    servicer = health.HealthServicer()
    if "--not-serving" in flags:
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()
    while signal.sigwait({signal.SIGTERM}) and "--ignore-sigterm" in flags:
        continue
    server.stop(grace=None).wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
