"""What a real training reports of itself, or a file says of it, checked before it may teach anyone anything."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from hp_tool import training
from hp_tool.cost.flops import step_tokens
from hp_tool.domain.digests import problem_digest
from hp_tool.domain.fields import Strict
from hp_tool.domain.measurement import Hardware, Measurement
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.records import MeasurementSource, NewMeasurement
from hp_tool.errors import InputError
from hp_tool.learning.series import cluster_key
from hp_tool.queries import schema
from hp_tool.training.problem import TrainingProblem, resolve_training

TRUST: dict[MeasurementSource, float] = {"reported": 0.5, "file": 1.0}
"""A stranger's figures count less than those that the owner of the database brings; our own runs have 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementReport(Strict):
    """A training's own figures."""

    query: Query
    """What is trained, and where."""
    parallel: ParallelQuery
    """The one configuration it ran with."""
    measurement: Measurement
    """Its numbers: a median step time, or why there is none."""


def read_report(
    data: bytes, *, source: MeasurementSource, resolve: Callable[[Query], Query] = lambda query: query
) -> NewMeasurement:
    """The measurement in a body or line, with the prediction it is to be held against. `resolve` may refuse its query, or
    look its names up.

    Raises:
        InputError: the report is malformed, its configuration illegal, or its numbers cannot be or belong to other hardware.
    """
    report: MeasurementReport = schema.parse(MeasurementReport, data)
    query = resolve(replace(report.query, parallel=report.parallel))
    query = schema.parse_query(schema.to_dict(query))
    problem = resolve_training(query)
    estimate = training.estimate(query=query)
    if estimate.time is None or estimate.memory is None:  # one that is predicted not to fit may well have run
        reason = estimate.reasons[0]
        raise InputError(f"this configuration cannot have run: {reason.message}", field="parallel", code=reason.code)
    measurement, hardware = _checked(report.measurement, problem)
    check_plausible(measurement, problem=problem, predicted_s=estimate.time.step_s)
    assert estimate.parallel is not None
    return NewMeasurement(
        source=source,
        trust=TRUST[source],
        cluster_key=cluster_key(problem.cluster, hardware),
        gpu=hardware.gpu,
        framework=problem.workload.framework,
        model=problem.model.name,
        query=schema.to_dict(query),
        parallel=estimate.parallel,
        measurement=measurement,
        predicted={"step_s": estimate.time.step_s, "memory_allocated_bytes": estimate.memory.allocated_bytes},
        problem_digest=problem_digest(model=problem.model, cluster=problem.cluster, training=problem.workload),
    )


def _checked(measurement: Measurement, problem: TrainingProblem) -> tuple[Measurement, Hardware]:
    """The measurement with what follows from its step time filled in, and the hardware it belongs to."""
    for name in ("step_s", "tokens_per_second_per_gpu", "peak_memory_bytes", "wall_s"):
        value = getattr(measurement, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise InputError(f"{name} must be above zero, got {value}", field=f"measurement.{name}", code="invalid_value")
    if measurement.status == "ok" and measurement.step_s is None:
        message = "step_s is missing; a measurement that is ok has it"
        raise InputError(message, field="measurement.step_s", code="missing_field")
    cluster, workload = problem.cluster, problem.workload
    hardware = measurement.hardware or Hardware(gpu=cluster.gpu.name, num_gpus=cluster.num_gpus)
    if hardware.gpu != cluster.gpu.name:
        raise InputError(
            f"measured on {hardware.gpu}, the cluster has {cluster.gpu.name}: a measurement belongs to its hardware",
            field="measurement.hardware.gpu",
            code="hardware_mismatch",
        )
    if measurement.step_s is not None and measurement.tokens_per_second_per_gpu is None:
        rate = step_tokens(workload) / measurement.step_s / cluster.num_gpus
        measurement = replace(measurement, tokens_per_second_per_gpu=rate)
    return replace(measurement, hardware=hardware), hardware


ORDERS = 100.0
"""Times the prediction, or this part of it: runs that stalled took up to fifty times as long as others like them; what is
farther off is another unit.
"""


def check_plausible(measurement: Measurement, *, problem: TrainingProblem, predicted_s: float) -> None:
    """Raises InputError `implausible` for a step ORDERS away from the prediction, and for a peak above the device's memory.
    Of a CPU, whose speed and memory are its host's, not.
    """
    gpu, step_s, peak = problem.cluster.gpu, measurement.step_s, measurement.peak_memory_bytes
    if gpu.kind == "cpu":
        return
    if step_s is not None and not predicted_s / ORDERS <= step_s <= ORDERS * predicted_s:
        raise InputError(
            f"step_s {step_s:g} cannot be where {predicted_s:.3g} is predicted; report the seconds of one optimizer step",
            field="measurement.step_s",
            code="implausible",
        )
    largest = max(kind.gpu.memory_bytes for kind in problem.cluster.kinds) if problem.cluster.kinds else gpu.memory_bytes
    if peak is not None and peak > largest:
        raise InputError(
            f"peak_memory_bytes {peak:,} cannot be: the device has {largest:,.0f}; report the bytes of the fullest device",
            field="measurement.peak_memory_bytes",
            code="implausible",
        )
