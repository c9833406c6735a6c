"""One thread of a service works on several CPU threads; the others on one."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, threading
from common.threads import confine_tensor_work, spread_tensor_work
import torch
from torch.nn.functional import silu

def num_tasks():
    return len(os.listdir("/proc/self/task"))

confine_tensor_work()
before = num_tasks()
silu(torch.randn(1 << 20))
print("main", num_tasks() - before)

def serve():
    spread_tensor_work(2)
    silu(torch.randn(1 << 20))
    print("serving", torch.get_num_threads(), num_tasks() - before - 1)

thread = threading.Thread(target=serve)
thread.start()
thread.join()
"""


def test_only_the_serving_thread_gets_a_pool_of_cpu_threads() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    # The main thread's work starts no pool, so that libgomp counts one pool only.
    assert run.stdout.splitlines() == ["main 0", "serving 2 1"]
