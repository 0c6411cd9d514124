"""Evidence for a calibration: n predictions and measurements with their features, as arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.candidates import FLEX, Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.training import TrainingCosts
from hp_tool.cost.uncertainty import ratio_log_sd, step_log_sd
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.loop.assumptions import assumed

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.intp]
_COLUMNS = (
    "layer_passes",
    "memory_bytes",
    "capacity_bytes",
    "measured_step_s",
    "measured_memory_bytes",
    "out_of_memory",
)
"""Array fields of Evidence that have one value per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """n profile runs with predictions and measurements.

    NaN means not measured. Runs without a step time, which ran out of memory, still contribute to
    the memory fit.
    """

    measurement_ids: tuple[str, ...]
    """Ids of the measurements, stored with the calibration."""
    parts_s: Mapping[str, FloatArray]
    """Uncalibrated exposed seconds by part, each of shape (n,)."""
    layer_passes: FloatArray
    """(n,) number of times a micro-batch passes through a layer (forward and backward) per step and
    rank, including the bubble.
    """
    memory_bytes: FloatArray
    """(n,) uncalibrated allocated bytes on the rank that needs most."""
    capacity_bytes: FloatArray
    """(n,) bytes that the run's device can allocate."""
    measured_step_s: FloatArray
    """(n,) measured step time in seconds; NaN unless the run succeeded."""
    measured_memory_bytes: FloatArray
    """(n,) measured peak of allocated bytes; NaN if not measured."""
    out_of_memory: BoolArray
    """(n,) True if the run ran out of memory, so it needs more than `capacity_bytes`."""
    features: Mapping[str, FloatArray] = field(default_factory=dict)
    """Features from `residual_features`, each of shape (n,). Without features, only factors are
    fitted.
    """
    measured_parts_s: Mapping[str, FloatArray] = field(default_factory=dict)
    """Seconds of parts in `parts_s` that traces measured, each of shape (n,); NaN without a trace.
    """

    def __post_init__(self) -> None:
        tables = (self.parts_s, self.features, self.measured_parts_s)
        arrays = (
            *(array for each in tables for array in each.values()),
            *(getattr(self, name) for name in _COLUMNS),
        )
        if any(array.shape != (len(self),) for array in arrays):
            raise ValueError("every column of Evidence must have one value per measurement id")

    def __len__(self) -> int:
        return len(self.measurement_ids)

    def take(self, rows: NDArray[np.intp]) -> Evidence:
        return Evidence(
            measurement_ids=tuple(self.measurement_ids[row] for row in rows),
            parts_s={name: seconds[rows] for name, seconds in self.parts_s.items()},
            features={name: values[rows] for name, values in self.features.items()},
            measured_parts_s={
                name: seconds[rows] for name, seconds in self.measured_parts_s.items()
            },
            **{name: getattr(self, name)[rows] for name in _COLUMNS},
        )

    @staticmethod
    def empty() -> Evidence:
        """Return evidence without runs."""
        nothing: dict[str, Any] = {
            name: np.empty(0, dtype=bool if name == "out_of_memory" else float) for name in _COLUMNS
        }
        return Evidence(measurement_ids=(), parts_s={}, features={}, **nothing)

    @staticmethod
    def concatenate(pieces: Sequence[Evidence]) -> Evidence:
        """Concatenate the rows of all pieces in order. Missing parts and features are zero."""

        def table(attribute: str, missing: float = 0.0) -> dict[str, FloatArray]:
            names = sorted({name for piece in pieces for name in getattr(piece, attribute)})
            rows = {
                name: [
                    getattr(piece, attribute).get(name, np.full(len(piece), missing))
                    for piece in pieces
                ]
                for name in names
            }
            return {name: np.concatenate(columns) for name, columns in rows.items()}

        return Evidence(
            measurement_ids=tuple(i for piece in pieces for i in piece.measurement_ids),
            parts_s=table("parts_s"),
            features=table("features"),
            measured_parts_s=table("measured_parts_s", missing=np.nan),
            **{
                name: np.concatenate(
                    [getattr(piece, name) for piece in (Evidence.empty(), *pieces)]
                )
                for name in _COLUMNS
            },
        )


MICRO_BATCHES = "micro_batches"
"""Feature whose value is also the number of micro-batches, each of which may stall."""
STEP_LOG_SD, PAIR_LOG_SD, DEVICE_LOG_SD, MEMORY_LOG_SD = (
    "step_log_sd",
    "pair_log_sd",
    "device_log_sd",
    "memory_log_sd",
)
STALL_RISK = "stall_log_risk"
STATED = {STEP_LOG_SD, PAIR_LOG_SD, DEVICE_LOG_SD, MEMORY_LOG_SD, STALL_RISK}
"""Names of deviations that the cost model states. They are not features.

They are the standard deviations of a step time, of the ratio of two step times (0 if not stated),
of the part of a step time that depends only on device and software, and of memory; and the
logarithm of the relative frequency of stalls.
"""


def allocated_bytes(costs: TrainingCosts) -> FloatArray:
    """Return the bytes allocated by the framework, shape (n,).

    They are the total without memory outside the allocator.
    """
    return np.asarray(costs.memory_total_bytes - costs.memory_parts["overhead"])


def layer_passes(*, case: TrainingCase, candidates: Candidates) -> FloatArray:
    """Return (m + (p-1)/v) L/p, the layer passes of micro-batches per rank and step, shape (n,).

    There are m = B / (d b) micro-batches, and the bubble lasts as long as (p-1)/v more. Each passes
    through the L/p layers of a stage.
    """
    micro_batches = case.workload.global_batch_size / (
        candidates.data_parallel_size * candidates.micro_batch_size
    )
    bubble = (candidates.pipeline_parallel_size - 1) / candidates.virtual_pipeline_parallel_size
    return np.asarray(
        (micro_batches + bubble) * case.model.total_layers / candidates.pipeline_parallel_size
    )


def residual_features(*, case: TrainingCase, candidates: Candidates) -> dict[str, FloatArray]:
    """Return the features of configurations, each of shape (n,).

    Every property that affects kernels, networks or schedules is a feature. Sizes are base-2
    logarithms, so halving the number of GPUs is the same distance at 8 as at 512. Whether a group
    spans nodes is a category. Model, workload and cluster are also features. Measurements of other
    models or numbers of nodes are therefore near but not identical.
    """
    c, model, cluster = candidates, case.model, case.cluster
    tensor, pipeline = np.asarray(c.tensor_parallel_size), np.asarray(c.pipeline_parallel_size)
    context, data, micro = (
        np.asarray(x) for x in (c.context_parallel_size, c.data_parallel_size, c.micro_batch_size)
    )
    same = np.ones(len(tensor))
    node = cluster.nvlink_domain_size
    many_nodes = cluster.num_gpus > node
    return {
        "tensor_parallel": np.log2(tensor),
        "pipeline_parallel": np.log2(pipeline),
        "context_parallel": np.log2(context),
        "data_parallel": np.log2(data),
        "expert_parallel": np.log2(c.expert_parallel_size),
        "micro_batch": np.log2(micro),
        "chunks": np.log2(c.virtual_pipeline_parallel_size),
        "replicated_optimizer": same * (c.zero_stage == 0),
        "sharded_weights": same * (c.zero_stage >= 2),
        "recompute": same * (c.recompute_method > 0),
        "tensor_crosses_nodes": same * (tensor * context > node),
        "pipeline_crosses_nodes": same * ((pipeline > 1) & many_nodes),
        "devices": same * np.log2(cluster.num_gpus),
        MICRO_BATCHES: np.log2(case.workload.global_batch_size / (data * micro)),
        **{
            name: same * value
            for name, value in (_model_features(model) | _workload_features(case.workload)).items()
        },
        "flex_dispatcher": same * bool(model.num_experts) * _uses_flex(case, c),
        **{name: same * value for name, value in _stated_deviations(case).items()},
        STALL_RISK: _stall_risk(case, (pipeline > 1) & many_nodes),
    }


def _uses_flex(case: TrainingCase, c: Candidates) -> Any:
    usual = case.strategy.moe_token_dispatcher_type == "flex"  # noqa: S105 (a token is no password here)
    return (c.moe_token_dispatcher_type == FLEX) | ((c.moe_token_dispatcher_type == 0) & usual)


def _stall_risk(case: TrainingCase, pipeline_crosses: BoolArray) -> FloatArray:
    """Return ln of the relative stall risk, by number of nodes and pipeline, shape (n,).

    For pipelines on many nodes, the cost model already includes stalled messages. These pipelines
    therefore do not stall beyond their prediction, and other layouts on these nodes stall more
    often.
    """
    framework, nodes = case.profile.framework, case.cluster.num_nodes
    held_up = framework.message_stall_s > 0.0 and nodes > framework.message_stall_nodes
    risk = assumed().features
    by_nodes = risk.one_node_stall_log_risk + risk.node_doubling_stall_log_risk * np.log2(nodes)
    if held_up:
        others = by_nodes + risk.held_up_stall_log_risk
        included = np.log(assumed().stalls.unseen_share)
        return np.asarray(np.where(pipeline_crosses, included, others))
    return np.asarray(by_nodes + risk.pipeline_stall_log_risk * pipeline_crosses)


def _stated_deviations(case: TrainingCase) -> dict[str, float]:
    """Return the deviations that the cost model states for a case, by the names in STATED."""
    whole, doubts, framework = step_log_sd(case=case), case.profile.doubts, case.profile.framework
    own = (
        framework.time_log_sd**2
        - case.profile.release_log_sd**2
        + (case.workload.lora is not None) * doubts.lora_log_sd**2
    )
    return {
        STEP_LOG_SD: whole,
        PAIR_LOG_SD: float(ratio_log_sd(case.profile)),
        DEVICE_LOG_SD: math.sqrt(max(whole**2 - own, 0.0)),
        MEMORY_LOG_SD: framework.memory_log_sd,
    }


def _model_features(model: ModelSpec) -> dict[str, float]:
    """Return the features of the model's shape. Models with equal features count as the same."""
    experts = bool(model.num_experts)
    return {
        "hidden_size": np.log2(model.hidden_size),
        "layers": np.log2(model.num_hidden_layers),
        "feed_forward_size": np.log2(model.expert_size if experts else model.ffn_size),
        "query_groups": np.log2(model.num_attention_heads / model.kv_heads),
        "latent_attention": float(model.kv_lora_rank is not None),
        "experts": np.log2(model.num_experts or 1) + experts,
        "experts_per_token": np.log2(model.num_experts_per_tok or 1),
    }


def _workload_features(workload: TrainingWorkload) -> dict[str, float]:
    """Return the features of the workload and its software.

    The framework release is a year; 0 if not given.
    """
    numbers = [int(part) for part in re.findall(r"\d+", workload.framework_version or "")]
    return {
        "sequence_length": np.log2(workload.sequence_length),
        "precision": assumed().features.precisions.get(workload.precision, 0.0),
        "adapters": float(workload.lora is not None),
        "unfused_attention": float(workload.attention == "unfused"),
        "cuda_graphs": float(bool(workload.cuda_graphs)),
        "release": numbers[0] + (numbers[1] / 12 if len(numbers) > 1 else 0.0) if numbers else 0.0,
    }


MODEL = (
    "hidden_size",
    "layers",
    "feed_forward_size",
    "query_groups",
    "latent_attention",
    "experts",
    "experts_per_token",
    "sequence_length",
    "precision",
    "adapters",
    "unfused_attention",
    "flex_dispatcher",
    "cuda_graphs",
    "release",
    "devices",
)
"""Features that distinguish models and workloads. All other features distinguish layouts."""
SHAPE = (
    "hidden_size",
    "feed_forward_size",
    "query_groups",
    "latent_attention",
    "experts",
    "experts_per_token",
)
"""Features in which two models must agree to count as the same. The number of layers may differ."""
SAME = 1e-6
"""Distance below which two configurations count as the same."""


def scale_features(features: Mapping[str, FloatArray], names: Sequence[str]) -> FloatArray:
    """Return the features in units of their length scales, shape (n, k).

    Missing features are zero.
    """
    apart = assumed().features
    rows = len(next(iter(features.values()), ()))
    known = [name for name in names if name not in STATED]
    columns = [
        features.get(name, np.zeros(rows)) / apart.distances.get(name, apart.other_distance)
        for name in known
    ]
    return np.stack(columns, axis=1).astype(np.float64) if columns else np.empty((rows, 0))


def select_most_similar(
    *, evidence: Evidence, features: Mapping[str, FloatArray], limit: int
) -> Evidence:
    """Return the `limit` timed measurements that are most similar to some configurations.

    `features` are those of the configurations.

    Runs out of memory are kept only if the same configuration of the same model on the same cluster
    is among them. Otherwise, a factor that explains the worst failure of another model would reject
    configurations that fit here.
    """
    if not evidence.features or not features:
        return evidence
    from scipy.spatial import KDTree

    names = sorted(features)
    distance, _ = KDTree(scale_features(features, names)).query(
        scale_features(evidence.features, names)
    )
    timed = np.flatnonzero(np.isfinite(evidence.measured_step_s))
    nearest = timed[np.argsort(distance[timed], kind="stable")[:limit]]
    same = np.flatnonzero(evidence.out_of_memory & (distance < SAME))
    return evidence.take(np.sort(np.concatenate([nearest, same])))
