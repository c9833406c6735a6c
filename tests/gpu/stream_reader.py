"""Requests that a process of its own sends and reads: see served_rig. No torch: it takes seconds to load."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from common.pb.tandem.v1 import target_pb2
from tests.fault.crowd import Ask
from tools.target_client import Answer, CallFailed, ReceivedDelta, TargetClient


@dataclass(frozen=True)
class Read:
    """An answer as it can travel between processes."""

    deltas: list[ReceivedDelta]
    finished: bytes

    @property
    def answer(self) -> Answer:
        return Answer(self.deltas, target_pb2.Finished.FromString(self.finished))


def read_all(address: str, asks: Sequence[Ask]) -> list[Read]:
    """All of them at once, to their ends. Raises RuntimeError with what a call failed with."""

    def read(ask: Ask) -> Read:
        answer = client.generate(ask.prompt, ask.options)
        return Read(answer.deltas, answer.finished.SerializeToString())

    with TargetClient(address) as client, ThreadPoolExecutor(len(asks)) as threads:
        try:
            return list(threads.map(read, asks))
        except CallFailed as error:
            # Its own kind does not travel.
            raise RuntimeError(str(error)) from None
