"""A target service in processes of its own, for the streaming rows; with a drafter where the mode asks.

Composition only.
"""

from __future__ import annotations

import contextlib

from common.model_dir import resolve_model_dir
from common.pb.tandem.v1 import target_pb2
from tools.child_service import ChildService
from tools.gpu_bench.core_load import BenchFailed
from tools.gpu_bench.plan import GpuPlan, Mode
from tools.gpu_bench.remote import DrafterProcess, private_directory
from tools.gpu_bench.sizes import TARGET_PAGE_SIZE, Sizes
from tools.gpu_bench.streaming import Served
from tools.launch import wait_for_drafter
from tools.local_stack import START_DEADLINE_S, STOP_GRACE_S, free_ports
from tools.target_client import TargetClient

# A front fills a core with some 16,000 messages a second; 64 streams at 100 steps a second are 6,400.
_STREAMS_A_FRONT = 64


class TargetProcesses:
    """The service of one mode: loading from `start` on, ready after `wait_serving`; `close` ends it."""

    def __init__(self, plan: GpuPlan, sizes: Sizes, mode: Mode) -> None:
        self.num_fronts = -(-sizes.num_lanes // _STREAMS_A_FRONT)
        self._ending = contextlib.ExitStack()
        self._directory = private_directory(self._ending)
        port, metrics_port = free_ports(2)
        self.served = Served(f"127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}/metrics")
        self._drafter: DrafterProcess | None = None
        flags = [
            "--device", plan.device, "--page-size", str(TARGET_PAGE_SIZE), "--fronts", str(self.num_fronts),
            "--kv-tokens", str(sizes.num_pages * TARGET_PAGE_SIZE), "--max-len", str(sizes.max_len),
            "--num-running-max", str(sizes.num_lanes), "--extend-rows-max", str(sizes.extend_rows_max),
            "--listen", self.served.address, "--metrics-port", str(metrics_port),
        ]  # fmt: skip
        if plan.row_independent:
            flags.append("--row-independent")
        if mode is not Mode.PLAIN:
            self._drafter = DrafterProcess(plan, sizes)
            self._ending.callback(self._drafter.close)
            flags += ["--drafter", self._drafter.service.address, "--handoff", mode.value]
        if plan.random_shape is not None:
            argv = ["tools.gpu_bench.random_target", plan.random_shape, *flags]
        else:
            assert plan.model is not None
            argv = ["services.target", "--model", str(resolve_model_dir(plan.model)), *flags]
        log_path = self._directory / "target.log"
        self._target = ChildService("target", argv, address=self.served.address, log_path=log_path)
        self._ending.callback(self._target.stop, STOP_GRACE_S)

    def start(self) -> None:
        if self._drafter is not None:
            self._drafter.start()
        self._target.start()

    def wait_serving(self) -> None:
        """ServiceFailed when one does not come up, BenchFailed when they do not come together."""
        if self._drafter is not None:
            self._drafter.wait_serving()
        self._target.wait_serving(START_DEADLINE_S)
        if self._drafter is None:
            return
        with TargetClient(self.served.address) as client:
            facts = wait_for_drafter(client)
        if facts.drafter_state != target_pb2.DRAFTER_STATE_UP:
            raise BenchFailed("the service and its drafter do not come together")

    def close(self) -> None:
        self._ending.close()
