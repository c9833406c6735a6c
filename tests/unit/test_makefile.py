"""What `make` would run, told by make itself."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

ROOT = Path(__file__).parents[2]


def recipe(*arguments: str) -> str:
    """The last command of a dry run; not as a part of the make that may have started this test."""
    environment = {n: value for n, value in os.environ.items() if not n.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "--dry-run", *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    return " ".join(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ((), "tandem bench --peer transformers"),
        (("ARGS=--concurrency 1,4",), "tandem bench --peer transformers --concurrency 1,4"),
        (("ARGS=--device cpu",), "tandem bench --peer transformers --device cpu"),
        (("ARGS=--device cuda",), "tandem bench --device cuda"),
        (("ARGS=--random tiny --device cuda:1",), "tandem bench --random tiny --device cuda:1"),
        (("ARGS=--device=cuda:1",), "tandem bench --device=cuda:1"),
        (("BENCH_PEER=", "ARGS=--temperature 0.8"), "tandem bench --temperature 0.8"),
    ],
)
def test_the_bench_has_its_peer_on_a_cpu_only(arguments: tuple[str, ...], command: str) -> None:
    assert recipe("bench", *arguments) == f".venv/bin/{command}"
