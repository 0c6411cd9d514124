"""Sensitivity of a recommendation: other numbers of devices, without an axis, and on better
hardware.
"""

import math
from dataclasses import replace

import numpy as np

from hp_tool.domain import bounds
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.query import Query
from hp_tool.domain.sensitivity import Influence, ScalingPoint, Sensitivity
from hp_tool.errors import UnsupportedError
from hp_tool.questions.training.calibrated import CalibratedPredictor, Calibrations
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.ranking.best import best_of
from hp_tool.questions.training.ranking.choice import recommendations_of
from hp_tool.questions.training.ranking.recommend import device_counts

NEAR_CHEAPEST = 1.05
FASTER, LARGER = 2.0, 1.5
"""Bandwidth and memory factors of the better hardware."""
PLAIN: dict[str, int | str] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "virtual_pipeline_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "micro_batch_size": 1,
    "recompute": "none",
    "zero_stage": 0,
    "data_parallel_shard_size": 0,
}
"""The value of each axis that disables it."""


def sensitivity(query: Query, *, calibrations: Calibrations | None = None) -> Sensitivity:
    """Return the fastest step with other numbers of devices, without each axis, and on better
    hardware.

    Each figure is the best of a separate ranking, by predicted step time.

    Raises:
        UnsupportedError: The cluster has two kinds of GPU.
    """
    problem = resolve_training(query)
    if problem.kinds:
        raise UnsupportedError(
            "sensitivity is not modelled for two kinds of GPU; leave it out", field="cluster.stages"
        )
    predictor = None if calibrations is None else calibrations(problem)
    scaling = [
        point
        for count in _counts(problem)
        if (point := _point(problem.with_num_gpus(count), predictor))
    ]
    cheapest = min((point.gpu_seconds_per_step for point in scaling), default=math.inf)
    near = [
        point.num_gpus
        for point in scaling
        if point.gpu_seconds_per_step <= NEAR_CHEAPEST * cheapest
    ]
    step_s = _fastest_s(problem, predictor)
    free = [
        name
        for name in PLAIN
        if getattr(problem.parallel, name) is None
        and (problem.model.num_experts or not name.startswith("expert"))
    ]
    axes = [
        _influence(f"without {name}", _fastest_s(_without(problem, name), predictor), step_s)
        for name in free
    ]
    better = [
        _influence(name, _fastest_s(replace(problem, cluster=one), None), step_s)
        for name, one in _better(problem.cluster)
    ]
    return Sensitivity(
        scaling=tuple(scaling),
        fewest_gpus_near_cheapest=min(near, default=None),
        fastest_gpus_near_cheapest=max(near, default=None),
        axes=tuple(
            sorted(
                axes,
                key=lambda one: -(math.inf if one.change_fraction is None else one.change_fraction),
            )
        ),
        hardware=tuple(better),
    )


def _counts(problem: TrainingProblem) -> list[int]:
    """Return the cluster's number of devices and its halves, quarters and so on that can be
    filled.
    """
    most = problem.cluster.num_gpus
    return [
        count
        for count in device_counts(problem)
        if most % count == 0 and (most // count).bit_count() == 1
    ]


def _point(problem: TrainingProblem, predictor: CalibratedPredictor | None) -> ScalingPoint | None:
    bounds.check()
    best = best_of(problem, keep=1, rank_by="mean", predictor=predictor)
    if not len(best.layout):
        return None
    row = recommendations_of(best.take(np.arange(1)))[0]
    estimate = row.known
    assert (
        estimate.time is not None and estimate.tokens_per_second_per_gpu is not None
    )  # legal rows
    return ScalingPoint(
        num_gpus=problem.cluster.num_gpus,
        step_s=estimate.time.step_s,
        tokens_per_second_per_gpu=estimate.tokens_per_second_per_gpu,
        gpu_seconds_per_step=estimate.time.step_s * problem.cluster.num_gpus,
        days=estimate.calendar_days,
        cost=estimate.cost,
        parallel=row.parallel,
    )


def _fastest_s(problem: TrainingProblem, predictor: CalibratedPredictor | None) -> float | None:
    bounds.check()
    best = best_of(problem, keep=1, rank_by="mean", predictor=predictor)
    return float(best.value_s[0]) if len(best.layout) else None


def _without(problem: TrainingProblem, name: str) -> TrainingProblem:
    plain: dict[str, int | str] = {name: PLAIN[name]}
    return replace(problem, parallel=replace(problem.parallel, **plain))  # type: ignore[arg-type]


def _better(cluster: ClusterSpec) -> list[tuple[str, ClusterSpec]]:
    """Return the cluster with each of its limits raised."""
    gpu = cluster.gpu
    memory = replace(cluster, gpu=replace(gpu, memory_bytes=int(LARGER * gpu.memory_bytes)))
    clusters = [(f"{LARGER:g} x memory", memory)]
    if cluster.num_gpus > cluster.gpus_per_node:
        network = FASTER * cluster.inter_node_bandwidth_bytes_per_second
        clusters.append(
            (
                f"{FASTER:g} x network",
                replace(cluster, inter_node_bandwidth_bytes_per_second=network),
            )
        )
    if gpu.nvlink_bandwidth_bytes_per_second:
        links = replace(
            gpu, nvlink_bandwidth_bytes_per_second=FASTER * gpu.nvlink_bandwidth_bytes_per_second
        )
        clusters.append((f"{FASTER:g} x NVLink", replace(cluster, gpu=links)))
    return clusters


def _influence(change: str, step_s: float | None, before_s: float | None) -> Influence:
    fraction = None if step_s is None or before_s is None else step_s / before_s - 1.0
    return Influence(change=change, step_s=step_s, change_fraction=fraction)
