"""Prometheus metrics: requests to this process, and the state of the database."""

import logging
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hp_tool.cluster.launchers import folders
from hp_tool.domain.access import AccessStore
from hp_tool.errors import HpToolError
from hp_tool.loop.tuning.retention import run_roots

log = logging.getLogger(__name__)

ERROR_WINDOW = 100
"""Number of newest measurements in the prediction error."""
SOURCES: tuple[Literal["profile", "reported"], ...] = ("profile", "reported")
DURATION_BUCKETS_S = (
    0.002,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


class Metrics:
    """Prometheus metrics of one application."""

    def __init__(self, *, store: AccessStore) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "hp_http_requests",
            "Answered requests",
            ["method", "route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "hp_http_request_seconds",
            "Request duration from the first byte to the end of the response, event streams too",
            ["method", "route"],
            buckets=DURATION_BUCKETS_S,
            registry=self._registry,
        )
        self._cached = Counter(
            "hp_answers",
            "Analytical queries, by whether the answer was cached",
            ["route", "cache"],
            registry=self._registry,
        )
        self._registry.register(StoreCollector(store))

    def count(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count a response.

        Args:
            method: HTTP method.
            route: Route pattern rather than path, to limit the number of label values.
            status: HTTP status.
            seconds: Duration.
        """
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def count_cached(self, *, route: str, hit: bool) -> None:
        """Count an estimate or recommendation by whether its answer was cached."""
        self._cached.labels(route, "hit" if hit else "miss").inc()

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format. This queries the database."""
        return generate_latest(self._registry)


class StoreCollector(Collector):
    """Queue, runs, GPU-seconds and prediction error, read from the database at each scrape."""

    def __init__(self, store: AccessStore) -> None:
        self._store = store

    def describe(self) -> Iterator[Metric]:
        """Return nothing, so that registration does not query the database."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        try:
            families = list(self._from_store())
        except HpToolError as error:
            log.warning("Cannot read metrics from the database: %s", error.message)
            families = []
        yield GaugeMetricFamily(
            "hp_database_up", "1 if the database responds", value=1.0 if families else 0.0
        )
        yield from families

    def _from_store(self) -> Iterator[Metric]:
        usage = self._store.usage()
        yield _by_label("hp_searches", "Searches by state", "state", usage.searches)
        yield _by_label("hp_runs", "Profile runs by state", "state", usage.runs)
        waiting = "Age of the oldest queued search in seconds; 0 if the queue is empty"
        yield GaugeMetricFamily("hp_queue_oldest_seconds", waiting, value=usage.oldest_queued_s)
        abandoned = "Running searches with an expired lease"
        yield GaugeMetricFamily("hp_searches_without_worker", abandoned, value=usage.expired_leases)
        yield CounterMetricFamily(
            "hp_gpu_seconds", "GPU-seconds of all profile runs", value=usage.gpu_seconds
        )
        yield _by_label(
            "hp_webhooks", "Webhooks of ended searches by state", "state", usage.webhooks
        )
        yield from self._retention()
        yield from self._prediction_error()

    def _retention(self) -> Iterator[Metric]:
        state = self._store.retained_data()
        oldest = "Seconds since the oldest stored search ended; 0 if none has"
        yield GaugeMetricFamily("hp_ended_search_oldest_seconds", oldest, value=state.oldest_s)
        yield GaugeMetricFamily(
            "hp_database_bytes", "Size of the database", value=state.database_bytes
        )
        number = sum(len(folders.job_folders(root)) for root in run_roots())
        yield GaugeMetricFamily("hp_run_folders", "Run folders on this host", value=number)

    def _prediction_error(self) -> Iterator[Metric]:
        errors, biases = {}, {}
        for source in SOURCES:
            ratios = []
            for record in self._store.measurements(
                source=source, status="ok", state="accepted", limit=ERROR_WINDOW
            ).items:
                predicted, measured = record.predicted.get("step_s"), record.measurement.objective_s
                if predicted and measured:
                    ratios.append(measured / predicted - 1.0)
            if ratios:
                errors[source], biases[source] = (
                    statistics.median(map(abs, ratios)),
                    statistics.median(ratios),
                )
        over = f"over the last {ERROR_WINDOW} measurements"
        error = f"Median of |measured / predicted - 1| of step time {over}"
        yield _by_label("hp_prediction_error_ratio", error, "source", errors)
        bias = "Median of measured / predicted - 1 of step time"
        yield _by_label("hp_prediction_bias_ratio", bias, "source", biases)


def _by_label(
    name: str, documentation: str, label: str, values: Mapping[Any, float]
) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, documentation, labels=[label])
    for value, number in values.items():
        gauge.add_metric([value], number)
    return gauge
