"""How many tokens the KV pool of a GPU holds where nobody says: what is left once all else has its place.

Numbers of bytes only; no torch.
"""

from __future__ import annotations

from common import limits
from common.errors import ConfigError

# Of what is left over. The rest is for what nobody counts: kernels as they are loaded, fragments, and
# whoever else comes to the GPU, such as a drafter.
SHARE = 0.85
# The graphs of plain steps and those that verify: some 30 each, of a few hundred kernels.
GRAPH_BYTES = 1 << 30
# What a drafter that nobody has met yet is taken for: that of published drafts.
BLOCK_SIZE = 16
NUM_CAPTURED_LAYERS = 5


def kv_tokens_that_fit(
    *, free_bytes: int, other_bytes: int, token_bytes: int, page_size: int, tokens_useful: int
) -> int:
    """Whole pages of tokens. free_bytes: of the GPU, with the weights on it. other_bytes: of what will still
    be allocated. token_bytes: a token's K/V in all layers. tokens_useful: what all requests that run can
    hold, more is no use. ConfigError when not even a page fits."""
    room = int(SHARE * (free_bytes - other_bytes))
    num_tokens = min(room // token_bytes, tokens_useful, limits.KV_TOKENS_MAX)
    num_tokens -= num_tokens % page_size
    if num_tokens < page_size:
        needs = f"{free_bytes >> 20} MiB are free, and {other_bytes >> 20} go to other things"
        problem = f"cannot be chosen, since {needs}"
        raise ConfigError("kv_tokens", problem, given=None)
    return num_tokens
