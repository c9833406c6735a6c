"""How long CPU threads that wait for each other spin. Must be set before torch is first imported.

A step has some 250 parallel regions a few µs apart, so a waiting thread must spin rather than sleep. But
target and drafter take turns on the same CPUs, and libgomp's 3 ms of spinning after the last region of
one runs against the first of the other: a drafted step of SmolLM2 on two cores took 116 and 123 ms, and 96
and 98 with this setting (means of two answers each, one run; in a later run noise hid the difference).
"""

from __future__ import annotations

import os

# About 0.2 ms: longer than any gap within a step, shorter than anything that would matter to the other.
_SPINS = 20_000


def limit_spinning() -> None:
    """Set libgomp's spin count, unless the environment says how threads wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPINS))
