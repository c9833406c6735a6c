"""Whether a draft's blocks fit the memory of the device, and which turned out not to. No torch.

Knows numbers of bytes; what needs them and how many are free is others' to say.
"""

from __future__ import annotations

from collections.abc import Callable

from common.contract import DraftContract, Mismatch
from common.errors import TandemError

# What failed although it seemed to fit is not tried again before so much more is free: to try stops every
# request for as long as the graphs take, seconds.
_RETRY_MARGIN_BYTES = 256 << 20


class DraftDoesNotFit(TandemError):
    """The device has no memory for what a drafter's contract asks; `mismatch` names the field. Whoever raises
    it can still decode plainly."""

    def __init__(self, mismatch: Mismatch) -> None:
        super().__init__(str(mismatch))
        self.mismatch = mismatch


def too_wide(draft: DraftContract, ours: str) -> DraftDoesNotFit:
    """The refusal of a draft; `ours` states what would be right."""
    num_layers = len(draft.captured_layer_ids)
    return DraftDoesNotFit(Mismatch("block_size", ours, f"{draft.block_size}, of {num_layers} layers"))


class DraftFit:
    """Asks before anything is allocated, and remembers where the answer was wrong."""

    def __init__(self, free_bytes: Callable[[], int]) -> None:
        self._free_bytes = free_bytes
        # By block size, which the contract bounds.
        self._failed_with: dict[int, int] = {}

    def require(self, draft: DraftContract, num_bytes: int, given_back: int) -> None:
        """Raises DraftDoesNotFit unless num_bytes can be had once given_back are free, too."""
        needed = max(num_bytes, self._failed_with.get(draft.block_size, 0))
        available = self._free_bytes() + given_back
        if needed > available:
            raise too_wide(draft, f"what fits {_mib(available)} that are free, not {_mib(needed)}")

    def failed(self, draft: DraftContract) -> DraftDoesNotFit:
        """It was allocated in vain, and all of that is free again."""
        available = self._free_bytes()
        self._failed_with[draft.block_size] = available + _RETRY_MARGIN_BYTES
        return too_wide(draft, f"what fits {_mib(available)} that are free")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB"
