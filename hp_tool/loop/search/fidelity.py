"""Reduced runs of a configuration, and extrapolation of their step times.

A reduced run preserves the communication pattern of a step: TP, CP and PP groups are unchanged, DP
groups still span nodes if the full ones do, and the pipeline still fills and drains. Fewer replicas
save devices. Fewer micro-batches and layers save time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.uncertainty import NORMAL_QUANTILE
from hp_tool.domain.answer import Repeats
from hp_tool.domain.measurement import Fidelity, Measurement, MeasurementStatus
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.profiling import Sizes
from hp_tool.domain.records import RunRecord
from hp_tool.domain.serving import RunConfig, ServingConfig
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import Calibration
from hp_tool.loop.calibration.evidence import FloatArray

WHOLE = Fidelity()
EXTRAPOLATION_RATIO = "extrapolation_ratio"
"""Key in a reduced run's prediction for the predicted complete step time divided by the reduced
one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A reduced run of a configuration, with its predictions."""

    fidelity: Fidelity
    num_gpus: int
    parts_s: Mapping[str, FloatArray]
    """Uncalibrated exposed seconds of its step by part, each of shape (1,)."""
    layer_passes: FloatArray
    """(1,) see `calibration.Evidence`."""
    features: Mapping[str, FloatArray] = field(default_factory=dict)
    """See `calibration.residual_features`, each (1,)."""
    crowding: float = 1.0
    """Processes per core in the complete run, divided by those in the reduced run. Processes on a
    CPU share cores, which the cost model does not include.
    """

    def step_s(self, calibration: Calibration) -> float:
        """Expected step time in seconds."""
        step = calibration.step_time.predict(
            parts_s=self.parts_s, layer_passes=self.layer_passes, features=self.features
        )
        return float(step.median_s[0])


def reduce_run(
    *, fidelity: Fidelity, model: ModelSpec, training: TrainingWorkload, parallel: ParallelConfig
) -> tuple[ModelSpec, TrainingWorkload, ParallelConfig]:
    """Return model, workload and configuration, reduced as stated by `fidelity`.

    It may reduce layers, replicas and micro-batches. The batch size changes accordingly.
    """
    replicas = fidelity.data_parallel_size or parallel.data_parallel_size
    micro_batches = fidelity.num_micro_batches or num_micro_batches(training, parallel)
    return (
        replace(model, num_hidden_layers=fidelity.num_hidden_layers or model.num_hidden_layers),
        replace(training, global_batch_size=replicas * micro_batches * parallel.micro_batch_size),
        replace(parallel, data_parallel_size=replicas),
    )


def num_gpus(parallel: RunConfig, fidelity: Fidelity = WHOLE) -> int:
    """Return the number of devices of a run. For serving, this is one replica."""
    model_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if isinstance(parallel, ServingConfig):
        return model_ranks
    model_ranks *= parallel.context_parallel_size
    return model_ranks * (fidelity.data_parallel_size or parallel.data_parallel_size)


def fewest_replicas(
    sizes: Sizes, *, data_parallel_size: NDArray[np.int64], gpus_per_node: int
) -> NDArray[np.int64]:
    """Return the fewest replicas that preserve the communication pattern of d, shape (n,).

    It is 2, or as many as reach a second node if d replicas do. Ranks are ordered tensor, context,
    data, pipeline, so a data-parallel group spans t c d consecutive ranks.
    """
    d = np.asarray(data_parallel_size)
    neighbours = np.asarray(sizes.tensor_parallel_size * sizes.context_parallel_size)
    crossing = np.where(neighbours * d > gpus_per_node, gpus_per_node // neighbours + 1, 2)
    wanted = np.minimum(np.maximum(crossing, 2), d)
    kept = d.copy()
    for degree in np.unique(
        d
    ):  # The number of replicas stays a divisor, so that shards and batches divide as before.
        divisors = np.array([k for k in range(1, int(degree) + 1) if degree % k == 0])
        rows = d == degree
        kept[rows] = divisors[np.searchsorted(divisors, wanted[rows])]
    return kept


def fewest_micro_batches(training: TrainingWorkload, parallel: ParallelConfig) -> int:
    """Return the minimum number of micro-batches that reaches a steady state.

    It is twice the pipeline depth and, for interleaving, a multiple of the depth.
    """
    return min(num_micro_batches(training, parallel), 2 * parallel.pipeline_parallel_size)


class Outcome(Protocol):
    """Attributes of a run, complete or reduced, that this module needs."""

    @property
    def id(self) -> str: ...
    @property
    def parallel(self) -> RunConfig: ...
    @property
    def fidelity(self) -> Fidelity: ...
    @property
    def status(self) -> MeasurementStatus | None: ...
    @property
    def objective_s(self) -> float | None: ...


Run = TypeVar("Run", bound=Outcome)


def representative_runs(runs: Sequence[Run]) -> dict[RunConfig, Run]:
    """Return the run that represents each configuration.

    This is the last successful complete run, else the last complete run, else the last run. A
    failed complete run invalidates the reduced runs of its configuration, unless it only hit its
    time limit.
    """
    counting: dict[RunConfig, Run] = {}
    for run in runs:
        if run.status is not None:
            earlier = counting.get(run.parallel)
            if earlier is None or _rank(run) >= _rank(earlier):
                counting[run.parallel] = run
    return counting


def combine_repeats(runs: Sequence[Run]) -> dict[RunConfig, Repeats]:
    """Combine the runs of each configuration. Omit configurations without a step time."""
    times_s: dict[RunConfig, list[float]] = {}
    for run in runs:
        if run.objective_s is not None and run.fidelity.is_whole:
            times_s.setdefault(run.parallel, []).append(run.objective_s)
    repeated: dict[RunConfig, Repeats] = {}
    for parallel, run in representative_runs(runs).items():
        if (step_s := run.objective_s) is not None:
            times = times_s.get(parallel, [step_s])  # Only a reduced run.
            low_s, high_s = min(times), max(times)
            repeated[parallel] = Repeats(
                run_id=run.id,
                step_s=step_s,
                num_runs=len(times),
                low_s=low_s,
                high_s=high_s,
                reduced=not run.fidelity.is_whole,
            )
    return repeated


def _rank(run: Outcome) -> int:
    if run.status == "timeout":
        return -1
    return (1 + (run.status == "ok")) if run.fidelity.is_whole else 0


def find_leader(runs: Sequence[RunRecord]) -> tuple[RunRecord, float] | None:
    """Return the representative run with the shortest known step time, and that time in seconds."""
    timed = [
        (run, run.measurement.objective_s)
        for run in representative_runs(runs).values()
        if run.measurement is not None
    ]
    return min(
        ((run, step_s) for run, step_s in timed if step_s is not None),
        key=lambda pair: pair[1],
        default=None,
    )


def extrapolate(
    run: RunRecord, measurement: Measurement, *, runs: Sequence[RunRecord]
) -> Measurement:
    """Extrapolate a reduced run's measurement to the complete configuration.

    The estimate is predicted complete / predicted reduced x measured reduced x bias. The bias is
    fitted to configurations of this search that ran both ways. After a few such pairs, half of it
    is applied (`Search.extrapolation_log_sd`, `extrapolation_bias_log_sd`).
    """
    if run.fidelity.is_whole or measurement.status != "ok" or measurement.step_s is None:
        return measurement
    pairs, own, common = (
        _extrapolation_errors(runs),
        assumed().search.extrapolation_log_sd,
        assumed().search.extrapolation_bias_log_sd,
    )
    certainty = len(pairs) / own**2 + 1.0 / common**2
    bias = sum(pairs) / own**2 / certainty
    log_sd = math.sqrt(own**2 + 1.0 / certainty)
    step_s = measurement.step_s * run.predicted[EXTRAPOLATION_RATIO] * math.exp(bias)
    spread = math.exp(NORMAL_QUANTILE * log_sd)
    return replace(
        measurement,
        fidelity=run.fidelity,
        extrapolated_step_s=step_s,
        extrapolated_step_s_interval=(step_s / spread, step_s * spread),
    )


def _extrapolation_errors(runs: Sequence[RunRecord]) -> list[float]:
    """Return ln(measured / extrapolated without bias) of configurations that ran both ways."""
    whole: dict[RunConfig, float] = {}
    implied: dict[RunConfig, float] = {}
    for run in runs:
        if run.measurement is None or run.measurement.step_s is None:
            continue
        if run.fidelity.is_whole:
            whole[run.parallel] = run.measurement.step_s
        else:
            implied[run.parallel] = run.measurement.step_s * run.predicted[EXTRAPOLATION_RATIO]
    return [
        math.log(whole[parallel] / implied[parallel]) for parallel in implied if parallel in whole
    ]


def num_micro_batches(training: TrainingWorkload, parallel: ParallelConfig) -> int:
    """Return m = B / (d b), the number of micro-batches per replica."""
    return training.global_batch_size // (parallel.data_parallel_size * parallel.micro_batch_size)
