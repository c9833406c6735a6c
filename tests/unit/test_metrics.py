"""Metrics: names exist at 0 from the start, values add up, the page answers."""

from __future__ import annotations

import socket
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from common.metrics import CommonMetrics, Metrics, serve_metrics
from services.target.core.draft_source import PlainReason
from services.target.core.report import CoreStats, StepReport
from services.target.core.request import FinishReason, Request, SamplingParams
from services.target.metrics import PREFIX, TargetMetrics

# The names of the product's list that have a meaning without graphs, prefix cache and shared memory.
TARGET_NAMES = """
time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds
request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_prompt_tokens request_generation_tokens
num_requests_running num_requests_waiting kv_cache_usage_perc pages_unaccounted
prompt_tokens_total generation_tokens_total num_preemptions_total
request_success_total request_failure_total request_rejected_total front_restarts_total
spec_decode_num_drafts_total spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total
spec_decode_num_accepted_tokens_per_pos_total spec_decode_accept_length plain_decode_steps_total
step_time_seconds step_batch_size verify_width
drafter_up drafter_breaker_state contract_mismatch drafter_resyncs_total captured_bytes_total
""".split()


def samples(registry: CollectorRegistry) -> dict[str, float]:
    """`name{label="value",…}` to value, without model_name."""
    found = {}
    for line in generate_latest(registry).decode().splitlines():
        if not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            series = series.replace('model_name="m",', "").replace(',model_name="m"', "")
            found[series.replace('{model_name="m"}', "")] = float(value)
    return found


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(PREFIX, "m")


def test_every_name_of_the_target_is_there_at_zero_from_the_start(metrics: Metrics) -> None:
    TargetMetrics(metrics)
    found = samples(metrics.registry)
    assert set(found.values()) == {0.0}
    for name in TARGET_NAMES:
        assert any(
            series.startswith(f"{PREFIX}_{name}{end}") for series in found for end in ("", "_count")
        ), name
    for reason in PlainReason:
        assert f'{PREFIX}_plain_decode_steps_total{{reason="{reason.value}"}}' in found


def test_no_series_is_without_the_models_name(metrics: Metrics) -> None:
    TargetMetrics(metrics)
    CommonMetrics(metrics, ["/a.B/C"])
    lines = generate_latest(metrics.registry).decode().splitlines()
    assert [line for line in lines if not line.startswith("#") and 'model_name="m"' not in line] == []


def test_a_step_adds_up(metrics: Metrics) -> None:
    observer = TargetMetrics(metrics)
    stats = CoreStats(num_running=2, num_waiting=3, num_pages=8, num_pages_free=6, pages_unaccounted=1)
    report = StepReport(num_rows=12, num_requests=3, num_prompt_tokens=4, num_generated_tokens=5)
    report.verifies = [(7, 3), (7, 0)]
    report.plain = [PlainReason.DEADLINE]
    report.captured_bytes = 640
    report.forward_s, report.draft_wait_s, report.commit_s, report.host_s = 0.01, 0.002, 0.0001, 0.0003
    observer.observe_step(report, stats)
    # The state alone: not a step.
    observer.observe_step(StepReport(), stats)
    found = {name.removeprefix(PREFIX + "_"): value for name, value in samples(metrics.registry).items()}
    assert found["num_requests_running"] == 2
    assert found["num_requests_waiting"] == 3
    assert found["kv_cache_usage_perc"] == 0.25
    assert found["pages_unaccounted"] == 1
    assert found["prompt_tokens_total"] == 4
    assert found["generation_tokens_total"] == 5
    assert found["spec_decode_num_drafts_total"] == 2
    assert found["spec_decode_num_draft_tokens_total"] == 14
    assert found["spec_decode_num_accepted_tokens_total"] == 3
    by_position = [
        found[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(4)
    ]
    assert by_position == [1, 1, 1, 0]
    assert found["spec_decode_accept_length_sum"] == 5
    assert found["verify_width_sum"] == 16
    assert found['plain_decode_steps_total{reason="deadline"}'] == 1
    assert found["captured_bytes_total"] == 640
    assert found["step_batch_size_count"] == 1
    assert found['step_time_seconds_sum{phase="verify"}'] == 0.01
    assert found['step_time_seconds_sum{phase="host"}'] == 0.0003
    assert found['step_time_seconds_count{phase="prefill"}'] == 0


def test_the_parts_of_a_step_are_said_to_add_up_only_where_they_do(metrics: Metrics) -> None:
    TargetMetrics(metrics)
    texts = {family.name: family.documentation for family in metrics.registry.collect()}
    text = texts["tandem_target_step_time_seconds"]
    assert "add up to the step on a CPU and where drafts come by messages" in text
    assert "pass beside it" in text


def test_many_observations_at_once_are_those_one_by_one(metrics: Metrics) -> None:
    buckets = (0.1, 1.0, 10.0)
    one_by_one = metrics.histogram("a", "a", buckets)
    at_once = metrics.histogram("b", "b", buckets)
    # On a bound, between, beyond the last; one of them never.
    observations = [(0.1, 3), (0.10001, 1), (1.0, 2), (50.0, 4), (7.0, 0)]
    for value, count in observations:
        for _ in range(count):
            one_by_one.observe(value)
    at_once.observe_all(observations)
    found = {name.removeprefix(PREFIX + "_"): value for name, value in samples(metrics.registry).items()}
    a, b = ({n[1:]: v for n, v in found.items() if n[0] == letter} for letter in "ab")
    assert a == pytest.approx(b)
    assert found["a_count"] == 10


def test_a_request_is_observed_from_first_token_to_end(metrics: Metrics) -> None:
    now = 100.0
    request = Request("r", [1, 2, 3], SamplingParams(), 8, frozenset(), True, emit=print, clock=lambda: now)
    request.started_at, request.first_token_at, request.last_token_at = 101.0, 103.0, 107.0
    observer = TargetMetrics(metrics)
    observer.observe_first_token(request)
    observer.observe_tokens(request, 4, 0.4)
    observer.observe_finished(request, request.finish(FinishReason.LENGTH))
    observer.observe_failed(request, "non_finite")
    stats = CoreStats(num_running=0, num_waiting=0, num_pages=8, num_pages_free=8, pages_unaccounted=0)
    observer.observe_step(StepReport(num_requests=1), stats)
    found = {name.removeprefix(PREFIX + "_"): value for name, value in samples(metrics.registry).items()}
    assert found["time_to_first_token_seconds_sum"] == 3
    assert found["inter_token_latency_seconds_count"] == 4
    assert found["inter_token_latency_seconds_sum"] == pytest.approx(0.4)
    assert found["request_queue_time_seconds_sum"] == 1
    assert found["request_prefill_time_seconds_sum"] == 2
    assert found["request_decode_time_seconds_sum"] == 4
    assert found["e2e_request_latency_seconds_sum"] == 7
    assert found['request_success_total{finished_reason="length"}'] == 1
    assert found['request_failure_total{reason="non_finite"}'] == 1


def test_the_link_to_the_drafter_shows_state_and_every_field_that_differs(metrics: Metrics) -> None:
    observer = TargetMetrics(metrics)
    observer.observe_drafter(False, "open")
    observer.observe_mismatches(["hidden_size", "a field of the future"])
    observer.observe_resync("cold")
    found = {name.removeprefix(PREFIX + "_"): value for name, value in samples(metrics.registry).items()}
    assert found["drafter_up"] == 0
    assert found["drafter_breaker_state"] == 2
    assert found['contract_mismatch{field="hidden_size"}'] == 1
    assert found['contract_mismatch{field="other"}'] == 1
    assert found['drafter_resyncs_total{kind="cold"}'] == 1
    observer.observe_drafter(True, "closed")
    observer.observe_mismatches([])
    found = samples(metrics.registry)
    assert found[f"{PREFIX}_drafter_up"] == 1
    assert not any(value for name, value in found.items() if "mismatch" in name)


def test_the_hand_over_shows_its_transport_and_why_it_is_not_the_devices(metrics: Metrics) -> None:
    observer = TargetMetrics(metrics)

    def value(name: str) -> float:
        return samples(metrics.registry)[f"{PREFIX}_{name}"]

    assert value('handoff_fallbacks_total{reason="no_device"}') == 0
    observer.observe_fallback("no_device")
    observer.observe_transport("inline")
    observer.observe_watchdog_release()
    assert value('handoff_fallbacks_total{reason="no_device"}') == 1
    assert value('handoff_transport{transport="inline"}') == 1
    assert value('handoff_transport{transport="device"}') == 0
    assert value("watchdog_releases_total") == 1
    observer.observe_transport("device")
    assert value('handoff_transport{transport="inline"}') == 0
    observer.observe_transport(None)
    assert value('handoff_transport{transport="device"}') == 0


def test_a_label_value_that_nobody_listed_is_an_error_and_no_new_series(metrics: Metrics) -> None:
    with pytest.raises(KeyError):
        TargetMetrics(metrics).observe_rejected("because")


def test_the_page_answers_on_loopback_and_ends_when_closed(metrics: Metrics) -> None:
    CommonMetrics(metrics, ["/a.B/C"]).observe_server_call("/a.B/C", "OK", 0.25)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    page = serve_metrics(metrics.registry, "127.0.0.1", port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    finally:
        page.close()
    assert 'tandem_rpc_server_call_duration_seconds_sum{model_name="m",rpc_method="/a.B/C"' in text
    assert "tandem_event_loop_lag_seconds" in text
    assert "tandem_build_info" in text
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
