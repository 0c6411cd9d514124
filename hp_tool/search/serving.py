"""A search over ways to serve: what one replica is asked to run, and what its latencies imply for the whole load."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.domain.measurement import Latencies, LoadLatencies, Measurement, Runner, ServingTimes
from hp_tool.domain.query import Targets
from hp_tool.domain.records import RunRecord
from hp_tool.domain.requests import InferenceRequest
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.workload import InferenceWorkload
from hp_tool.search.problem import Question

PENALTY = 2.0
"""A missed target costs this many times the share it is missed by, on top of the latency: what keeps to the targets wins."""
TARGETS = ("ttft_s", "tpot_s", "request_latency_s")
"""Targets that a run can be held to. Its requests are too few for quantiles."""
SERVING = "-serving"
"""The end of every name that measurements of serving are filed under."""


@dataclass(frozen=True, kw_only=True)
class ServingSearch(Question):
    """Serving configurations under a closed load; every replica is alike, so a run of one stands for all."""

    candidates: ServingCandidates
    inference: InferenceWorkload
    targets: Targets
    runner: Runner

    @property
    def framework(self) -> str:
        return software(self.runner)

    @property
    def tokens_per_gpu(self) -> float:
        """Output tokens of the load's requests in flight, by device."""
        assert isinstance(self.inference.concurrency, int)  # a search is of a closed load
        return self.inference.concurrency * self.inference.output_length / self.cluster.num_gpus

    def request(self, run: RunRecord, *, best_step_s: float | None = None, startup_s: float | None = None) -> InferenceRequest:
        """A replica with as many requests as it serves at once: a run has no queue."""
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
        """The measurement with what its replica's latencies imply for the load."""
        times = measurement.serving
        if measurement.status != "ok" or times is None:
            return measurement
        assert isinstance(run.parallel, ServingConfig)
        load = load_latencies(times, run.parallel, inference=self.inference, targets=self.targets)
        return replace(measurement, load=load, tokens_per_second_per_gpu=self.tokens_per_gpu / load.request_latency_s)


@dataclass(frozen=True, kw_only=True)
class EndpointSearch(ServingSearch):
    """The same of a server that runs already: a run is the whole load on all of it, so it shows the load's latencies."""

    in_flight: float
    """Requests of the load, as predicted where it is a rate."""

    @property
    def framework(self) -> str:
        return f"{self.inference.engine}-{software(self.runner)}"

    @property
    def tokens_per_gpu(self) -> float:
        return self.in_flight * self.inference.output_length / self.cluster.num_gpus

    def request(self, run: RunRecord, *, best_step_s: float | None = None, startup_s: float | None = None) -> InferenceRequest:
        """As many requests a repetition as are in flight."""
        replica = super().request(run, startup_s=startup_s)
        assert isinstance(run.parallel, ServingConfig)
        return replace(
            replica,
            inference=self.inference,
            parallel=run.parallel,
            num_gpus=self.cluster.num_gpus,
            num_requests=max(round(self.in_flight), 1),
        )

    def completed(self, measurement: Measurement, run: RunRecord) -> Measurement:
        times = measurement.serving
        if measurement.status != "ok" or times is None:
            return measurement
        following = self.inference.output_length - 1
        latencies = Latencies(
            ttft_s=times.ttft_s, tpot_s=times.tpot_s, request_latency_s=times.ttft_s + following * times.tpot_s
        )
        load = LoadLatencies(
            **asdict(latencies),
            penalised_latency_s=penalised_latency_s(latencies, targets=self.targets),
            request_latencies_s=tuple(
                first + following * each for first, each in zip(times.ttft_times_s, times.tpot_times_s, strict=True)
            ),
        )
        rate = times.output_tokens_per_second / self.cluster.num_gpus
        return replace(measurement, load=load, tokens_per_second_per_gpu=rate)


def load_latencies(
    times: ServingTimes, config: ServingConfig, *, inference: InferenceWorkload, targets: Targets
) -> LoadLatencies:
    """What a replica's batch implies for a closed load.

    A batch of b requests takes S seconds, of which the first tokens wait the TTFT. With C / d requests per replica, each is
    served after r = max(C / (d b), 1) batches: requests that find no room wait S (r - 1) longer (Little's law).
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
    return LoadLatencies(
        **asdict(latencies),
        penalised_latency_s=penalised_latency_s(latencies, targets=targets),
        request_latencies_s=tuple(
            batches * (first + following * each) for first, each in zip(times.ttft_times_s, times.tpot_times_s, strict=True)
        ),
    )


def software(runner: Runner) -> str:
    """What measurements of serving are filed under, apart from the training runs of the same software."""
    return f"{runner}{SERVING}"


def penalised_latency_s(latencies: Latencies, *, targets: Targets) -> float:
    """What a search minimises: request latency x (1 + penalty)."""
    return float(latencies.request_latency_s * (1.0 + penalty(latencies, targets=targets)))


def meets(latencies: Latencies, *, targets: Targets) -> bool:
    """Whether all targets are kept."""
    return bool(penalty(latencies, targets=targets) <= 0.0)


def penalty(latencies: Latencies | ServingCosts, *, targets: Targets) -> Any:
    """PENALTY sum_i max(latency_i / target_i - 1, 0), a number or (n,)."""
    limits = ((name, getattr(targets, name)) for name in TARGETS)
    return PENALTY * sum(
        (np.maximum(getattr(latencies, name) / limit - 1.0, 0.0) for name, limit in limits if limit is not None), 0.0
    )
