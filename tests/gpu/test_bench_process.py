"""`tandem bench --device cuda` as a person runs it, on a tiny shape: every mode, and what is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(400),  # compiles, in three processes
]
# The drafter is a service of its own here, with all that services need.
for name in ("pydantic_settings", "structlog", "grpc_health"):
    pytest.importorskip(name)

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--random", "tiny", "--prompt-tokens", "16", "--max-new-tokens", "40"]


def bench(out: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    command = [sys.executable, "-m", "tools.cli", "bench", "--device", "cuda", *TINY, *arguments]
    done = subprocess.run(
        [*command, "--json", str(out)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout


def test_every_mode_is_measured_in_one_run_with_nothing_doubtful(tmp_path: Path) -> None:
    result, shown = bench(
        tmp_path / "rows.json", "--concurrency", "1,3", "--synthetic-accept-length", "2.5", "--rounds", "2"
    )
    assert result["accept"]["kind"] == "synthetic" and "synthetic" in shown
    modes = ("plain", "inprocess", "inline", "device")
    assert [(r["mode"], r["concurrency"]) for r in result["rows"]] == [(m, n) for n in (1, 3) for m in modes]
    for row in result["rows"]:
        assert row["tok_s"] > 0 and 0 < row["floor_fraction"] < 1
        assert {"verify", "host", "wait"} <= set(row["phases_ms"])
        if row["mode"] != "plain":
            assert row["accept_length"] == pytest.approx(2.5, abs=0.3)
            assert row["undrafted_share"] < 0.1
            assert row["phases_ms"]["draft"] > 0
        if row["mode"] != "inline":
            assert row["host_syncs"] == 0


def test_row_independent_numerics_give_the_same_tokens_in_every_company(tmp_path: Path) -> None:
    result, _ = bench(
        tmp_path / "identity.json", "--identity", "24", "--concurrency", "8", "--row-independent"
    )
    assert [(c["mode"], c["concurrency"], c["prompts_that_differ"]) for c in result["identity"]] == [
        ("plain", 8, 0), ("inprocess", 1, 0), ("inprocess", 8, 0),
    ]  # fmt: skip
    assert result["identity"][1]["accept_length"] > 1.5


@pytest.mark.parametrize("mode", ["inprocess", "device"])
def test_a_short_soak_leaves_nothing_behind(tmp_path: Path, mode: str) -> None:
    result, shown = bench(
        tmp_path / "soak.json", "--soak", "400", "--modes", mode, "--concurrency", "6"
    )
    assert result["soak"]["complaints"] == []
    assert "every page accounted for" in shown
