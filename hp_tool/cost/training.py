"""The training cost model: memory and step time of many candidates at once.

Sources: arXiv 2205.05198 (activations, sequence parallelism, selective recomputation), 2104.04473 (pipeline schedules),
1910.02054 (ZeRO); the constants come in with the efficiency profile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hp_tool.cost.arrays import BoolArray, FloatArray, Floats
from hp_tool.cost.attention import attention_bytes, attention_time
from hp_tool.cost.block import LayerBytes, LayerTime, shapes, spreading_axes
from hp_tool.cost.candidates import Candidates, unique_rows
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.embedding_and_head import HeadTime, head_time
from hp_tool.cost.encoder_decoder import both_heads, counted_candidates, decoder_case, mean_layer_bytes, mean_layer_time
from hp_tool.cost.layer import layer_bytes, layer_time
from hp_tool.cost.memory import Memory, memory, retry_chance, retry_slowdown
from hp_tool.cost.model_states import state_costs
from hp_tool.cost.moe import expert_kernels, merged_share, with_launches
from hp_tool.cost.pipeline_stages import Pipeline, whole_pipeline
from hp_tool.cost.recomputation import layer_axes
from hp_tool.cost.shared import Shared
from hp_tool.cost.step_time import micro_batches, time_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCosts:
    """Predictions for n candidates in bytes and seconds: arrays of shape (n,), plain numbers of one, or arrays that broadcast
    to a grid.
    """

    memory_parts: dict[str, FloatArray]
    """By MEMORY_PARTS, on the worst stage."""
    layer_activations_bytes: FloatArray
    worst_stage: FloatArray
    memory_total_bytes: FloatArray
    first_stage_bytes: FloatArray
    """Allocated on the first stage: the figure that runs report if only their first rank does."""
    capacity_bytes: FloatArray | float
    """Usable bytes of the device; with two kinds of GPU, of the kind that memory_parts are for."""
    device_bytes: FloatArray | float
    """The whole device's, headroom included."""
    parts: dict[str, FloatArray]
    """By TIME_PARTS; exposed seconds."""
    step_s: FloatArray
    host_bytes: FloatArray | float = 0.0
    """Maximum over the ranks of bytes in host memory."""
    host_capacity_bytes: float = math.inf
    """A rank's share of the host's memory; infinite if unknown or unused."""
    layers_by_kind: tuple[FloatArray, ...] = ()
    """Layers on each stage of the two kinds of GPU; empty with one kind."""
    retry_slowdown: FloatArray | float = 1.0
    """Step with the allocator's retries over one without, if it retries."""
    retry_chance: FloatArray | float = 0.0
    graphs_s: tuple[float, float] | tuple[()] = ()
    """Of one candidate with equal stages, where the query leaves graphs open: the step as its host launches kernels, and with
    recorded CUDA graphs."""

    @property
    def parts_without_retries(self) -> dict[str, FloatArray]:
        """The parts of a step whose allocator does not retry."""
        return self.parts | {"overhead": self.parts["overhead"] - self.step_s * (1.0 - self.retry_slowdown**-self.retry_chance)}

    @property
    def feasible(self) -> BoolArray:
        """Whether memory suffices; legality is decided earlier."""
        fits: BoolArray = self.memory_total_bytes <= self.capacity_bytes
        return fits & (self.host_bytes <= self.host_capacity_bytes) if math.isfinite(self.host_capacity_bytes) else fits

    def rows(self, shape: tuple[int, ...]) -> TrainingCosts:
        """The costs of a grid of this shape as rows, one for each of its candidates."""

        def row_each(column: Any) -> Any:
            if not isinstance(column, np.ndarray) or column.shape == (math.prod(shape),):
                return column
            return np.broadcast_to(column, shape).ravel()

        return self.each(row_each)

    def row(self, index: int) -> TrainingCosts:
        """The costs of one row as plain numbers."""
        return self.each(lambda column: column[index].item() if isinstance(column, np.ndarray) else column)

    def each(self, change: Callable[[Any], Any]) -> TrainingCosts:
        """The costs with every column changed."""

        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: change(column) for name, column in value.items()}
            return tuple(change(column) for column in value) if isinstance(value, tuple) else change(value)

        return TrainingCosts(**{f.name: changed(getattr(self, f.name)) for f in fields(self)})


def training_costs(
    *, case: TrainingCase, candidates: Candidates, pipeline: Pipeline | None = None, memory_headroom_fraction: float = 0.05
) -> TrainingCosts:
    """Memory and step-time parts of every candidate. One row runs the same formulas as ten million.

    In a grid, a result that does not depend on an axis has length 1 there. `pipeline` replaces the equal stages of
    `whole_pipeline`.
    """
    model, cluster = case.model, case.cluster
    compares_graphs = candidates.is_alone and pipeline is None and case.recorded is not None
    pipeline = pipeline or whole_pipeline(case, candidates)
    m = micro_batches(candidates, workload=case.workload)
    layers = model_layers(case=case, candidates=candidates, pipeline=pipeline, micro_batches=m)
    if model.architecture == "encoder_decoder":
        # From here on only the decoder's head and loss follow.
        candidates, case = counted_candidates(model, candidates), decoder_case(case)
    states = state_costs(case=case, candidates=candidates, pipeline=pipeline, micro_batches=m)
    capacity_bytes = cluster.gpu.memory_bytes * (1.0 - memory_headroom_fraction)
    fullest = memory(
        case=case, candidates=candidates, pipeline=pipeline, layers=layers.of_stages(pipeline), states=states, micro_batches=m,
        capacity_bytes=capacity_bytes,
    )  # fmt: skip
    timed = functools.partial(
        time_parts, candidates=candidates, pipeline=pipeline, head=layers.head, states=states.times, micro_batches=m,
        offloaded=fullest.offloaded,
    )  # fmt: skip
    launched = timed(case=case, layers=layers.times)
    slowdown, chance = _retries(case, candidates, fullest=fullest, step_s=sum(launched.values()), micro_batches=m)
    # The mean of ln(step time), as intervals are around a median, of nearly full devices, which are slow by chance.
    retries = slowdown**chance - 1.0
    parts = _with_retries(launched, retries)
    step_s = sum(parts.values())
    graphs_s: tuple[float, float] | tuple[()] = ()
    if compares_graphs:
        recorded_s, framework = step_s, case.profile.framework
        if model.num_experts or launched["overhead"] > framework.step_overhead_s * case.profile.release_factor:
            as_recorded = timed(case=case.with_graphs, layers=layers.recorded_times)
            recorded_s = sum(_with_retries(as_recorded, retries).values())
        graphs_s = (float(step_s), float(recorded_s))
    return TrainingCosts(
        memory_parts=cast(dict[str, FloatArray], fullest.parts),
        layer_activations_bytes=cast(FloatArray, fullest.layer_activations),
        worst_stage=cast(FloatArray, fullest.worst_stage),
        memory_total_bytes=cast(FloatArray, fullest.total),
        first_stage_bytes=cast(FloatArray, fullest.first_stage),
        capacity_bytes=capacity_bytes,
        device_bytes=cluster.gpu.memory_bytes,
        host_bytes=cast(FloatArray, fullest.host_bytes),
        host_capacity_bytes=cluster.gpu.host_memory_bytes or math.inf if case.workload.offload else math.inf,
        parts=cast(dict[str, FloatArray], parts),
        step_s=cast(FloatArray, step_s),
        retry_slowdown=cast(FloatArray, slowdown),
        retry_chance=cast(FloatArray, chance),
        graphs_s=graphs_s,
    )


def _retries(
    case: TrainingCase, candidates: Candidates, *, fullest: Memory, step_s: Floats, micro_batches: Floats
) -> tuple[Floats, Floats]:
    """(slowdown of a step whose allocator retries, the chance that it does)."""
    if case.profile.framework.retry_bytes_per_second is None:
        return 1.0, 0.0
    slowdown = retry_slowdown(kept=fullest.kept, step_s=step_s, micro_batches=micro_batches, case=case)
    return slowdown, retry_chance(total_bytes=fullest.total, case=case, candidates=candidates)


def _with_retries(parts: dict[str, Floats], retries: Floats) -> dict[str, Floats]:
    """The exposed seconds of a step, with retries in its overhead."""
    if isinstance(retries, float) and not retries:
        return parts
    return parts | {"overhead": parts["overhead"] + retries * sum(parts.values())}


# Layers and ends depend on few axes of the candidates: each combination is costed once.


Columns = TypeVar("Columns", HeadTime, LayerBytes, LayerTime)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """Layers and ends for one micro-batch on one rank of each candidate."""

    dense: LayerBytes
    """A layer without experts; in an encoder-decoder model the mean layer."""
    sparse: LayerBytes | None
    """A layer with experts; None for models without."""
    times: tuple[LayerTime, ...]
    """The mean layer of a stage; of a model with layers of two kinds a dense one and one with experts."""
    recorded_times: tuple[LayerTime, ...]
    """The same with CUDA graphs recorded, where a lone candidate's query leaves these open."""
    head: HeadTime

    def mean_time(self, pipeline: Pipeline) -> LayerTime:
        """The mean layer of the critical stage."""
        dense, *sparse = self.times
        return _mix(dense, sparse[0], pipeline.critical.expert_share) if sparse else dense

    def of_stages(self, pipeline: Pipeline) -> list[LayerBytes]:
        """The mean layer of each representative stage."""
        if self.sparse is None:
            return [self.dense] * len(pipeline.stages)
        return [_mix(self.dense, self.sparse, stage.layers.expert_share) for stage in pipeline.stages]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKinds:
    """A layer of each kind that a model has, and its ends; shape (k,) for k combinations of the axes they depend on."""

    dense: LayerBytes
    time: LayerTime
    sparse: LayerBytes | None
    """This and what follows: with experts."""
    sparse_time: LayerTime | None
    merged_time: LayerTime | None
    """Where forward and backward passes run together; None where they never do."""
    head: HeadTime
    recorded: LayerKinds | None = None
    """With CUDA graphs recorded, if that changes a kind and a lone candidate's query leaves them open."""


_kinds: Shared[LayerKinds] = Shared()


def model_layers(*, case: TrainingCase, candidates: Candidates, pipeline: Pipeline, micro_batches: Floats) -> ModelLayers:
    """The layers and ends of legal candidates."""
    kinds, inverse = layer_kinds(case=case, candidates=candidates)

    def times(kinds: LayerKinds) -> tuple[LayerTime, ...]:
        dense = _spread(kinds.time, inverse)
        if kinds.sparse_time is None:
            return (dense,)
        sparse = _spread(kinds.sparse_time, inverse)
        if kinds.merged_time is not None:
            share = merged_share(candidates, micro_batches=micro_batches, merges=case.workload.merges_passes)
            sparse = _mix(sparse, _spread(kinds.merged_time, inverse), share)
        both = pipeline.dense is not None
        return (dense, sparse) if both else (_mix(dense, sparse, pipeline.critical.expert_share),)

    own = times(kinds)
    return ModelLayers(
        dense=_spread(kinds.dense, inverse),
        sparse=None if kinds.sparse is None else _spread(kinds.sparse, inverse),
        times=own,
        recorded_times=own if kinds.recorded is None else times(kinds.recorded),
        head=_spread(kinds.head, inverse),
    )


def layer_kinds(*, case: TrainingCase, candidates: Candidates) -> tuple[LayerKinds, NDArray[np.intp] | None]:
    """Return the layers and ends of each combination of the axes they depend on, and the combination of each candidate, as
    `unique_rows` numbers them.
    """
    axes = (*layer_axes(candidates), *spreading_axes(case.cluster))
    splits, merges = candidates.names_schedules, case.workload.merges_passes or candidates.merges_passes
    if not candidates.is_alone:
        unique, inverse = unique_rows(candidates, axes)
        return _layer_kinds(case=case, candidates=unique, splits=splits, merges=merges), inverse
    parts = (case.model, case.cluster, case.workload, case.profile, case.strategy, case.recorded)
    numbers = (splits, merges, *axes, *(getattr(candidates, name) for name in axes))
    kinds = _kinds.get(parts, numbers, lambda: _layer_kinds(case=case, candidates=candidates, splits=splits, merges=merges))
    return kinds, None


def _layer_kinds(*, case: TrainingCase, candidates: Candidates, splits: bool, merges: bool) -> LayerKinds:
    """The kinds of layers of unique candidates; `splits`: their weight gradients are told apart."""
    if case.model.architecture == "encoder_decoder":
        return LayerKinds(
            dense=mean_layer_bytes(case=case, candidates=candidates),
            time=mean_layer_time(case=case, candidates=candidates),
            sparse=None,
            sparse_time=None,
            merged_time=None,
            head=both_heads(case=case, candidates=candidates),
        )
    experts, s = bool(case.model.num_experts), shapes(case=case, candidates=candidates)
    attention = attention_time(case=case, candidates=candidates, s=s)
    kept = attention_bytes(case=case, candidates=candidates, s=s)

    timed = functools.partial(layer_time, candidates=candidates, split_backward=splits, s=s, attention=attention)
    head = head_time(case=case, candidates=candidates, s=s)
    dense, dense_time = layer_bytes(case=case, candidates=candidates, s=s, attention=kept), timed(case=case)
    if not experts:
        return LayerKinds(dense=dense, time=dense_time, sparse=None, sparse_time=None, merged_time=None, head=head)
    kernels = expert_kernels(case=case, candidates=candidates, s=s)

    def with_experts(case: TrainingCase, *, recorded: LayerKinds | None = None) -> LayerKinds:
        second = with_launches(kernels, case=case, candidates=candidates)
        return LayerKinds(
            dense=dense,
            time=dense_time,
            sparse=sparse,
            sparse_time=timed(case=case, moe=True, second=second),
            merged_time=timed(case=case, moe=True, second=second, merged=True) if merges else None,
            head=head,
            recorded=recorded,
        )

    sparse = layer_bytes(case=case, candidates=candidates, moe=True, s=s, attention=kept)
    opens_graphs = candidates.is_alone and case.recorded is not None
    return with_experts(case, recorded=with_experts(case.with_graphs) if opens_graphs else None)


def _spread(columns: Columns, inverse: NDArray[np.intp] | None) -> Columns:
    """The columns with each row's own entry; None: every row is unique. Scalars stay scalars."""
    if inverse is None:
        return columns
    values = {name: getattr(columns, name) for name in columns.__slots__}
    return type(columns)(**{name: value[inverse] if isinstance(value, np.ndarray) else value for name, value in values.items()})


def _mix(dense: Columns, sparse: Columns, moe_fraction: Floats) -> Columns:
    """The mean layer of a stage in which the share `moe_fraction` of layers costs `sparse`."""
    values = {}
    for name in dense.__slots__:
        one = getattr(dense, name)
        values[name] = one + moe_fraction * (getattr(sparse, name) - one)
    return type(dense)(**values)
