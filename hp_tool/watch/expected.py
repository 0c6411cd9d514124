"""Predicted step time of a watched job."""

from __future__ import annotations

from hp_tool.domain.query import Query
from hp_tool.domain.watch import Expected
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions.training.answers import Training
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.problem import resolve_training
from hp_tool.wording.words import layout_arithmetic


def expected_pace(query: Query, *, calibrations: Calibrations | None = None) -> Expected:
    """Predict the step time of the query's configuration, even if it may run out of memory.

    Raises:
        InputError: The configuration cannot run.
        UnsupportedError: The query is not a training query.
    """
    if query.kind != "training":
        raise UnsupportedError("watch supports training queries only", field="kind")
    prior, calibrated = Training(query=query).estimate(with_fixes=False, calibrations=calibrations)
    estimate = calibrated or prior
    if estimate.time is None or estimate.intervals is None:
        reason = estimate.reasons[0].message if estimate.reasons else "no step time predicted"
        raise InputError(f"This configuration cannot run: {reason}", field="parallel")
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
        layout="" if estimate.parallel is None else layout_arithmetic(estimate.parallel),
    )
