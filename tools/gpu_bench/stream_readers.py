"""Callers of a target in a process of their own: some streams at once, and when each message came.

    python -m tools.gpu_bench.stream_readers --address unix:/… --first 0 --streams 32 …

Writes `ready` when connected, waits for a line on its input, runs, and writes JSON: for each stream a list
of [seconds, tokens], seconds of time.perf_counter, which processes of one machine share on Linux.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common.errors import TandemError
from tools.closed_loop import at_once
from tools.gpu_bench.core_load import BenchFailed
from tools.gpu_bench.prompts import RandomPrompts
from tools.target_client import GenerateOptions, ReceivedDelta, TargetClient

_ROOT = Path(__file__).resolve().parents[2]
# A stream's messages cost their reader some 100 µs each: 32 streams at 100 steps a second are a third of a
# core.
STREAMS_A_PROCESS = 32


@dataclass(frozen=True)
class StreamLoad:
    """What each stream asks. Stream i's prompt depends on seed and i alone."""

    seed: int
    prompt_tokens: int
    max_new_tokens: int
    vocab_size: int

    def prompt(self, number: int) -> list[int]:
        prompts = RandomPrompts(self.vocab_size, self.prompt_tokens)
        return prompts.measured(random.Random(f"{self.seed} {number}"), number)


class StreamReaders:
    """Reader processes, started and connected in the block; leaving it ends them."""

    def __init__(self, address: str, num_streams: int, load: StreamLoad) -> None:
        self._address, self._num_streams, self._load = address, num_streams, load
        self._ending = ExitStack()
        self._children: list[subprocess.Popen[str]] = []

    def __enter__(self) -> StreamReaders:
        with ExitStack() as ending:
            for first in range(0, self._num_streams, STREAMS_A_PROCESS):
                count = min(STREAMS_A_PROCESS, self._num_streams - first)
                child = ending.enter_context(_start(self._address, first, count, self._load))
                # Ended before it is waited for.
                ending.callback(child.kill)
                self._children.append(child)
            for child in self._children:
                assert child.stdout is not None
                if child.stdout.readline() != "ready\n":
                    raise BenchFailed("a reader of streams did not start")
            self._ending = ending.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.close()

    def run_to_host(self) -> list[list[ReceivedDelta]]:
        """All streams at once, each to its end: the messages of each, their tokens counted, not kept."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write("go\n")
            child.stdin.flush()
        streams: list[list[ReceivedDelta]] = []
        for child in self._children:
            text, _ = child.communicate()
            if child.returncode != 0:
                raise BenchFailed(f"a reader of streams ended with status {child.returncode}")
            streams += [
                [ReceivedDelta([0] * count, [False] * count, at_s) for at_s, count in stream]
                for stream in json.loads(text)
            ]
        return streams


def _start(address: str, first: int, count: int, load: StreamLoad) -> subprocess.Popen[str]:
    arguments = {
        "address": address,
        "first": first,
        "streams": count,
        "seed": load.seed,
        "prompt-tokens": load.prompt_tokens,
        "max-new-tokens": load.max_new_tokens,
        "vocab-size": load.vocab_size,
    }
    flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    module = [sys.executable, "-m", "tools.gpu_bench.stream_readers"]
    die_with_us = [sys.executable, "-m", "tools.die_with_parent"]
    return subprocess.Popen(
        [*die_with_us, *module, *flags],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def main(argv: Sequence[str]) -> int:
    """The child; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_bench.stream_readers")
    parser.add_argument("--address", required=True)
    for name in ("first", "streams", "seed", "prompt-tokens", "max-new-tokens", "vocab-size"):
        parser.add_argument(f"--{name}", type=int, required=True)
    given = parser.parse_args(argv)
    load = StreamLoad(given.seed, given.prompt_tokens, given.max_new_tokens, given.vocab_size)
    options = GenerateOptions(max_new_tokens=load.max_new_tokens, seed=0, ignore_eos=True)
    prompts = [load.prompt(given.first + i) for i in range(given.streams)]
    try:
        with TargetClient(given.address) as client:
            client.server_facts()
            print("ready", flush=True)
            sys.stdin.readline()
            answers = at_once([partial(client.generate, prompt, options) for prompt in prompts])
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    json.dump([[(d.at_s, len(d.token_ids)) for d in answer.deltas] for answer in answers], sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
