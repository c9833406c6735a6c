"""How large the engines of a plan must be. Numbers only; no torch.

Everything is allocated at its largest before the first graph is captured, and only what the plan can use
gets a graph: a graph costs some 0.1 s, and its kernels seconds where they were never compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.gpu_bench.plan import GpuPlan, Job

# As the services have it.
TARGET_PAGE_SIZE = 16
DRAFT_PAGE_SIZE = 64
# Prompt rows of a launch: 16 prompts of 128. More make those who decode wait longer, fewer cost throughput.
_EXTEND_ROWS_MAX = 2048
_EXTENDS_MAX = 32
# What a step in flight may add beside the block that is verified: see LanesScheduler and InprocessDrafter.
_BLOCKS_AHEAD = 4


@dataclass(frozen=True)
class Sizes:
    """num_lanes: requests at once; max_len: tokens of one. lane_buckets, extend_buckets: what gets a graph,
    rising. block_size is 1 without a draft."""

    num_lanes: int
    max_len: int
    block_size: int
    extend_rows_max: int
    extends_max: int
    lane_buckets: tuple[int, ...]
    extend_buckets: tuple[int, ...]

    @classmethod
    def of(cls, plan: GpuPlan, block_size: int | None) -> Sizes:
        """For all levels of the plan."""
        lanes = sorted({1, *plan.concurrency} if plan.job is Job.IDENTITY else set(plan.concurrency))
        prompt_rows = plan.prompt_tokens
        extend_rows_max = max(prompt_rows, min(_EXTEND_ROWS_MAX, lanes[-1] * prompt_rows))
        extend_buckets = [extend_rows_max]
        while prompt_rows < extend_rows_max:
            extend_buckets.insert(-1, prompt_rows)
            prompt_rows *= 2
        return cls(
            num_lanes=lanes[-1],
            max_len=plan.prompt_tokens + plan.max_new_tokens,
            block_size=block_size or 1,
            extend_rows_max=extend_rows_max,
            extends_max=_EXTENDS_MAX,
            lane_buckets=tuple(lanes),
            extend_buckets=tuple(extend_buckets),
        )

    @property
    def num_rows_max(self) -> int:
        """Rows of a forward."""
        return max(self.num_lanes * self.block_size, self.extend_rows_max)

    @property
    def num_pages(self) -> int:
        """Pages of the target that all lanes need at their longest."""
        return self.num_lanes * self._pages_each(TARGET_PAGE_SIZE)

    @property
    def num_draft_pages(self) -> int:
        """Likewise of the drafter."""
        return self.num_lanes * self._pages_each(DRAFT_PAGE_SIZE)

    @property
    def draft_kv_tokens(self) -> int:
        """The drafter's pages in tokens, as its service wants it said."""
        return self.num_draft_pages * DRAFT_PAGE_SIZE

    def _pages_each(self, page_size: int) -> int:
        return -(-(self.max_len + _BLOCKS_AHEAD * self.block_size) // page_size)
