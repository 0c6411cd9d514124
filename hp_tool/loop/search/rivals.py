"""Several configurations in one job. They share imports, rendezvous and queue time.

The rivals, which are the configurations after the first one, are part of a run's prediction, so
that a resumed search submits the same job. When the job has ended, each rival becomes a separate
run with its share of the cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hp_tool.domain.measurement import JobResult, Measurement
from hp_tool.domain.records import REUSED, JsonObject, RunRecord
from hp_tool.domain.states import RunState

RIVALS = "rivals"
"""Key in a run's prediction for the predictions of its job's other configurations, each with its
DIGEST.
"""
DIGEST = "digest"
BESIDE = "beside"
"""Key in such a configuration's prediction for the run whose job executed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Prediction, measurement and GPU-seconds of one configuration in a job of several."""

    predicted: JsonObject
    measurement: Measurement
    gpu_seconds: float


def rivals_of(run: RunRecord) -> list[JsonObject]:
    """Return the predictions of the configurations that a job runs after its first one."""
    return list(run.predicted.get(RIVALS, ()))


def count_configurations(runs: Sequence[RunRecord]) -> int:
    """Return the number of configurations that the jobs of these runs measure."""
    return sum(1 + len(rivals_of(run)) for run in runs)


def num_jobs(runs: Sequence[RunRecord]) -> int:
    """Return the number of jobs that produced the measurements of these runs."""
    return sum(
        run.state is RunState.FINISHED and not {REUSED, BESIDE} & run.predicted.keys()
        for run in runs
    )


def split_job(run: RunRecord, measurement: Measurement, *, gpu_seconds: float) -> list[Share]:
    """Split a job's measurement and cost between its measured configurations, first one first."""
    if not isinstance(measurement, JobResult):
        return [Share(predicted=run.predicted, measurement=measurement, gpu_seconds=gpu_seconds)]
    per_s = gpu_seconds / measurement.wall_s if measurement.wall_s else 0.0
    beside = [
        Share(
            predicted=predicted | {BESIDE: run.id},
            measurement=rival,
            gpu_seconds=per_s * (rival.wall_s or 0.0),
        )
        for predicted, rival in zip(
            rivals_of(run), measurement.rivals, strict=False
        )  # The job may have ended before the last configuration.
    ]
    own = max(gpu_seconds - sum(each.gpu_seconds for each in beside), 0.0)
    return [
        Share(predicted=run.predicted, measurement=measurement.first_measurement, gpu_seconds=own),
        *beside,
    ]
