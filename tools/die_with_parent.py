"""Runs a command that dies when whoever started it dies, however that happens.

    python -m tools.die_with_parent COMMAND [ARGUMENT ...]

The kernel's wish survives exec, so the command needs to know nothing of it. Elsewhere than on Linux
the command simply runs. Must import next to nothing: it stands before each service's own start.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    """Ask for SIGKILL at the parent's death and become the command."""
    if not argv:
        sys.exit("usage: python -m tools.die_with_parent COMMAND [ARGUMENT ...]")
    if sys.platform == "linux":
        parent = os.getppid()
        # SIGKILL, because a stopped or wedged service would sleep through anything milder.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            sys.exit("the parent died before its death could be watched")
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
