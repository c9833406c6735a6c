"""The other process of the hand-off's GPU tests: does what it reads from stdin, a line at a time.

The first line is its role: `drafter PATH TOKEN NUM_BYTES` maps the ring, `owner` makes one and offers it,
`crowd` waits. Each line that is done is answered by one line.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common.handoff.descriptor_socket import close_all, fetch_descriptors, giving_descriptors
from common.handoff.device_memory import DeviceMemory, import_memory
from common.handoff.flags import FlagMemory
from common.handoff.ring import Ring, RingShape

SHAPE = RingShape(16, 16, 15, 20480, torch.bfloat16, 512)
SLOT = 3
DEVICE = torch.device("cuda", 0)
FAR_AHEAD = 1 << 30


class Drafter:
    """Drafts anchor + 1, anchor + 2, … of each row, plus the first captured state."""

    def __init__(self, path: str, token: str, num_bytes: str) -> None:
        descriptors = fetch_descriptors(path, bytes.fromhex(token), 2, 10.0)
        self.ring = Ring.over(SHAPE, import_memory(descriptors[0], int(num_bytes), DEVICE))
        self.flags = FlagMemory(descriptors[1]).register().pair(SLOT)
        close_all(descriptors)
        self.stream = torch.cuda.Stream(DEVICE)
        self.offsets = torch.arange(1, 16, dtype=torch.int32, device=DEVICE)
        # A kernel is loaded when it is first launched, which waits for all that the device has to do.
        self._draft()
        torch.cuda.synchronize()

    def _draft(self) -> None:
        first = self.ring.verify_captured[::16, :1].int()
        self.ring.drafts.copy_(self.ring.anchor[:, None] + self.offsets + first)

    def work(self, sequence: str) -> str:
        """Enqueue a step behind its flags."""
        with torch.cuda.stream(self.stream):
            self.flags.ready.enqueue_wait(int(sequence), self.stream)
            self._draft()
            self.flags.done.enqueue_write(int(sequence), self.stream)
        return "enqueued"

    def release(self, sequence: str) -> str:
        """The target is gone: let the stream go on."""
        self.flags.ready.store(int(sequence) + FAR_AHEAD)
        return "released"

    def compute(self) -> str:
        """Whether the CUDA context still works."""
        torch.cuda.synchronize()
        return str(int((torch.ones(1000, device=DEVICE) * 2).sum()))


class Crowd:
    """Many streams that wait for one word, more than there are hardware queues."""

    def wait(self, num_streams: str) -> str:
        """Let them all go on by a store."""
        memory, _ = FlagMemory.create()
        flag = memory.register().pair(0).done
        streams = [torch.cuda.Stream(DEVICE) for _ in range(int(num_streams))]
        for stream in streams:
            flag.enqueue_wait(1, stream)
        time.sleep(0.2)
        if any(stream.query() for stream in streams):
            return "some did not wait"
        flag.store(1)
        for stream in streams:
            stream.synchronize()
        return "all went on"


def obey(verbs: object, say: Callable[[str], None]) -> None:
    """Do each line until stdin ends."""
    for line in sys.stdin:
        verb, *arguments = line.split()
        say(getattr(verbs, verb)(*arguments))


def say(text: str) -> None:
    print(text, flush=True)


async def own() -> None:
    """Make a ring, offer it, and wait to be killed."""
    memory = DeviceMemory(SHAPE.num_bytes, DEVICE)
    _, flags_descriptor = FlagMemory.create()
    with tempfile.TemporaryDirectory() as parent:
        async with giving_descriptors([memory.export(), flags_descriptor], Path(parent)) as (path, token):
            say(f"{path} {token.hex()} {memory.num_bytes}")
            await asyncio.sleep(120)


if __name__ == "__main__":
    role, *arguments = sys.stdin.readline().split()
    if role == "owner":
        asyncio.run(own())
    else:
        verbs = Drafter(*arguments) if role == "drafter" else Crowd()
        say("mapped")
        obey(verbs, say)
