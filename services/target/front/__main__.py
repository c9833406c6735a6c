"""`python -m services.target.front FD`: a front over the inherited socket FD, started by a target.

Exit status: see services.target.front.process.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import socket
import sys

from common.errors import TandemError
from common.lifecycle import leave
from services.target.front.process import run_front

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Run the front; the exit status."""
    if len(arguments) != 1 or not arguments[0].isdecimal():
        print("error: a front is started by python -m services.target --fronts N", file=sys.stderr)
        return 2
    # Ctrl-C, and whoever ends a whole group of processes, reach the core as well: it drains, and says when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _wake_when_core_dies()
    try:
        return asyncio.run(run_front(socket.socket(fileno=int(arguments[0]))))
    except TandemError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _wake_when_core_dies() -> None:
    """A core that dies closes its end of the socket, which ends a front that runs. One that is stopped must
    be woken to learn it; SIGKILL instead would take the statuses from its streams."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
