"""Several configurations in one job, which share imports, rendezvous and queue time.

The rivals are part of a run's prediction, so that a resumed search submits the same job. Each rival
becomes a separate run when the job has ended, with its share of the cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hp_tool.domain.measurement import JobResult, Measurement
from hp_tool.domain.records import REUSED, JsonObject, RunRecord
from hp_tool.domain.states import RunState

RIVALS = "rivals"
"""Key, in a run's prediction, of the predictions of the other configurations in its job, each with
its DIGEST.
"""
DIGEST = "digest"
BESIDE = "beside"
"""Key, in such a configuration's prediction, of the run whose job executed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One configuration's prediction, measurement and GPU-seconds in a job of several."""

    predicted: JsonObject
    measurement: Measurement
    gpu_seconds: float


def rivals_of(run: RunRecord) -> list[JsonObject]:
    """Return the predictions of the configurations that the run's job executes afterwards."""
    return list(run.predicted.get(RIVALS, ()))


def count_configurations(runs: Sequence[RunRecord]) -> int:
    """Return how many configurations the jobs of these runs measure."""
    return sum(1 + len(rivals_of(run)) for run in runs)


def num_jobs(runs: Sequence[RunRecord]) -> int:
    """Return how many jobs produced these runs' measurements."""
    return sum(
        run.state is RunState.FINISHED and not {REUSED, BESIDE} & run.predicted.keys()
        for run in runs
    )


def split_job(run: RunRecord, measurement: Measurement, *, gpu_seconds: float) -> list[Share]:
    """Return the first configuration's share of its job, then those of the other measured
    configurations.
    """
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
