"""Searches over serving configurations: runs of one replica, and its latencies under full load."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.domain.inference import InferenceWorkload, TraceSpec
from hp_tool.domain.latencies import LATENCIES
from hp_tool.domain.measurement import Latencies, LoadLatencies, Measurement, Runner, ServingTimes
from hp_tool.domain.records import RunRecord
from hp_tool.domain.requests import InferenceRequest
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.targets import Targets
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.search.problem import Question

TARGETS = tuple(LATENCIES)
"""Targets that every run can measure. Targets on quantiles require an endpoint, to which requests
are sent one by one.
"""
SERVING = "-serving"
"""Suffix of the software name under which serving measurements are stored."""


@dataclass(frozen=True, kw_only=True)
class ServingSearch(Question):
    """A search over serving configurations under a closed load.

    Replicas are identical, so only one is run.
    """

    candidates: ServingCandidates
    inference: InferenceWorkload
    targets: Targets
    runner: Runner

    @property
    def framework(self) -> str:
        return software(self.runner)

    @property
    def tokens_per_gpu(self) -> float:
        """Return the output tokens of all requests in flight, per device."""
        assert isinstance(self.inference.concurrency, int)  # A search has a closed load.
        return self.inference.concurrency * self.inference.output_length / self.cluster.num_gpus

    def request(
        self, run: RunRecord, *, best_step_s: float | None = None, startup_s: float | None = None
    ) -> InferenceRequest:
        """Return a request for one replica with as many requests as it serves at once.

        A run therefore has no queue.
        """
        config = run.parallel
        assert isinstance(config, ServingConfig)
        return InferenceRequest(
            run_id=run.id,
            model=self.model,
            inference=replace(self.inference, concurrency=config.max_num_seqs),
            parallel=replace(config, data_parallel_size=1),
            num_gpus=config.tensor_parallel_size,
            gpu=self.cluster.gpu.name,
            runner=self.runner,
            repetitions=run.fidelity.steps or self.settings.steps,
            warmup=self.settings.warmup_steps,
            timeout_s=self.time_limit_s(run, startup_s=startup_s),
            seed=self.settings.seed,
        )

    def completed(self, measurement: Measurement, run: RunRecord) -> Measurement:
        """Return the measurement with the load's latencies, computed from its replica's."""
        times = measurement.serving
        if measurement.status != "ok" or times is None:
            return measurement
        assert isinstance(run.parallel, ServingConfig)
        load = load_latencies(times, run.parallel, inference=self.inference, targets=self.targets)
        return replace(
            measurement,
            load=load,
            tokens_per_second_per_gpu=self.tokens_per_gpu / load.request_latency_s,
        )


@dataclass(frozen=True, kw_only=True)
class EndpointSearch(ServingSearch):
    """A search on a running server.

    Each run sends the full load, so latencies are measured directly.
    """

    in_flight: float
    """Number of requests in flight. It is predicted if the load is a request rate."""
    trace: TraceSpec | None = None
    """Requests to send. None if all requests have the same length."""

    @property
    def framework(self) -> str:
        return f"{self.inference.engine}-{software(self.runner)}"

    @property
    def tokens_per_gpu(self) -> float:
        return self.in_flight * self.inference.output_length / self.cluster.num_gpus

    def request(
        self, run: RunRecord, *, best_step_s: float | None = None, startup_s: float | None = None
    ) -> InferenceRequest:
        """Return a request with enough requests per repetition.

        These are as many as are in flight, or as targets on quantiles require.
        """
        replica = super().request(run, startup_s=startup_s)
        assert isinstance(run.parallel, ServingConfig)
        by_quantile = any(quantile is not None for _, _, quantile, _ in self.targets.limits())
        fewest = (
            math.ceil(assumed().search.quantile_answers / replica.repetitions) if by_quantile else 1
        )
        return replace(
            replica,
            inference=self.inference,
            parallel=run.parallel,
            num_gpus=self.cluster.num_gpus,
            num_requests=max(round(self.in_flight), fewest),
            trace=self.trace,
        )

    def completed(self, measurement: Measurement, run: RunRecord) -> Measurement:
        times = measurement.serving
        if measurement.status != "ok" or times is None:
            return measurement
        following = self.inference.output_length - 1
        latency_s = times.ttft_s + following * times.tpot_s
        latencies = Latencies(
            ttft_s=times.ttft_s, tpot_s=times.tpot_s, request_latency_s=latency_s, tails=times.tails
        )
        each = tuple(
            first + following * token
            for first, token in zip(times.ttft_times_s, times.tpot_times_s, strict=True)
        )
        load = _latencies_of(latencies, each, targets=self.targets)
        rate = times.output_tokens_per_second / self.cluster.num_gpus
        return replace(measurement, load=load, tokens_per_second_per_gpu=rate)


def load_latencies(
    times: ServingTimes, config: ServingConfig, *, inference: InferenceWorkload, targets: Targets
) -> LoadLatencies:
    """Compute the latencies of a closed load from those of one replica's batch.

    A batch of b requests takes S seconds, including TTFT for the first tokens. With C / d requests
    per replica, each request is served after r = max(C / (d b), 1) batches, so requests without
    room wait S (r - 1) longer (Little's law).
    """
    assert isinstance(inference.concurrency, int)
    batches = max(inference.concurrency / config.data_parallel_size / config.max_num_seqs, 1.0)
    following = inference.output_length - 1
    batch_s = config.max_num_seqs * inference.output_length / times.output_tokens_per_second
    queue_s = batch_s * (batches - 1.0)
    latencies = Latencies(
        ttft_s=queue_s + times.ttft_s,
        tpot_s=(batch_s - times.ttft_s) / following if following else 0.0,
        request_latency_s=queue_s + batch_s,
    )
    each = (
        batches * (first + following * token)
        for first, token in zip(times.ttft_times_s, times.tpot_times_s, strict=True)
    )
    return _latencies_of(latencies, tuple(each), targets=targets)


def _latencies_of(
    latencies: Latencies, repetitions_s: tuple[float, ...], *, targets: Targets
) -> LoadLatencies:
    return LoadLatencies(
        ttft_s=latencies.ttft_s,
        tpot_s=latencies.tpot_s,
        request_latency_s=latencies.request_latency_s,
        tails=latencies.tails,
        penalised_latency_s=penalised_latency_s(latencies, targets=targets),
        request_latencies_s=repetitions_s,
    )


def software(runner: Runner) -> str:
    """Return the software name of serving measurements.

    It differs from that of training with the same software.
    """
    return f"{runner}{SERVING}"


def penalised_latency_s(latencies: Latencies, *, targets: Targets) -> float:
    """Return the objective of a search: request latency x (1 + penalty)."""
    return float(
        latencies.request_latency_s * (1.0 + penalty(measured_targets(latencies, targets=targets)))
    )


def meets_targets(latencies: Latencies, *, targets: Targets) -> bool:
    """Return True if the latencies meet all targets."""
    return all(value <= limit for _, limit, value in measured_targets(latencies, targets=targets))


def measured_targets(
    latencies: Latencies, *, targets: Targets
) -> Iterator[tuple[str, float, float]]:
    """Return the name, limit, and bounded mean or quantile of each target.

    Quantiles that were not measured are skipped.
    """
    for name, latency, quantile, limit in targets.limits():
        if quantile is None:
            yield name, limit, getattr(latencies, latency)
        elif latencies.tails is not None:
            yield name, limit, getattr(getattr(latencies.tails, latency), quantile)


def penalty(values: Iterable[tuple[str, float, Any]]) -> Any:
    """Return the penalty sum_i max(latency_i / target_i - 1, 0), a number or an array (n,).

    `values` are (name, target, latency) of each target.
    """
    return assumed().search.target_penalty * sum(
        (np.maximum(value / limit - 1.0, 0.0) for _, limit, value in values), 0.0
    )
