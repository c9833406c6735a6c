"""What the drafter measures. All series exist at 0 from the start.

Fed with host numbers that are already in hand; must not look at tensors or at the session table.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.handoff.transport import Outcome
from common.metrics import Metrics
from services.drafter.session import CloseReason
from services.drafter.step import StepReply

PREFIX = "tandem_drafter"

_PHASES = ("queue", "ingest", "draft", "total")
# From a tiny model's append to a full batch on a busy CPU.
_TIME_BUCKETS_S = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class DrafterMetrics:
    """The names of the drafter; implements SessionObserver."""

    def __init__(self, metrics: Metrics, bytes_per_context_row: int, num_draft_tokens: int) -> None:
        """bytes_per_context_row: size of one token's captured hidden states. num_draft_tokens: of a block."""
        self._bytes_per_context_row = bytes_per_context_row
        self._num_draft_tokens = num_draft_tokens
        self._time = metrics.histograms(
            "draft_time_seconds", "Time of a message by phase.", _TIME_BUCKETS_S, "phase", _PHASES
        )
        self._batch_size = metrics.histogram(
            "draft_batch_size", "Blocks drafted together.", _BATCH_BUCKETS
        )  # fmt: skip
        self._num_sessions = metrics.gauge("num_sessions", "Open sessions.")
        self._queue_depth = metrics.gauge("queue_depth", "Messages that wait for the engine.")
        self._kv_usage = metrics.gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.")
        self._unaccounted = metrics.gauge(
            "pages_unaccounted", "KV pages neither free nor owned; not 0 is a bug."
        )
        self._lanes_unaccounted = metrics.gauge(
            "lanes_unaccounted", "Device lanes neither free nor owned; not 0 is a bug."
        )
        self._heartbeat_age = metrics.gauge(
            "gpu_thread_heartbeat_age_seconds",
            "How long the engine's thread has been at its present job, or the device at a step whose states "
            "are there.",
        )
        self._opened = metrics.counter("sessions_opened_total", "Sessions opened or re-opened.")
        self._closed = metrics.counters(
            "sessions_closed_total", "Sessions ended.", "reason", [reason.value for reason in CloseReason]
        )
        self._outcomes = metrics.counters(
            "session_outcome_total", "Outcomes by session and message.", "outcome",
            [outcome.name.lower() for outcome in Outcome],
        )  # fmt: skip
        self._context_tokens = metrics.counter("context_tokens_total", "Context rows stored.")
        self._ingest_bytes = metrics.counter("ingest_bytes_total", "Bytes of captured hidden states stored.")
        self._draft_tokens = metrics.counter("draft_tokens_total", "Tokens proposed.")

    def observe_opened(self) -> None:
        self._opened.inc()

    def observe_closed(self, reason: CloseReason) -> None:
        self._closed[reason.value].inc()

    def observe_step(self, reply: StepReply, queue_s: float, total_s: float) -> None:
        """A message that was answered; phases in which nothing was done are not counted as 0."""
        self._time["queue"].observe(queue_s)
        self._time["total"].observe(total_s)
        if reply.num_context_rows:
            self._time["ingest"].observe(reply.ingest_s)
            self._context_tokens.inc(reply.num_context_rows)
            self._ingest_bytes.inc(reply.num_context_rows * self._bytes_per_context_row)
        if reply.num_blocks:
            self._time["draft"].observe(reply.draft_s)
            self._batch_size.observe(reply.num_blocks)
            self._draft_tokens.inc(reply.num_blocks * self._num_draft_tokens)
        self._count(verdict.outcome for verdict in reply.verdicts)

    def observe_table(
        self, num_sessions: int, usage: float, num_pages_unaccounted: int, num_lanes_unaccounted: int
    ) -> None:
        """The session table as it is now."""
        self._num_sessions.set(num_sessions)
        self._kv_usage.set(usage)
        self._unaccounted.set(num_pages_unaccounted)
        self._lanes_unaccounted.set(num_lanes_unaccounted)

    def observe_engine(self, queue_depth: int, heartbeat_age_s: float) -> None:
        """The engine's thread and the device as they are now."""
        self._queue_depth.set(queue_depth)
        self._heartbeat_age.set(heartbeat_age_s)

    def _count(self, outcomes: Iterable[Outcome]) -> None:
        for outcome in outcomes:
            self._outcomes[outcome.name.lower()].inc()
