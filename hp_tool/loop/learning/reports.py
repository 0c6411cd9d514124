"""Measurements reported by trainings or files, checked before they may calibrate predictions."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated

from annotated_types import Interval

from hp_tool.cost.flops import flops_tolerance, step_tokens
from hp_tool.domain.device_names import RECOGNIZED_GPUS, matches_gpu
from hp_tool.domain.digests import problem_digest
from hp_tool.domain.fields import Strict, check_bounds
from hp_tool.domain.hardware import GpuSpec
from hp_tool.domain.measurement import Hardware, Measurement, MeasurementStatus, Seconds
from hp_tool.domain.measurement_records import (
    Imported,
    MeasurementRecord,
    MeasurementSource,
    NewMeasurement,
    Refused,
)
from hp_tool.domain.parallel import ParallelConfig, ParallelQuery
from hp_tool.domain.parts import COMPUTING, STEP_KEYS
from hp_tool.domain.ports import Store
from hp_tool.domain.query import Query
from hp_tool.errors import HpToolError, InputError, StoreError
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.learning.series import cluster_key
from hp_tool.questions import schema, training
from hp_tool.questions.answers import Line
from hp_tool.questions.training.problem import TrainingProblem, resolve_training

Bytes = Annotated[int, Interval(ge=1, le=1 << 50)]
"""Positive, because a reported peak was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedMeasurement(Measurement):
    """Reported figures of a training; either `step_s` or `tokens_per_second_per_gpu` is
    required.
    """

    status: MeasurementStatus = "ok"
    """How the run ended."""
    step_s: Seconds | None = None
    """Median seconds of an optimizer step."""
    peak_memory_bytes: Bytes | None = None
    """Largest allocated memory over the ranks."""
    peak_reserved_bytes: Bytes | None = None
    peak_memory_bytes_per_rank: tuple[Bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementReport(Strict):
    """A measurement reported by a training, with its query and configuration."""

    query: Query
    """Model, cluster and training."""
    parallel: ParallelQuery
    """The configuration of the run."""
    measurement: ReportedMeasurement
    """Median step time or throughput, or the reason for a failure."""


def add_reports(
    lines: Iterable[Line],
    *,
    store: Store,
    source: MeasurementSource,
    key: Callable[[int, bytes], str | None],
    resolve: Callable[[Query], Query] = lambda query: query,
    hold: bool = False,
) -> Imported:
    """Store each valid report of a file.

    `key` returns the idempotency key of a line from its number and bytes.
    """
    stored: list[MeasurementRecord] = []
    refused: list[Refused] = []
    for number, line in enumerate(lines, start=1):
        try:
            if isinstance(line, HpToolError):
                raise line
            stored.append(
                add_report(
                    line,
                    store=store,
                    source=source,
                    key=key(number, line),
                    resolve=resolve,
                    hold=hold,
                )
            )
        except StoreError:
            raise
        except HpToolError as error:
            refused.append(
                Refused(line=number, code=error.code, message=error.message, field=error.field)
            )
    return Imported(stored=tuple(stored), refused=tuple(refused))


def add_report(
    data: bytes,
    *,
    store: Store,
    source: MeasurementSource,
    key: str | None,
    resolve: Callable[[Query], Query] = lambda query: query,
    hold: bool = False,
) -> MeasurementRecord:
    """Store the measurement of a request body or a line, and return it.

    If the idempotency key was used before, return the measurement stored then.

    Args:
        data: The body or line.
        store: The store to write to.
        source: Source of the report.
        key: The idempotency key, if any.
        resolve: Function that resolves the names in the query, or rejects it.
        hold: Store it so that it calibrates only after a user accepts it.

    Raises:
        InputError: The report is malformed, its configuration illegal, its numbers impossible, or
            the hardware does not match.
        ConflictError: The idempotency key was used with another report.
    """
    report: MeasurementReport = schema.parse(MeasurementReport, data)
    body = {"source": source, **schema.parse_mapping(data)}
    if key is not None:
        earlier = store.earlier_measurement(request=body, idempotency_key=key)
        if earlier is not None:
            return earlier
    measurement = _measurement(report, source=source, resolve=resolve)
    measurement = replace(measurement, state="held") if hold else measurement
    return store.add_measurement(measurement=measurement, request=body, idempotency_key=key)


def read_report(
    data: bytes,
    *,
    source: MeasurementSource,
    resolve: Callable[[Query], Query] = lambda query: query,
) -> NewMeasurement:
    """Return the measurement of a request body or a line without storing it.

    Raises:
        InputError: As in `add_report`.
    """
    return _measurement(schema.parse(MeasurementReport, data), source=source, resolve=resolve)


def _measurement(
    report: MeasurementReport, *, source: MeasurementSource, resolve: Callable[[Query], Query]
) -> NewMeasurement:
    query = resolve(replace(report.query, parallel=report.parallel))
    query = schema.parse_query(schema.to_dict(query))
    problem = resolve_training(query)
    estimate = training.estimate(query=query, with_fixes=False)
    if (
        estimate.time is None or estimate.memory is None
    ):  # A configuration that is predicted not to fit may still have run.
        reason = estimate.reasons[0]
        raise InputError(
            f"The reported configuration cannot run: {reason.message}. Check `parallel`.",
            field="parallel",
            code=reason.code,
        )
    measurement, hardware = _completed(report.measurement, problem)
    check_possible(measurement, problem=problem, predicted_s=estimate.time.step_s)
    assert estimate.parallel is not None
    check_parts(measurement, problem=problem, config=estimate.parallel)
    new = NewMeasurement(
        source=source,
        cluster_key=cluster_key(problem.cluster, hardware),
        gpu=hardware.gpu,
        framework=problem.workload.framework,
        model=problem.model.name,
        query=schema.query_mapping(query),
        parallel=estimate.parallel,
        measurement=measurement,
        predicted={
            "step_s": estimate.time.step_s,
            "memory_allocated_bytes": estimate.memory.allocated_bytes,
        },
        problem_digest=problem_digest(
            model=problem.model, cluster=problem.cluster, training=problem.workload
        ),
    )
    doubtful = assumed().learning.doubtful_factor
    return (
        replace(new, state="held")
        if any(times >= doubtful for times in new.distances.values())
        else new
    )


def _completed(
    report: ReportedMeasurement, problem: TrainingProblem
) -> tuple[Measurement, Hardware]:
    """Return the measurement with derived values and its hardware."""
    cluster = problem.cluster
    hardware = report.hardware or Hardware(gpu=cluster.gpu.name, num_gpus=cluster.num_gpus)
    if hardware.gpu != cluster.gpu.name:
        raise InputError(
            f"The run measured {hardware.gpu}, but the query's cluster has {cluster.gpu.name}; "
            "they must be equal.",
            field="measurement.hardware.gpu",
            code="hardware_mismatch",
        )
    _check_hardware(
        hardware, gpu=cluster.gpu, num_gpus=cluster.num_gpus if report.fidelity.is_whole else None
    )
    step_s, rate = report.step_s, report.tokens_per_second_per_gpu
    tokens = step_tokens(problem.workload) / cluster.num_gpus
    if report.fidelity.is_whole:
        if (
            step_s is not None
            and rate is not None
            and abs(step_s * rate / tokens - 1.0) > assumed().learning.rate_disagreement
        ):
            raise InputError(
                f"step_s {step_s:g} equals {tokens / step_s:.6g} tokens/s per GPU, but "
                f"tokens_per_second_per_gpu is {rate:g}. Report only one of them.",
                field="measurement.tokens_per_second_per_gpu",
                code="contradiction",
            )
        step_s = tokens / rate if step_s is None and rate is not None else step_s
        rate = tokens / step_s if rate is None and step_s is not None else rate
        check_bounds(
            Measurement, {"step_s": step_s, "tokens_per_second_per_gpu": rate}, field="measurement"
        )
    if report.status == "ok" and step_s is None:
        message = (
            "give step_s or tokens_per_second_per_gpu, or the status of a run that failed: "
            "oom, timeout, crashed"
        )
        raise InputError(message, field="measurement.step_s", code="missing_field")
    _check_parts(report.parts_s, step_s=step_s)
    values = {each.name: getattr(report, each.name) for each in fields(Measurement)}
    return Measurement(
        **values | {"step_s": step_s, "tokens_per_second_per_gpu": rate, "hardware": hardware}
    ), hardware


def _check_hardware(hardware: Hardware, *, gpu: GpuSpec, num_gpus: int | None) -> None:
    """Check the reported device.

    Raises:
        InputError: `hardware_mismatch`, the device's name or the stated number of devices differs.
    """
    name = hardware.device_name
    if name and gpu.name in RECOGNIZED_GPUS and matches_gpu(name, gpu=gpu.name) is False:
        raise InputError(
            f"The run measured {name}, but the query's cluster has {gpu.name}; set cluster.gpu to "
            "the measured GPU.",
            field="measurement.hardware.device_name",
            code="hardware_mismatch",
        )
    if num_gpus is not None and hardware.num_gpus not in (1, num_gpus):  # 1 if omitted.
        raise InputError(
            f"The run used {hardware.num_gpus} devices, but the query's cluster has {num_gpus}. "
            f"Set cluster.num_gpus to {hardware.num_gpus}.",
            field="measurement.hardware.num_gpus",
            code="hardware_mismatch",
        )


def _check_parts(parts_s: Mapping[str, float] | None, *, step_s: float | None) -> None:
    """Check that the parts have known names and sum to the step time.

    Raises:
        InputError: A part is unknown, or the sum differs.
    """
    if parts_s is None:
        return
    if unknown := next((name for name in parts_s if name not in STEP_KEYS), None):
        raise InputError(
            f"{unknown} is not a part of a step; known parts: {', '.join(STEP_KEYS)}",
            field="measurement.parts_s",
            code="unknown_key",
        )
    total = sum(parts_s.values())
    if step_s is None or abs(total / step_s - 1.0) > assumed().learning.rate_disagreement:
        step = "missing" if step_s is None else f"{step_s:.4g} s"
        raise InputError(
            f"parts_s sum to {total:.4g} s, but step_s is {step}. Report both for the same step.",
            field="measurement.parts_s",
            code="contradiction",
        )


def check_possible(
    measurement: Measurement, *, problem: TrainingProblem, predicted_s: float
) -> None:
    """Check that step time and peak memory are physically possible.

    CPUs are not checked, because their limits depend on the host.

    Raises:
        InputError: `implausible`: the step time is off the prediction by
            `Learning.impossible_factor` or exceeds the devices' peak FLOP/s, or the memory peak
            exceeds the device.
    """
    gpu, step_s, peak = problem.cluster.gpu, measurement.step_s, measurement.peak_memory_bytes
    if gpu.kind == "cpu":
        return
    most = assumed().learning.impossible_factor
    if step_s is not None and not predicted_s / most <= step_s <= most * predicted_s:
        raise InputError(
            f"step_s {step_s:g} is implausible: {predicted_s:.3g} s is predicted. Report "
            "the time in seconds of one optimizer step.",
            field="measurement.step_s",
            code="implausible",
        )
    least_s = problem.peak_step_s
    if step_s is not None and step_s < least_s:
        raise InputError(
            f"step_s {step_s:g} is impossible: even at peak FLOP/s, one step takes at least "
            f"{least_s:.3g} s. Report the time in seconds of one optimizer step of this batch.",
            field="measurement.step_s",
            code="implausible",
        )
    largest = (
        max(kind.gpu.memory_bytes for kind in problem.cluster.kinds)
        if problem.cluster.kinds
        else gpu.memory_bytes
    )
    if peak is not None and peak > largest:
        raise InputError(
            f"peak_memory_bytes {peak:,} is impossible: the device has {largest:,.0f}. Report the "
            "bytes of the fullest device.",
            field="measurement.peak_memory_bytes",
            code="implausible",
        )


def check_parts(
    measurement: Measurement, *, problem: TrainingProblem, config: ParallelConfig
) -> None:
    """Check the parts of a training step.

    Raises:
        InputError: `implausible`: there is no optimizer, or less compute than the FLOPs take.
    """
    parts = measurement.parts_s
    if parts is None or problem.cluster.gpu.kind == "cpu":
        return
    if not parts.get("optimizer") and not parts.get("offload"):
        raise InputError(
            "parts_s has no optimizer time. Report complete training steps, with forward pass, "
            "backward pass and optimizer.",
            field="measurement.parts_s",
            code="implausible",
        )
    computed_s = sum(parts.get(name, 0.0) for name in COMPUTING)
    if computed_s * flops_tolerance(config) < problem.peak_step_s:
        raise InputError(
            f"{', '.join(COMPUTING)} in parts_s sum to {computed_s:.3g} s, but at their peak "
            f"the devices need {problem.peak_step_s:.3g} s for a step's FLOPs; check the "
            "query's model and batch",
            field="measurement.parts_s",
            code="implausible",
        )
