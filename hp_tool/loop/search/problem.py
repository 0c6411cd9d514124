"""The resolved query of a search: its candidates with their costs, and requests for their runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from hp_tool.cost.candidates import Candidates
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.domain.digests import configuration_digest
from hp_tool.domain.frameworks import training_engine
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.measurement import GRAPHS_AFTER, Measurement, ProfileRequest
from hp_tool.domain.measurement_records import NewMeasurement
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import DEFAULT_STRATEGY, ParallelConfig, Strategy
from hp_tool.domain.query import SearchSettings
from hp_tool.domain.records import SET, JsonObject, RunRecord
from hp_tool.domain.requests import RunRequest
from hp_tool.domain.serving import RunConfig
from hp_tool.domain.steps import WARMUP_EXTENSION
from hp_tool.domain.switches import device_connections
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import Calibration
from hp_tool.loop.search.acquisition import Proposal
from hp_tool.loop.search.fidelity import EXTRAPOLATION_RATIO, Reduction, num_gpus, reduce_run
from hp_tool.loop.search.rivals import DIGEST, rivals_of
from hp_tool.loop.search.table import AxisValue, CandidateTable


@dataclass(frozen=True, kw_only=True)
class Question(ABC):
    """A resolved query and its candidates, among which a coordinator chooses runs."""

    query: JsonObject
    """The stored query. Measurements contain it, so that they can be predicted again."""
    model: ModelSpec
    cluster: ClusterSpec
    settings: SearchSettings
    candidates: Candidates | ServingCandidates
    """Candidates in the order of the table's rows."""
    table: CandidateTable
    cluster_key: str
    problem_digest: str
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Values that were added to the query (except `parallel`), by path. All runs use them."""
    baseline: RunConfig | None = None
    """Configuration in `search.baseline`. It runs once if it is a candidate."""
    assumed_startup_s: float = field(default_factory=lambda: assumed().search.local_startup_s)
    """Assumed seconds from a job's start to its first step, which apply until a run of this search
    has measured them.
    """
    startup_is_known: bool = False
    """True if earlier runs on this cluster measured the start-up time, False if it is assumed."""

    @cached_property
    def _row_by_digest(self) -> dict[str, int]:
        return {self.digest(row): row for row in range(len(self.candidates))}

    def digest(self, row: int) -> str:
        """Return the digest of a row's configuration at full fidelity."""
        return configuration_digest(parallel=self.candidates.config(row))

    def row(self, parallel: RunConfig) -> int | None:
        """Return the table row of a configuration; None if it is not a candidate."""
        return self._row_by_digest.get(configuration_digest(parallel=parallel))

    def params(self, parallel: RunConfig) -> dict[str, AxisValue] | None:
        """Return the axis values of a configuration; None if it is not a candidate."""
        row = self.row(parallel)
        return None if row is None else self.table.params(row)

    def predicted(self, *, row: int, calibration: Calibration, proposal: Proposal) -> JsonObject:
        """Return a run's prediction, uncalibrated and calibrated, and the reason for the run."""
        one = self.table.take(np.array([row]))
        step, memory = one.predict_step(calibration), one.predict_memory(calibration)
        low, high = step.interval()
        parts_s = {name: float(seconds[0]) for name, seconds in one.parts_s.items()}
        step_s = sum(parts_s.values())
        return {
            "step_s": step_s,
            "parts_s": parts_s,
            "layer_passes": float(self.table.layer_passes[row]),
            "tokens_per_second_per_gpu": self.tokens_per_gpu / step_s,
            "memory_bytes": float(
                self.table.memory_bytes[row]
                + self.cluster.gpu.memory_bytes
                - self.table.device_bytes[row]
            ),
            "memory_allocated_bytes": float(self.table.memory_bytes[row]),
            "calibrated_step_s": float(step.median_s[0]),
            "calibrated_step_s_interval": [float(low[0]), float(high[0])],
            "calibrated_memory_allocated_bytes": float(memory.median_bytes[0]),
            "calibration_measurements": len(calibration.measurement_ids),
            "chosen_by": proposal.reason,
            "expected_gain_fraction": proposal.expected_gain
            if np.isfinite(proposal.expected_gain)
            else None,
            "hold_probability": proposal.hold_probability,
            **({SET: dict(self.chosen)} if self.chosen else {}),
        }

    @property
    def configurations_per_job(self) -> int:
        """Return the maximum number of configurations that a job may run in sequence."""
        return 1

    def apart(self, row: int) -> frozenset[int]:
        """Return the rows that cannot run in the same job as this one."""
        return frozenset()

    def rival_rows(self, run: RunRecord) -> list[int]:
        """Return the rows that a job runs after its first; none if one is no longer a candidate."""
        rows = [self._row_by_digest.get(rival[DIGEST]) for rival in rivals_of(run)]
        return [row for row in rows if row is not None] if None not in rows else []

    @property
    @abstractmethod
    def framework(self) -> str:
        """Return the software name under which measurements are stored."""

    @property
    @abstractmethod
    def tokens_per_gpu(self) -> float:
        """Return the number of tokens per step and device."""

    @abstractmethod
    def request(
        self, run: RunRecord, *, best_step_s: float | None = None, startup_s: float | None = None
    ) -> RunRequest:
        """Return the profiler request of a stored run, reduced to the run's fidelity.

        Args:
            best_step_s: Known or expected step time of the best configuration, in seconds. A run
                that is far slower may end early.
            startup_s: Start-up seconds of earlier runs of this search; None before the first one.
        """

    def startup_range_s(self, seen_s: float | None = None) -> tuple[float, float]:
        """Return the minimum and maximum start-up time in seconds.

        They are equal if runs of this search (`seen_s`) or earlier runs measured the start-up.
        Otherwise, they span the uncertainty of the assumed value.
        """
        doubt = (
            assumed().search.startup_doubt if seen_s is None and not self.startup_is_known else 1.0
        )
        center_s = self.assumed_startup_s if seen_s is None else seen_s
        return center_s / doubt, center_s * doubt

    def time_limit_s(self, run: RunRecord, *, startup_s: float | None) -> float:
        """Return the time limit of a run in seconds.

        The query's value takes precedence. Otherwise, it is the start-up time with slack (the
        maximum if no run measured it), plus the time of all steps at the upper bound of their
        interval.
        """
        settings, predicted, limits = self.settings, run.predicted, assumed().search
        if settings.run_timeout_s != "auto":
            return settings.run_timeout_s
        steps = (
            max(settings.warmup_steps, GRAPHS_AFTER)
            + WARMUP_EXTENSION
            + (run.fidelity.steps or settings.steps)
        )
        steps += limits.profiled_steps if settings.breakdown else 0
        step_s = predicted.get("calibrated_step_s", 0.0)
        longest_s = predicted.get("calibrated_step_s_interval", (0.0, step_s))[1]
        reduced_s = predicted.get("reduced_calibrated_step_s", step_s)
        share = reduced_s / step_s if step_s else 1.0
        longest_start_s = self.startup_range_s(startup_s)[1]
        usual_s = self.assumed_startup_s if startup_s is None else startup_s
        starting_s = max(
            limits.startup_slack * usual_s, longest_start_s, limits.least_start_limit_s
        )
        beside = rivals_of(run)
        beside_s = sum(steps * rival["calibrated_step_s_interval"][1] for rival in beside)
        return float((1 + len(beside)) * starting_s + steps * share * longest_s + beside_s)

    def completed(self, measurement: Measurement, run: RunRecord) -> Measurement:
        """Return the measurement with derived values for this question."""
        return measurement

    def reduction(self, parallel: RunConfig) -> Reduction | None:
        """Return the cheapest reduced run of a configuration; None if it must run completely."""
        return None

    def new_measurement(self, *, run: RunRecord, measurement: Measurement) -> NewMeasurement:
        """Return a run's measurement in the form to be stored.

        If its nodes lacked software that training jobs use, it is stored under another software
        name. For CPUs, this is always so.
        """
        lacked = {package for packages in measurement.differences.values() for package in packages}
        lacking = sorted(lacked) if self.cluster.gpu.kind == "gpu" else []
        return NewMeasurement(
            source="profile",
            cluster_key="/without ".join(
                (self.cluster_key, *([", ".join(lacking)] if lacking else []))
            ),
            gpu=self.cluster.gpu.name,
            framework=self.framework,
            model=self.model.name,
            query=self.query,
            parallel=run.parallel,
            measurement=self.completed(measurement, run),
            predicted=run.predicted,
            problem_digest=self.problem_digest,
        )


@dataclass(frozen=True, kw_only=True)
class SearchProblem(Question):
    """A search over training configurations. A run consists of a few optimizer steps."""

    candidates: Candidates
    training: TrainingWorkload
    strategy: Strategy = DEFAULT_STRATEGY
    """Settings shared by all candidates, in addition to their sizes."""
    reduce: Callable[[ParallelConfig], Reduction | None] | None = None
    """Returns the cheapest reduced run of a configuration. If None, all runs are complete."""

    @property
    def framework(self) -> str:
        return self.training.framework

    def reduction(self, parallel: RunConfig) -> Reduction | None:
        assert isinstance(parallel, ParallelConfig)
        return None if self.reduce is None else self.reduce(parallel)

    @property
    def configurations_per_job(self) -> int:
        return (
            1 if self.training.cuda_graphs else self.settings.configurations_per_job
        )  # A recorded graph outlives its model.

    def apart(self, row: int) -> frozenset[int]:
        return frozenset(
            other for other, needed in enumerate(self._processes) if needed != self._processes[row]
        )

    @cached_property
    def _processes(self) -> list[tuple[str | None, int]]:
        """Return the settings of each row that cannot change within a job.

        They are CUDA queues (set before the first kernel) and the number of processes.
        """
        configs = map(self.candidates.config, range(len(self.candidates)))
        if self.cluster.gpu.kind == "cpu":
            return [(None, num_gpus(config)) for config in configs]
        return [
            (device_connections(workload=self.training, parallel=config), num_gpus(config))
            for config in configs
        ]

    @property
    def tokens_per_gpu(self) -> float:
        return (
            self.training.global_batch_size * self.training.sequence_length / self.cluster.num_gpus
        )

    def completed(self, measurement: Measurement, run: RunRecord) -> Measurement:
        """Return the measurement with its throughput, which is unknown if the run was cut off."""
        if measurement.step_s is None or measurement.tokens_per_second_per_gpu is not None:
            return measurement
        assert isinstance(run.parallel, ParallelConfig)
        _, training, parallel = reduce_run(
            fidelity=run.fidelity, model=self.model, training=self.training, parallel=run.parallel
        )
        tokens = training.global_batch_size * training.sequence_length
        return replace(
            measurement, tokens_per_second_per_gpu=tokens / measurement.step_s / num_gpus(parallel)
        )

    def request(
        self, run: RunRecord, *, best_step_s: float | None = None, startup_s: float | None = None
    ) -> ProfileRequest:
        limit = None if best_step_s is None else self.settings.hopeless_factor * best_step_s
        assert isinstance(run.parallel, ParallelConfig)
        model, training, parallel = reduce_run(
            fidelity=run.fidelity, model=self.model, training=self.training, parallel=run.parallel
        )
        balanced = self.settings.balanced_routing
        return ProfileRequest(
            run_id=run.id,
            model=model,
            training=training,
            parallel=self._with_strategy(parallel),
            num_gpus=num_gpus(parallel),
            gpu=self.cluster.gpu.name,
            steps=run.fidelity.steps or self.settings.steps,
            warmup_steps=self.settings.warmup_steps,
            timeout_s=self.time_limit_s(run, startup_s=startup_s),
            seed=self.settings.seed,
            fidelity=run.fidelity,
            step_tolerance_fraction=self.settings.step_tolerance_fraction,
            breakdown=self.settings.breakdown,
            longest_step_s=None
            if limit is None
            else limit / run.predicted.get(EXTRAPOLATION_RATIO, 1.0),
            more_warmup_steps=WARMUP_EXTENSION,
            nvlink_domain_size=self.cluster.nvlink_domain_size,
            balanced_routing=bool(model.num_experts)
            and (self.training.expert_imbalance == 1.0 if balanced is None else balanced),
            rivals=tuple(
                self._with_strategy(self.candidates.config(row)) for row in self.rival_rows(run)
            ),
        )

    def _with_strategy(self, parallel: ParallelConfig) -> ParallelConfig:
        """Return the configuration with settings from the query, its release or its recipe."""
        if parallel.context_parallel_size > 1:
            parallel = replace(
                parallel,
                context_parallel_communication=self.strategy.context_parallel_communication,
            )
        if (
            self.model.num_experts
            and training_engine(self.framework) == "megatron-core"
            and parallel.moe_token_dispatcher_type is None
        ):
            parallel = replace(
                parallel, moe_token_dispatcher_type=self.strategy.moe_token_dispatcher_type
            )
        return parallel
