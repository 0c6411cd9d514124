"""The training cost model: memory and step time of many candidates at once.

Sources: arXiv 2205.05198 (activations, sequence parallelism, selective recomputation), 2104.04473
(pipeline schedules), 1910.02054 (ZeRO); the constants are in the efficiency profile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np

from hp_tool.cost.arrays import BoolArray, FloatArray, Floats
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.case import TrainingCase
from hp_tool.cost.encoder_decoder import counted_candidates, decoder_case
from hp_tool.cost.memory import Memory, memory, retry_chance, retry_slowdown
from hp_tool.cost.model_layers import ModelLayers, model_layers
from hp_tool.cost.model_states import layer_on_rank, state_costs
from hp_tool.cost.pipeline_stages import LayerSizes, Pipeline, complete_pipeline
from hp_tool.cost.step_time import micro_batches, time_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCosts:
    """Predictions for n candidates, in bytes and seconds.

    Fields are arrays of shape (n,), plain numbers for a single candidate, or arrays that broadcast
    to a grid.
    """

    memory_parts: dict[str, FloatArray]
    """Bytes on the worst stage, by MEMORY_KEYS."""
    layer_activations_bytes: FloatArray
    worst_stage: FloatArray
    memory_total_bytes: FloatArray
    first_stage_bytes: FloatArray
    """Allocated bytes on the first stage, for comparison with runs that report only their first
    rank.
    """
    capacity_bytes: FloatArray | float
    """Usable bytes of the device. With two kinds of GPU, of the kind to which memory_parts
    refers.
    """
    device_bytes: FloatArray | float
    """Bytes of the complete device, including the headroom."""
    parts: dict[str, FloatArray]
    """Exposed seconds, by STEP_KEYS."""
    step_s: FloatArray
    host_bytes: FloatArray | float = 0.0
    """Bytes in host memory of the rank that uses most."""
    host_capacity_bytes: float = math.inf
    """A rank's share of the host's memory in bytes; infinite if unknown or unused."""
    layers_by_kind: tuple[FloatArray, ...] = ()
    """Layers per stage on each of the two kinds of GPU; empty with one kind."""
    retry_slowdown: FloatArray | float = 1.0
    """Ratio of the step time with allocator retries to the step time without."""
    retry_chance: FloatArray | float = 0.0
    graphs_s: tuple[Floats, Floats] | tuple[()] = ()
    """(step time with launched kernels, step time with CUDA graphs), if both were computed. This
    requires identical stages and a query that does not set cuda_graphs.
    """

    @property
    def parts_without_retries(self) -> dict[str, FloatArray]:
        """Return the parts of a step without allocator retries."""
        return self.parts | {
            "overhead": self.parts["overhead"]
            - self.step_s * (1.0 - self.retry_slowdown**-self.retry_chance)
        }

    @property
    def feasible(self) -> BoolArray:
        """Return whether the candidate fits in memory; legality is checked separately."""
        fits: BoolArray = self.memory_total_bytes <= self.capacity_bytes
        return (
            fits & (self.host_bytes <= self.host_capacity_bytes)
            if math.isfinite(self.host_capacity_bytes)
            else fits
        )

    def rows(self, shape: tuple[int, ...]) -> TrainingCosts:
        """Return the costs of a grid of this shape as one row per candidate."""

        def row_each(column: Any) -> Any:
            if not isinstance(column, np.ndarray) or column.shape == (math.prod(shape),):
                return column
            return np.broadcast_to(column, shape).ravel()

        return self.each(row_each)

    def row(self, index: int) -> TrainingCosts:
        """Return the costs of one row as plain numbers."""
        return self.each(
            lambda column: column[index].item() if isinstance(column, np.ndarray) else column
        )

    def each(self, change: Callable[[Any], Any]) -> TrainingCosts:
        """Apply a function to every column."""

        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: change(column) for name, column in value.items()}
            return (
                tuple(change(column) for column in value)
                if isinstance(value, tuple)
                else change(value)
            )

        return TrainingCosts(**{f.name: changed(getattr(self, f.name)) for f in fields(self)})


def training_costs(
    *,
    case: TrainingCase,
    candidates: Candidates,
    pipeline: Pipeline | None = None,
    memory_headroom_fraction: float = 0.05,
    compares_graphs: bool = False,
) -> TrainingCosts:
    """Return the memory and step-time parts of every candidate. The same formulas apply to one
    candidate and to millions.

    In a grid, a result that does not depend on an axis has length 1 there. `pipeline` replaces the
    stages of `complete_pipeline`. If the query does not set cuda_graphs, step times with and
    without CUDA graphs are compared for a single candidate and, with `compares_graphs`, for several
    candidates of a dense model.
    """
    model, cluster = case.model, case.cluster
    compares_graphs = candidates.is_alone or (compares_graphs and not model.num_experts)
    compares_graphs = compares_graphs and pipeline is None and case.recorded is not None
    m = micro_batches(candidates, workload=case.workload)
    pipeline, layers = stages_and_layers(
        case=case, candidates=candidates, pipeline=pipeline, micro_batches=m
    )
    if model.architecture == "encoder_decoder":
        # Only the decoder's output layer and loss follow.
        candidates, case = counted_candidates(model, candidates), decoder_case(case)
    states = state_costs(case=case, candidates=candidates, pipeline=pipeline, micro_batches=m)
    capacity_bytes = cluster.gpu.memory_bytes * (1.0 - memory_headroom_fraction)
    fullest = memory(
        case=case,
        candidates=candidates,
        pipeline=pipeline,
        layers=layers.of_stages(pipeline),
        states=states,
        micro_batches=m,
        capacity_bytes=capacity_bytes,
    )
    timed = functools.partial(
        time_parts,
        candidates=candidates,
        pipeline=pipeline,
        head=layers.head,
        states=states.times,
        micro_batches=m,
        offloaded=fullest.offloaded,
    )
    launched = timed(case=case, layers=layers.times)
    slowdown, chance = _retry_seconds(
        case, candidates, fullest=fullest, step_s=sum(launched.values()), micro_batches=m
    )
    # The slowdown of nearly full devices is random. Its mean is taken over ln(step time), because
    # intervals are centred on the median.
    retries = slowdown**chance - 1.0
    parts = _with_retries(launched, retries)
    step_s = sum(parts.values())
    graphs_s: tuple[Floats, Floats] | tuple[()] = ()
    if compares_graphs:
        recorded_s, framework = step_s, case.profile.framework
        overhead_s = framework.step_overhead_s * case.profile.release_factor
        if model.num_experts or np.any(launched["overhead"] > overhead_s):
            as_recorded = timed(case=case.with_graphs, layers=layers.recorded_times)
            recorded_s = sum(_with_retries(as_recorded, retries).values())
        graphs_s = (step_s, recorded_s)
    return TrainingCosts(
        memory_parts=cast(dict[str, FloatArray], fullest.parts),
        layer_activations_bytes=cast(FloatArray, fullest.layer_activations),
        worst_stage=cast(FloatArray, fullest.worst_stage),
        memory_total_bytes=cast(FloatArray, fullest.total),
        first_stage_bytes=cast(FloatArray, fullest.first_stage),
        capacity_bytes=capacity_bytes,
        device_bytes=cluster.gpu.memory_bytes,
        host_bytes=cast(FloatArray, fullest.host_bytes),
        host_capacity_bytes=cluster.gpu.host_memory_bytes or math.inf
        if case.workload.offload
        else math.inf,
        parts=cast(dict[str, FloatArray], parts),
        step_s=cast(FloatArray, step_s),
        retry_slowdown=cast(FloatArray, slowdown),
        retry_chance=cast(FloatArray, chance),
        graphs_s=graphs_s,
    )


def stages_and_layers(
    *,
    case: TrainingCase,
    candidates: Candidates,
    micro_batches: Floats,
    pipeline: Pipeline | None = None,
) -> tuple[Pipeline, ModelLayers]:
    """Return (pipeline stages, layers with embedding and output layer) of legal candidates. If
    `pipeline` is None, the stages are those of `complete_pipeline`.
    """
    layers = model_layers(case=case, candidates=candidates, micro_batches=micro_batches)
    if pipeline is None:
        sizes = None
        if len(case.model.kinds) > 1:
            sizes = LayerSizes(
                [layer.saved for layer in layers.saved],
                [layer_on_rank(kind, candidates) for _, kind in case.model.kinds],
            )
        pipeline = complete_pipeline(case, candidates, sizes=sizes)
    return pipeline, layers


def _retry_seconds(
    case: TrainingCase,
    candidates: Candidates,
    *,
    fullest: Memory,
    step_s: Floats,
    micro_batches: Floats,
) -> tuple[Floats, Floats]:
    """Return (slowdown of a step with allocator retries, their probability)."""
    if case.profile.framework.retry_bytes_per_second is None:
        return 1.0, 0.0
    slowdown = retry_slowdown(
        saved_bytes=fullest.saved_bytes, step_s=step_s, micro_batches=micro_batches, case=case
    )
    return slowdown, retry_chance(total_bytes=fullest.total, case=case, candidates=candidates)


def _with_retries(parts: dict[str, Floats], retries: Floats) -> dict[str, Floats]:
    if isinstance(retries, float) and not retries:
        return parts
    return parts | {"overhead": parts["overhead"] + retries * sum(parts.values())}
