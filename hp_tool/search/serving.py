"""A search over ways to serve: what one replica is asked to run, and what it showed for the whole load.

A run is stored in the words of training: `tensor_parallel_size` of the replica, `micro_batch_size` the requests it serves at
once (max_num_seqs). Its step is one round of the closed load: every request in flight served once, so that the shortest step is
the highest throughput.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from hp_tool.domain.measurement import Measurement, Runner
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import Targets
from hp_tool.domain.records import NewMeasurement, RunRecord
from hp_tool.domain.requests import InferenceRequest
from hp_tool.domain.serving import ServingConfig
from hp_tool.domain.workload import InferenceWorkload
from hp_tool.search.problem import Question

CHARGE = 2.0
"""A missed target costs this many times the share it is missed by, on top of the latency: what keeps to the targets wins."""
TARGETS = ("ttft_s", "tpot_s", "request_latency_s")
"""What a run shows. Its requests are too few for quantiles."""


class Seen(Protocol):
    """Latencies of requests under the whole load, waiting for room included; numbers, or arrays of shape (n,)."""

    @property
    def ttft_s(self) -> Any: ...
    @property
    def tpot_s(self) -> Any: ...
    @property
    def request_latency_s(self) -> Any: ...


class Served(Protocol):
    """What a run showed of its replica, see `ServingTimes`."""

    @property
    def ttft_s(self) -> float: ...
    @property
    def output_tokens_per_second(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """Those of one configuration."""

    ttft_s: float
    tpot_s: float
    request_latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A closed load of equal requests, and the devices that share it."""

    concurrency: int
    """Requests in flight over all devices."""
    output_length: int
    num_gpus: int


@dataclass(frozen=True, kw_only=True)
class ServingSearch(Question):
    """Serving configurations under a closed load; every replica is alike, so one of them stands for all."""

    inference: InferenceWorkload
    load: Load
    targets: Targets
    max_num_batched_tokens: int
    runner: Runner

    @property
    def tokens_per_gpu(self) -> float:
        """Output tokens of one round of the load."""
        return self.load.concurrency * self.load.output_length / self.load.num_gpus

    def request(self, run: RunRecord, *, best_step_s: float | None = None) -> InferenceRequest:
        """A replica with as many requests as it serves at once: a run has no queue."""
        config = deployment(run.parallel, num_gpus=self.cluster.num_gpus, max_num_batched_tokens=self.max_num_batched_tokens)
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
            timeout_s=self.settings.run_timeout_s,
            seed=self.settings.seed,
        )

    def new_measurement(self, *, run: RunRecord, measurement: Measurement) -> NewMeasurement:
        times = measurement.serving
        if measurement.status == "ok" and times is not None:
            seen = observed(times, run.parallel, load=self.load)
            repeated, answered = rounds(run.parallel, load=self.load), self.load.output_length - 1
            measurement = replace(
                measurement,
                step_s=charged(seen, targets=self.targets),
                step_times_s=tuple(
                    repeated * (first + answered * each)
                    for first, each in zip(times.ttft_times_s, times.tpot_times_s, strict=True)
                ),
                tokens_per_second_per_gpu=self.tokens_per_gpu / seen.request_latency_s,
            )
        return NewMeasurement(
            source="profile",
            cluster_key=self.cluster_key,
            gpu=self.cluster.gpu.name,
            framework=software(self.runner),
            model=self.model.name,
            query=self.query,
            parallel=run.parallel,
            measurement=measurement,
            predicted=run.predicted,
            problem_digest=self.problem_digest,
        )


def rounds(parallel: ParallelConfig, *, load: Load) -> float:
    """How often a replica serves a full batch until each of its requests was served once."""
    replicas = load.num_gpus // parallel.tensor_parallel_size
    return max(load.concurrency / replicas / parallel.micro_batch_size, 1.0)


def observed(times: Served, parallel: ParallelConfig, *, load: Load) -> Latencies:
    """What a replica's batch implies for the load: S seconds of a batch, of which the first token waits its TTFT; requests that
    find no room wait S (rounds - 1) longer (Little's law).
    """
    served = parallel.micro_batch_size * load.output_length / times.output_tokens_per_second
    queue = served * (rounds(parallel, load=load) - 1.0)
    tpot = (served - times.ttft_s) / (load.output_length - 1) if load.output_length > 1 else 0.0
    return Latencies(ttft_s=queue + times.ttft_s, tpot_s=tpot, request_latency_s=queue + served)


def replica(config: ServingConfig) -> ParallelConfig:
    """One replica of a deployment as its run is stored."""
    return ParallelConfig(tensor_parallel_size=config.tensor_parallel_size, micro_batch_size=config.max_num_seqs)


def deployment(parallel: ParallelConfig, *, num_gpus: int, max_num_batched_tokens: int) -> ServingConfig:
    """Replicas like a stored run's on all of the devices."""
    return ServingConfig(
        tensor_parallel_size=parallel.tensor_parallel_size,
        data_parallel_size=num_gpus // parallel.tensor_parallel_size,
        max_num_seqs=parallel.micro_batch_size,
        max_num_batched_tokens=max_num_batched_tokens,
    )


def software(runner: Runner) -> str:
    """What measurements of serving are filed under, apart from the training runs of the same software."""
    return f"{runner}-serving"


def charged(seen: Latencies, *, targets: Targets) -> float:
    """The seconds a search minimises: request latency, and CHARGE times the share by which each target is missed."""
    return float(seen.request_latency_s * (1.0 + charge(seen, targets=targets)))


def charge(seen: Seen, *, targets: Targets) -> Any:
    """CHARGE sum_i max(latency_i / target_i - 1, 0), a number or (n,)."""
    limits = ((name, getattr(targets, name)) for name in TARGETS)
    return CHARGE * sum(
        (np.maximum(getattr(seen, name) / limit - 1.0, 0.0) for name, limit in limits if limit is not None), 0.0
    )


def meets(seen: Latencies, *, targets: Targets) -> bool:
    """Whether all targets are kept."""
    return bool(charge(seen, targets=targets) <= 0.0)
