"""The step time that is expected of a job's configuration."""

from __future__ import annotations

from hp_tool.domain.query import Query
from hp_tool.domain.watch import Expected
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions.training.answers import Training
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.problem import resolve_training
from hp_tool.wording.words import arithmetic


def expected_of(query: Query, *, calibrations: Calibrations | None = None) -> Expected:
    """The prediction for the query's one configuration. Raises InputError, UnsupportedError.

    One that is predicted not to fit may well run: it is timed all the same.
    """
    if query.kind != "training":
        raise UnsupportedError("watch reads trainings; this query serves", field="kind")
    prior, calibrated = Training(query=query).estimate(with_fixes=False, calibrations=calibrations)
    estimate = calibrated or prior
    if estimate.time is None or estimate.intervals is None:
        reason = estimate.reasons[0].message if estimate.reasons else "it has no step time"
        raise InputError(f"this configuration cannot run: {reason}", field="parallel")
    problem = resolve_training(query)
    cluster = problem.cluster
    used = estimate.provenance.get("calibration") if calibrated is not None else None
    return Expected(
        step_s=estimate.time.step_s,
        interval=estimate.intervals.step_s,
        calibration=None
        if used is None
        else str(used.get("version"))
        if isinstance(used, dict)
        else str(used),
        num_gpus=cluster.num_gpus,
        price_per_gpu_hour=cluster.price_per_gpu_hour,
        samples=float(problem.workload.global_batch_size),
        layout="" if estimate.parallel is None else arithmetic(estimate.parallel),
    )
