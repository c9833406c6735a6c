"""What the target measures: the core's Observer and the drafter link's, as Prometheus metrics.

Called on the core's and the link's threads with host integers that are already there. Knows no grpc, no
torch. A name of the product's list that has no meaning yet (graphs, prefix cache) is absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from common import limits
from common.metrics import Metrics
from services.target.core.draft_source import PlainReason
from services.target.core.handoff_choice import FALLBACKS
from services.target.core.report import CoreStats, StepReport
from services.target.core.request import FinishReason, Request, RequestFinished

PREFIX = "tandem_target"

# Equal to those of vLLM, so that its dashboards port by prefix.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
    0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
_INTER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920
)  # fmt: skip
_STEP_S = (
    0.0002, 0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1
)  # fmt: skip
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5)) + (limits.CONTEXT_LEN_MAX,)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_BLOCK_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64)

FAILURES = ("unavailable", "internal", "non_finite")
REJECTIONS = ("invalid", "overloaded", "unavailable", "slow_reader", "slow_front")
RESYNCS = ("recaptured", "cold")
TRANSPORTS = ("inline", "device")
BREAKER_STATES = {"closed": 0, "half_open": 1, "open": 2}
# Fields of the handshake that can differ; `other` stands for one that is not listed.
CONTRACT_FIELDS = (
    "protocol_version", "transport", "drafter_instance_id", "hidden_size", "num_layers", "vocab_rows",
    "dtype", "captured_layer_ids", "block_size", "num_draft_tokens", "mask_token_id", "context_len_max",
    "weights_fingerprint", "target_instance_id", "gpu_uuid", "socket_path", "ring", "other",
)  # fmt: skip


class TargetMetrics:
    """The metrics of one target. Its methods are those of the observer protocols."""

    def __init__(self, metrics: Metrics) -> None:
        m = metrics
        self._first_token = m.histogram(
            "time_to_first_token_seconds", "From admission to the first token.", _FIRST_TOKEN_S
        )
        self._inter_token = m.histogram(
            "inter_token_latency_seconds",
            "Time a token took: the time since the request's previous commit over the tokens committed.",
            _INTER_TOKEN_S,
        )
        self._token_times: list[tuple[float, int]] = []
        self._latency = m.histogram(
            "e2e_request_latency_seconds", "From admission to the last token.", _REQUEST_S
        )
        self._queue = m.histogram(
            "request_queue_time_seconds", "From admission to the first step.", _REQUEST_S
        )
        self._prefill = m.histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", _REQUEST_S
        )
        self._decode = m.histogram(
            "request_decode_time_seconds", "From the first token to the last.", _REQUEST_S
        )
        self._request_prompt = m.histogram("request_prompt_tokens", "Prompt length of a request.", _TOKENS)
        self._request_output = m.histogram(
            "request_generation_tokens", "Output length of a request.", _TOKENS
        )
        self._running = m.gauge("num_requests_running", "Requests in the batch.")
        self._waiting = m.gauge("num_requests_waiting", "Requests that wait.")
        self._kv_usage = m.gauge("kv_cache_usage_perc", "Owned pages over all pages, 0 to 1.")
        self._unaccounted = m.gauge("pages_unaccounted", "Pages neither free nor a request's; must be 0.")
        self._prompt_tokens = m.counter("prompt_tokens_total", "Prompt tokens computed.")
        self._output_tokens = m.counter("generation_tokens_total", "Tokens committed.")
        self._preemptions = m.counter(
            "num_preemptions_total", "Requests that gave their pages back to recompute later."
        )
        self._success = m.counters(
            "request_success_total", "Requests that ended as they should.",
            "finished_reason", [reason.value for reason in FinishReason],
        )  # fmt: skip
        self._failure = m.counters(
            "request_failure_total", "Admitted requests that ended with an error.", "reason", FAILURES
        )
        self._rejected = m.counters(
            "request_rejected_total",
            "Requests that were refused, or dropped because of their reader or front.",
            "reason",
            REJECTIONS,
        )
        self._front_restarts = m.counter(
            "front_restarts_total", "Front processes that were lost; each is started again."
        )
        self._drafts = m.counter("spec_decode_num_drafts_total", "Draft blocks verified.")
        self._draft_tokens = m.counter("spec_decode_num_draft_tokens_total", "Draft tokens verified.")
        self._accepted_tokens = m.counter("spec_decode_num_accepted_tokens_total", "Draft tokens accepted.")
        accepted_at = m.counters(
            "spec_decode_num_accepted_tokens_per_pos_total", "Draft tokens accepted, by position.",
            "position", [str(i) for i in range(limits.BLOCK_SIZE_MAX - 1)],
        )  # fmt: skip
        self._accepted_at = list(accepted_at.values())
        self._accept_len = m.histogram(
            "spec_decode_accept_length", "Tokens that a verify committed, bonus included.", _BLOCK_ROWS
        )
        self._plain = m.counters(
            "plain_decode_steps_total", "Decode steps of requests without a draft.",
            "reason", [reason.value for reason in PlainReason],
        )  # fmt: skip
        self._step = m.histograms(
            "step_time_seconds",
            "Parts of a step: draft_wait; the forward, as prefill when some request ran more than one token "
            "of its own, else as verify; commit; host for all else. They add up to the step on a CPU and "
            "where drafts come by messages. On a GPU that runs ahead the forward is the device's time, and "
            "commit and host pass beside it.",
            _STEP_S, "phase", ("prefill", "verify", "draft_wait", "commit", "host"),
        )  # fmt: skip
        self._batch_size = m.histogram("step_batch_size", "Requests in a step.", _BATCH)
        self._verify_width = m.histogram("verify_width", "Rows of a verify, anchor included.", _BLOCK_ROWS)
        self._captured_bytes = m.counter("captured_bytes_total", "Captured hidden states.")
        self._drafter_up = m.gauge("drafter_up", "1 while a drafter is connected and fits.")
        self._breaker = m.gauge(
            "drafter_breaker_state", "0 closed (asked each step), 1 half-open, 2 open (probed)."
        )
        self._mismatch = m.gauges(
            "contract_mismatch", "1 while the drafter's field does not fit.", "field", CONTRACT_FIELDS
        )
        self._resyncs = m.counters(
            "drafter_resyncs_total", "Sessions opened again, with their context or without it.",
            "kind", RESYNCS,
        )  # fmt: skip
        self._transport = m.gauges(
            "handoff_transport", "1 for the transport of the connection in use.", "transport", TRANSPORTS
        )
        self._fallbacks = m.counters(
            "handoff_fallbacks_total",
            "Connections that hand over inline although the device was asked for.",
            "reason",
            FALLBACKS,
        )
        self._releases = m.counter(
            "watchdog_releases_total", "Times that the device was let go without its drafts."
        )

    # --- services.target.core.report.Observer --------------------------------------------------------

    def observe_step(self, report: StepReport, stats: CoreStats) -> None:
        """One step, with the state after it."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(1 - stats.num_pages_free / stats.num_pages)
        self._unaccounted.set(stats.pages_unaccounted)
        if report.num_requests == 0:
            return
        self._batch_size.observe(report.num_requests)
        self._prompt_tokens.inc(report.num_prompt_tokens)
        self._output_tokens.inc(report.num_generated_tokens)
        self._preemptions.inc(report.num_preemptions)
        self._captured_bytes.inc(report.captured_bytes)
        self._step["prefill" if report.extends else "verify"].observe(report.forward_s)
        self._step["draft_wait"].observe(report.draft_wait_s)
        self._step["commit"].observe(report.commit_s)
        self._step["host"].observe(report.host_s)
        self._inter_token.observe_all(self._token_times)
        self._token_times.clear()
        self._observe_verifies(report.verifies)
        for reason, count in Counter(report.plain).items():
            self._plain[reason.value].inc(count)

    def observe_first_token(self, request: Request) -> None:
        """The request's first token was committed."""
        assert request.first_token_at is not None
        self._first_token.observe(request.first_token_at - request.submitted_at)

    def observe_tokens(self, request: Request, count: int, interval_s: float) -> None:
        """`count` tokens were committed `interval_s` after the previous ones; told with the step's report."""
        self._token_times.append((interval_s / count, count))

    def observe_finished(self, request: Request, finished: RequestFinished) -> None:
        """The request ended as it should."""
        self._success[finished.reason.value].inc()
        self._request_prompt.observe(finished.num_prompt_tokens)
        self._request_output.observe(finished.num_output_tokens)
        self._queue.observe(finished.queue_s)
        self._prefill.observe(finished.prefill_s)
        self._decode.observe(finished.decode_s)
        self._latency.observe(finished.queue_s + finished.prefill_s + finished.decode_s)

    def observe_failed(self, request: Request, reason: str) -> None:
        """The request ended with an error; `reason` is one of FAILURES."""
        self._failure[reason].inc()

    # --- the fronts ----------------------------------------------------------------------------------

    def observe_rejected(self, reason: str) -> None:
        """A request was refused or dropped; `reason` is one of REJECTIONS."""
        self._rejected[reason].inc()

    def observe_front_restart(self) -> None:
        """A front process was lost, and will be started again."""
        self._front_restarts.inc()

    # --- the link to the drafter ---------------------------------------------------------------------

    def observe_drafter(self, up: bool, breaker: str) -> None:
        """The link as it is now; `breaker` is one of BREAKER_STATES."""
        self._drafter_up.set(int(up))
        self._breaker.set(BREAKER_STATES[breaker])

    def observe_mismatches(self, fields: Collection[str]) -> None:
        """The fields that do not fit now; none when all do."""
        listed = {name if name in self._mismatch else "other" for name in fields}
        for name, gauge in self._mismatch.items():
            gauge.set(int(name in listed))

    def observe_resync(self, kind: str) -> None:
        """A session was opened again; `kind` is one of RESYNCS."""
        self._resyncs[kind].inc()

    def observe_transport(self, transport: str | None) -> None:
        """How steps travel from now on; one of TRANSPORTS, or None without a connection."""
        for name, gauge in self._transport.items():
            gauge.set(int(name == transport))

    def observe_fallback(self, reason: str) -> None:
        """A connection goes inline although the device was asked for; `reason` is one of FALLBACKS."""
        self._fallbacks[reason].inc()

    def observe_watchdog_release(self) -> None:
        """The drafter was late, and the device was let go."""
        self._releases.inc()

    def _observe_verifies(self, verifies: list[tuple[int, int]]) -> None:
        """All of a step at once, since they are few different ones."""
        tally = Counter(verifies)
        self._drafts.inc(len(verifies))
        self._draft_tokens.inc(sum(num_drafts * count for (num_drafts, _), count in tally.items()))
        self._accept_len.observe_all((accepted + 1, count) for (_, accepted), count in tally.items())
        self._verify_width.observe_all((num_drafts + 1, count) for (num_drafts, _), count in tally.items())
        # How many accepted so many, from the most down: whoever accepted 3 accepted the first two as well.
        by_accepted = Counter(accepted for _, accepted in verifies)
        reached = 0
        for position in range(max(by_accepted, default=0), 0, -1):
            reached += by_accepted[position]
            self._accepted_at[position - 1].inc(reached)
            self._accepted_tokens.inc(reached)
