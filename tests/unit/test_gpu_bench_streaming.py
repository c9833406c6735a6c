"""Reader processes over real streams of a scripted target, and the two rows of a level."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import psutil
import pytest

from common.metrics import Metrics, serve_metrics
from services.target.metrics import PREFIX, TargetMetrics
from tests.core_rig import COUNTING_VOCAB
from tests.fakes import ScriptedTarget
from tests.unit.test_gpu_bench_jobs import PLAN, contender
from tools.gpu_bench import stream_readers
from tools.gpu_bench.core_load import BenchFailed
from tools.gpu_bench.plan import Job, Mode
from tools.gpu_bench.stream_readers import StreamLoad, StreamReaders
from tools.gpu_bench.streaming import Served, StreamMeter, streams_table
from tools.local_stack import free_ports

LOAD = StreamLoad(seed=random.randrange(2**32), prompt_tokens=5, max_new_tokens=11, vocab_size=COUNTING_VOCAB)


def counting(prompt: list[int], drafting: bool) -> list[int]:
    return [(prompt[-1] + i) % COUNTING_VOCAB for i in range(1, 400)]


@pytest.fixture
def target() -> Iterator[tuple[ScriptedTarget, str]]:
    """A target and its address."""
    with ExitStack() as stack:
        # tmp_path may be longer than a socket's path can be.
        address = f"unix:{stack.enter_context(tempfile.TemporaryDirectory())}/target.sock"
        scripted = ScriptedTarget(counting, tokens_a_message=4, pause_s=0.01)
        stack.enter_context(scripted.serving(address))
        yield scripted, address


def readers_alive() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "stream_readers" in " ".join(child.cmdline())]


def test_readers_in_two_processes_ask_each_prompt_once_and_report_every_token(
    target: tuple[ScriptedTarget, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted, address = target
    monkeypatch.setattr(stream_readers, "STREAMS_A_PROCESS", 2)
    began_s = time.perf_counter()
    with StreamReaders(address, 3, LOAD) as readers:
        assert len(readers_alive()) == 2
        # Nothing is asked before the word is given.
        assert scripted.requests == []
        streams = readers.run_to_host()
    assert sorted(list(r.input_ids) for r in scripted.requests) == sorted(LOAD.prompt(i) for i in range(3))
    assert [sum(len(d.token_ids) for d in stream) for stream in streams] == [11, 11, 11]
    assert all([len(d.token_ids) for d in stream] == [4, 4, 3] for stream in streams)
    # Their clock is ours.
    assert all(began_s < d.at_s < time.perf_counter() for stream in streams for d in stream)
    assert readers_alive() == []


def test_a_target_that_is_not_there_fails_the_bench_and_leaves_no_reader() -> None:
    with tempfile.TemporaryDirectory() as directory:
        with pytest.raises(BenchFailed, match="a reader of streams did not start"):
            with StreamReaders(f"unix:{directory}/nobody.sock", 1, LOAD):
                pass
    assert readers_alive() == []


def test_each_level_has_a_row_of_the_core_and_one_of_the_streams(target: tuple[ScriptedTarget, str]) -> None:
    plan = replace(PLAN, job=Job.STREAMING, modes=(Mode.PLAIN,), concurrency=(1, 2), num_rounds=1)
    metrics = Metrics(PREFIX, "m")
    TargetMetrics(metrics)
    (port,) = free_ports(1)
    page = serve_metrics(metrics.registry, "127.0.0.1", port)
    try:
        served = Served(target[1], f"http://127.0.0.1:{port}/metrics")
        meter = StreamMeter(plan, contender(Mode.PLAIN)[0], served, COUNTING_VOCAB, lambda: None)
        order: list[int] = []
        meter.run(lambda row: order.append(row.concurrency))
    finally:
        page.close()
    assert order == [1, 1, 1, 1, 2, 2, 2, 2]
    assert len(order) == meter.num_rounds
    rows = meter.as_json()
    assert [(row["through"], row["mode"], row["concurrency"]) for row in rows] == [
        ("core", "plain", 1), ("core", "plain", 2), ("grpc", "plain", 1), ("grpc", "plain", 2),
    ]  # fmt: skip
    for row in rows:
        assert row["tok_s"] > 0 and row["step_ms"] > 0
    # Four tokens a message, one message in 10 ms, no prompt to speak of.
    assert rows[2]["tok_s"] == pytest.approx(400, rel=0.3)
    assert rows[2]["tok_s_end_to_end"] < 440
    assert rows[2]["tokens_a_message"] == 4
    assert streams_table(meter).row_count == 2
