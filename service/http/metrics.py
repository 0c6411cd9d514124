"""Metrics for Prometheus: requests of this process, and the state of the database when they are
read.
"""

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

RECENT = 100
"""Measurements over which the prediction error is taken."""
SOURCES: tuple[Literal["profile", "reported"], ...] = ("profile", "reported")
SECONDS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The metrics of one application."""

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
            "From a request's first byte to its answer's last, streams of events included",
            ["method", "route"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._cached = Counter(
            "hp_answers",
            "Analytical queries by whether the cache had their answer",
            ["route", "cache"],
            registry=self._registry,
        )
        self._registry.register(StoreCollector(store))

    def count(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """One request was answered. `route` is the pattern, not the path: a label must not have as
        many values as searches.
        """
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def count_cached(self, *, route: str, hit: bool) -> None:
        """A query was answered from what was answered before, or was not."""
        self._cached.labels(route, "hit" if hit else "miss").inc()

    def text(self) -> bytes:
        """The exposition; asks the database."""
        return generate_latest(self._registry)


class StoreCollector(Collector):
    """Queue, runs, GPU-seconds and prediction error: shared by all API processes, so read, not
    counted.
    """

    def __init__(self, store: AccessStore) -> None:
        self._store = store

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand: registering must not ask the database."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        try:
            families = list(self._from_store())
        except HpToolError as error:
            log.warning("no metrics of the database: %s", error.message)
            families = []
        yield GaugeMetricFamily(
            "hp_database_up", "1: the database answers", value=1.0 if families else 0.0
        )
        yield from families

    def _from_store(self) -> Iterator[Metric]:
        usage = self._store.usage()
        yield _by_label("hp_searches", "Searches by state", "state", usage.searches)
        yield _by_label("hp_runs", "Profile runs by state", "state", usage.runs)
        waiting = "How long the search next in line has waited; 0: none waits"
        yield GaugeMetricFamily("hp_queue_oldest_seconds", waiting, value=usage.oldest_queued_s)
        abandoned = "Running searches whose worker's lease ran out"
        yield GaugeMetricFamily("hp_searches_without_worker", abandoned, value=usage.expired_leases)
        yield CounterMetricFamily(
            "hp_gpu_seconds", "Devices x seconds of all profile runs", value=usage.gpu_seconds
        )
        yield _by_label(
            "hp_webhooks", "Webhooks of ended searches by state", "state", usage.webhooks
        )
        yield from self._kept()
        yield from self._prediction_error()

    def _kept(self) -> Iterator[Metric]:
        kept = self._store.kept()
        oldest = "How long ago the first search ended that is still stored; 0: none is"
        yield GaugeMetricFamily("hp_ended_search_oldest_seconds", oldest, value=kept.oldest_s)
        yield GaugeMetricFamily(
            "hp_database_bytes", "Size of the database", value=kept.database_bytes
        )
        number = sum(len(folders.job_folders(root)) for root in run_roots())
        yield GaugeMetricFamily(
            "hp_run_folders", "Folders of runs on the host of this process", value=number
        )

    def _prediction_error(self) -> Iterator[Metric]:
        errors, biases = {}, {}
        for source in SOURCES:
            ratios = []
            for record in self._store.measurements(
                source=source, status="ok", state="accepted", limit=RECENT
            ).items:
                predicted, measured = record.predicted.get("step_s"), record.measurement.objective_s
                if predicted and measured:
                    ratios.append(measured / predicted - 1.0)
            if ratios:
                errors[source], biases[source] = (
                    statistics.median(map(abs, ratios)),
                    statistics.median(ratios),
                )
        error = (
            f"Median of |measured / predicted - 1| of step time over the last {RECENT} measurements"
        )
        yield _by_label("hp_prediction_error_ratio", error, "source", errors)
        bias = "Median of measured / predicted - 1: which way predictions drift"
        yield _by_label("hp_prediction_bias_ratio", bias, "source", biases)


def _by_label(
    name: str, documentation: str, label: str, values: Mapping[Any, float]
) -> GaugeMetricFamily:
    gauge = GaugeMetricFamily(name, documentation, labels=[label])
    for value, number in values.items():
        gauge.add_metric([value], number)
    return gauge
