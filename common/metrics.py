"""Metrics of a service: a registry of its own, series that exist at 0 from the start, the metrics page.

Knows prometheus-client; nothing of gRPC or of what is measured. Labels are enumerated when a metric is
made, so a value that nobody foresaw is a KeyError in a test and never a new series in production.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Thread
from wsgiref.simple_server import WSGIServer

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.errors import ConfigError
from common.version import tandem_version

# From a fast unary call on loopback to a stream that a person waits for.
RPC_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

# A _created series beside each counter says nothing that a restart would not.
prometheus_client.disable_created_metrics()


class TalliedHistogram(Histogram):
    """A histogram that takes many observations at once.

    One of 256 requests' tokens a step, one by one, took 4 ms of the step loop's 6; so it takes 0.1.
    """

    def observe_all(self, observations: Iterable[tuple[float, int]]) -> None:
        """Pairs of a finite value and how many times it was seen."""
        self._raise_if_not_observable()
        totals = [0] * len(self._upper_bounds)
        total = 0.0
        for value, count in observations:
            totals[bisect_left(self._upper_bounds, value)] += count
            total += value * count
        self._sum.inc(total)
        for bucket, count in zip(self._buckets, totals, strict=True):
            if count:
                bucket.inc(count)


class Metrics:
    """Makes metrics named `<prefix>_<name>`, each with the label model_name."""

    def __init__(self, prefix: str, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self.model_name = model_name

    def counter(self, name: str, text: str) -> Counter:
        """A counter at 0; `name` ends in _total."""
        return Counter(self._named(name), text, ["model_name"], registry=self.registry).labels(
            self.model_name
        )

    def counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        """A counter for each value of a label, all at 0."""
        metric = Counter(self._named(name), text, ["model_name", label], registry=self.registry)
        return {value: metric.labels(self.model_name, value) for value in values}

    def gauge(self, name: str, text: str) -> Gauge:
        """A gauge at 0."""
        return Gauge(self._named(name), text, ["model_name"], registry=self.registry).labels(self.model_name)

    def gauges(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
        """A gauge for each value of a label, all at 0."""
        metric = Gauge(self._named(name), text, ["model_name", label], registry=self.registry)
        return {value: metric.labels(self.model_name, value) for value in values}

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> TalliedHistogram:
        """A histogram without observations."""
        return TalliedHistogram(
            self._named(name), text, ["model_name"], registry=self.registry, buckets=buckets
        ).labels(self.model_name)  # fmt: skip

    def histograms(
        self, name: str, text: str, buckets: Sequence[float], label: str, values: Iterable[str]
    ) -> dict[str, Histogram]:
        """A histogram for each value of a label."""
        metric = Histogram(
            self._named(name), text, ["model_name", label], registry=self.registry, buckets=buckets
        )
        return {value: metric.labels(self.model_name, value) for value in values}

    def _named(self, name: str) -> str:
        return f"{self._prefix}_{name}"


class CommonMetrics:
    """What both services measure: calls, event-loop lag, build. Their names carry no service.

    Methods that the service answers, and calls, are in gRPC's form `/package.Service/Method`.
    """

    def __init__(
        self, metrics: Metrics, server_methods: Iterable[str], client_methods: Iterable[str] = ()
    ) -> None:
        self._model_name = metrics.model_name
        registry, labels = metrics.registry, ["model_name", "rpc_method", "rpc_status_code"]
        self._server_calls = Histogram(
            "tandem_rpc_server_call_duration_seconds", "Time to answer a call, whole streams included.",
            labels, registry=registry, buckets=RPC_BUCKETS_S,
        )  # fmt: skip
        self._client_calls = Histogram(
            "tandem_rpc_client_call_duration_seconds", "Time until a call that this service made ended.",
            labels, registry=registry, buckets=RPC_BUCKETS_S,
        )  # fmt: skip
        # Only OK exists from the start: 17 status codes times 15 buckets would be mostly zeros for ever.
        for method in server_methods:
            self._server_calls.labels(self._model_name, method, "OK")
        for method in client_methods:
            self._client_calls.labels(self._model_name, method, "OK")
        self._lag = Gauge(
            "tandem_event_loop_lag_seconds", "Longest delay of the event loop in the last 15 s.",
            ["model_name"], registry=registry,
        ).labels(self._model_name)  # fmt: skip
        Gauge("tandem_build_info", "Always 1.", ["model_name", "version"], registry=registry).labels(
            self._model_name, tandem_version()
        ).set(1)

    def observe_server_call(self, method: str, status: str, seconds: float) -> None:
        """A call that this service answered; `status` is the name of a gRPC status code."""
        self._server_calls.labels(self._model_name, method, status).observe(seconds)

    def observe_client_call(self, method: str, status: str, seconds: float) -> None:
        """A call that this service made."""
        self._client_calls.labels(self._model_name, method, status).observe(seconds)

    def observe_event_loop_lag(self, seconds: float) -> None:
        """The longest delay in the window that the gauge stands for."""
        self._lag.set(seconds)


@dataclass
class MetricsPage:
    """A running HTTP server for the metrics; `close` ends it."""

    server: WSGIServer
    thread: Thread

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> MetricsPage:
    """Answer GET /metrics in a thread. Raises ConfigError when the port is taken."""
    try:
        server, thread = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError("metrics_port", f"cannot be listened on ({error.strerror})", given=port) from None
    return MetricsPage(server, thread)
