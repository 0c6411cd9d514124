"""Sensitivity of a recommendation to the number of devices, to each axis, and to better
hardware.
"""

import math
from dataclasses import replace
from typing import Any

from hp_tool.domain import bounds
from hp_tool.domain.frameworks import DEGREES
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.parallel import recompute_name
from hp_tool.domain.query import Query, RankBy
from hp_tool.domain.result import Recommendation
from hp_tool.domain.sensitivity import Influence, ScalingPoint, Sensitivity
from hp_tool.errors import UnsupportedError
from hp_tool.questions.configuration import NUM_GPUS, Configuration, with_value
from hp_tool.questions.training.calibrated import CalibratedPredictor, Calibrations
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.ranking.best import search_best
from hp_tool.questions.training.ranking.choice import choose_rows, chosen_recommendations
from hp_tool.questions.training.ranking.recommend import device_counts
from hp_tool.questions.training.usual_settings import answer_with_usual_settings

MAX_COST_RATIO = 1.05
FASTER_FACTOR, LARGER_FACTOR = 2.0, 1.5
"""Factors for bandwidth and for memory of the better hardware."""
UNUSED_VALUES: dict[str, int | str] = {
    **dict.fromkeys((*DEGREES, "micro_batch_size"), 1),
    "recompute": "none",
    "zero_stage": 0,
    "data_parallel_shard_size": 0,
}
"""Value with which each axis is unused."""


def sensitivity(
    query: Query,
    *,
    first: Recommendation | None = None,
    calibrations: Calibrations | None = None,
) -> Sensitivity:
    """Return rank 1 with other numbers of devices, without each axis, and on better hardware.

    Each figure is rank 1 of a separate ranking with the settings of `first` other than its layout.
    Calibrations do not apply to better hardware, so the cost model's ratio of step times is used
    there.

    Args:
        query: A query with open axes.
        first: Rank 1 of the query's ranking; None if no configuration is acceptable.
        calibrations: Calibrations of clusters; None: use only the cost model.

    Raises:
        UnsupportedError: The cluster has two kinds of GPU.
    """
    problem, predictor = _with_settings_of(first, query, calibrations)
    if problem.kinds:
        raise UnsupportedError(
            "sensitivity is not supported for two kinds of GPU; remove it", field="cluster.stages"
        )
    rank_by = query.rank_by
    start = None
    if first is not None:
        full_problem = problem.with_num_gpus(first.set.get(NUM_GPUS, problem.cluster.num_gpus))
        start = _scaling_point(full_problem, first)
    scaling = [
        point
        for count in _device_counts(problem)
        if (point := _scale_devices(problem, count, start, rank_by=rank_by, predictor=predictor))
    ]
    cheapest = min((point.gpu_seconds_per_step for point in scaling), default=math.inf)
    counts_near_cheapest = [
        point.num_gpus
        for point in scaling
        if point.gpu_seconds_per_step <= MAX_COST_RATIO * cheapest
    ]
    axes: list[Influence] = []
    hardware: list[Influence] = []
    if first is not None and start is not None:
        free_axes = [
            name
            for name in UNUSED_VALUES
            if getattr(problem.parallel, name) is None
            and (problem.model.num_experts or not name.startswith("expert"))
        ]
        for name in free_axes:
            value = getattr(start.parallel, name)
            step_s: float | None = start.step_s
            if (recompute_name(value) if name == "recompute" else value) != UNUSED_VALUES[name]:
                unused: dict[str, Any] = {name: UNUSED_VALUES[name]}
                without = replace(full_problem, parallel=replace(full_problem.parallel, **unused))
                step_s = _best_step_s(without, rank_by=rank_by, predictor=predictor)
            axes.append(_influence(f"without {name}", step_s, start.step_s))
        hardware = _with_better_hardware(query, full_problem, first, start)
    return Sensitivity(
        start=start,
        scaling=tuple(scaling),
        fewest_gpus_near_cheapest=min(counts_near_cheapest, default=None),
        fastest_gpus_near_cheapest=max(counts_near_cheapest, default=None),
        axes=tuple(
            sorted(
                axes,
                key=lambda one: -(math.inf if one.change_fraction is None else one.change_fraction),
            )
        ),
        hardware=tuple(hardware),
    )


def _with_settings_of(
    first: Recommendation | None, query: Query, calibrations: Calibrations | None
) -> tuple[TrainingProblem, CalibratedPredictor | None]:
    """Return the query's problem with the values that the ranking chose (except the number of
    devices), and its calibrated predictor.

    Without a calibration, the predictor is None, and rows have the usual settings.
    """
    problem = resolve_training(query)  # rejects lists under `training`
    values = {} if first is None else {**first.set}
    values.pop(NUM_GPUS, None)
    for path, value in values.items():
        query = with_value(query, path, value)
    problem = resolve_training(query) if values else problem
    predictor = None if calibrations is None else calibrations(problem)
    return replace(problem, asked=query if predictor is None else None), predictor


def _with_better_hardware(
    query: Query, problem: TrainingProblem, first: Recommendation, start: ScalingPoint
) -> list[Influence]:
    """Return the effects of more memory and of faster links on the step time of rank 1.

    The layout of rank 1 is included in the comparison, so that better hardware is never slower.
    """
    first_query = Configuration.from_row(first, query=query).query
    if not first.calibrated_estimate:
        first_query, _ = answer_with_usual_settings(first_query)
    resolved = resolve_configuration(first_query)
    now = first.estimate.time
    assert now is not None  # A legal row.
    now_s = (
        _best_step_s(problem, rank_by=query.rank_by) if first.calibrated_estimate else now.step_s
    )
    influences = []
    for name, better in _improved_clusters(problem.cluster):
        same = replace(
            resolved, row=None, problem=replace(resolved.problem, cluster=better)
        ).estimate(with_fixes=False)
        assert same.time is not None
        ratio = same.time.step_s / now.step_s
        faster_s = _best_step_s(replace(problem, cluster=better), rank_by=query.rank_by)
        if faster_s is not None and now_s is not None:
            ratio = min(ratio, faster_s / now_s)
        influences.append(_influence(name, start.step_s * ratio, start.step_s))
    return influences


def _device_counts(problem: TrainingProblem) -> list[int]:
    """Return the cluster's number of devices, half of it, a quarter of it and so on, as far as
    layouts can use them.
    """
    max_count = problem.cluster.num_gpus
    return [
        count
        for count in device_counts(problem)
        if max_count % count == 0 and (max_count // count).bit_count() == 1
    ]


def _scale_devices(
    problem: TrainingProblem,
    num_gpus: int,
    start: ScalingPoint | None,
    *,
    rank_by: RankBy,
    predictor: CalibratedPredictor | None,
) -> ScalingPoint | None:
    """Return rank 1 with this number of devices; None if no configuration is acceptable."""
    if start is not None and num_gpus == start.num_gpus:
        return start
    smaller = problem.with_num_gpus(num_gpus)
    row = _rank_first(smaller, rank_by=rank_by, predictor=predictor)
    return None if row is None else _scaling_point(smaller, row)


def _scaling_point(problem: TrainingProblem, row: Recommendation) -> ScalingPoint:
    estimate = row.preferred_estimate
    assert (
        estimate.time is not None and estimate.tokens_per_second_per_gpu is not None
    )  # Legal rows.
    return ScalingPoint(
        num_gpus=problem.cluster.num_gpus,
        step_s=estimate.time.step_s,
        tokens_per_second_per_gpu=estimate.tokens_per_second_per_gpu,
        gpu_seconds_per_step=estimate.time.step_s * problem.cluster.num_gpus,
        days=estimate.calendar_days,
        cost=estimate.cost,
        parallel=row.parallel,
    )


def _rank_first(
    problem: TrainingProblem, *, rank_by: RankBy, predictor: CalibratedPredictor | None = None
) -> Recommendation | None:
    """Return rank 1 of the problem's ranking; None if no configuration is acceptable."""
    bounds.check_work()
    best = search_best(problem, keep=1, rank_by=rank_by, predictor=predictor)
    rows = chosen_recommendations(choose_rows(best, count=1))
    return rows[0] if rows else None


def _best_step_s(
    problem: TrainingProblem, *, rank_by: RankBy, predictor: CalibratedPredictor | None = None
) -> float | None:
    """Return the step time of rank 1 in seconds; None if no configuration is acceptable."""
    row = _rank_first(problem, rank_by=rank_by, predictor=predictor)
    return (
        None
        if row is None or row.preferred_estimate.time is None
        else row.preferred_estimate.time.step_s
    )


def _improved_clusters(cluster: ClusterSpec) -> list[tuple[str, ClusterSpec]]:
    """Return (name of the improvement, cluster) for more memory, and for each kind of link made
    faster.
    """
    gpu = cluster.gpu
    memory = replace(cluster, gpu=replace(gpu, memory_bytes=int(LARGER_FACTOR * gpu.memory_bytes)))
    clusters = [(f"{LARGER_FACTOR:g} x memory", memory)]
    if cluster.num_gpus > cluster.gpus_per_node:
        network = FASTER_FACTOR * cluster.inter_node_bandwidth_bytes_per_second
        clusters.append(
            (
                f"{FASTER_FACTOR:g} x network",
                replace(cluster, inter_node_bandwidth_bytes_per_second=network),
            )
        )
    if gpu.nvlink_bandwidth_bytes_per_second:
        links = replace(
            gpu,
            nvlink_bandwidth_bytes_per_second=FASTER_FACTOR * gpu.nvlink_bandwidth_bytes_per_second,
        )
        clusters.append((f"{FASTER_FACTOR:g} x NVLink", replace(cluster, gpu=links)))
    return clusters


def _influence(change: str, step_s: float | None, before_s: float | None) -> Influence:
    fraction = None if step_s is None or before_s is None else step_s / before_s - 1.0
    return Influence(change=change, step_s=step_s, change_fraction=fraction)
