"""Two kinds of GPU in one cluster: the first kind holds the first pipeline stages, the second the rest.

Replicas and tensor-parallel groups lie inside a stage, so inside a kind; what the kinds share is the pipeline. Each kind gets
as many layers a stage as lets both take equally long (Megatron Core's pipeline_model_parallel_layout), in whole layers;
stages of a kind hold equally many, rounded up. Sections are costed like any pipeline, on their own kind's figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hp_tool.cost.arrays import Column, FloatArray, ceil, floor, maximum, minimum, where
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.pipeline_stages import Section, section
from hp_tool.cost.step_time import TIME_PARTS, micro_batches, step_seconds, transfer_seconds
from hp_tool.cost.training import TrainingCosts, training_costs
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import Strategy
from hp_tool.domain.workload import TrainingWorkload

STAGE_PARTS = ("compute", "recompute", "tensor_parallel", "context_parallel", "expert_parallel")
"""Parts that a stage repeats for each micro-batch; the slower kind sets their pace."""
PACED_PARTS = (*STAGE_PARTS, "overhead")
"""Also waits for the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedPipeline:
    """What does not change from candidate to candidate; kinds in the order of their stages."""

    model: ModelSpec
    workload: TrainingWorkload
    strategy: Strategy
    kinds: tuple[tuple[ClusterSpec, EfficiencyProfile], tuple[ClusterSpec, EfficiencyProfile]]
    """num_gpus of each is its own."""
    memory_headroom_fraction: float

    @property
    def num_gpus(self) -> int:
        return sum(cluster.num_gpus for cluster, _ in self.kinds)

    def costs(self, candidates: Candidates) -> TrainingCosts:
        """Memory of the kind that is closest to its capacity, or furthest above it; step time of the pipeline."""
        rows = candidates.take(slice(None)) if len(candidates.shape) > 1 else candidates
        layers, p = self.model.num_hidden_layers, rows.pipeline_parallel_size
        first, second = self.stages(rows)
        # An equal split tells how long a layer takes on each kind, ends included.
        each = [self._section_costs(rows, kind, layers=layers / p, before=kind * first * layers / p) for kind in (0, 1)]
        pace = self._stage_seconds(rows, each)
        balanced = layers * pace[1] / (first * pace[1] + second * pace[0])
        fewest = rows.virtual_pipeline_parallel_size
        most = maximum((layers - second * fewest) // first, fewest)
        down, up = (self._split(rows, minimum(maximum(n, fewest), most)) for n in (floor(balanced), ceil(balanced)))
        better = (up.feasible > down.feasible) | ((up.feasible == down.feasible) & (up.step_s < down.step_s))
        return chosen(better, up, down)

    def stages(self, candidates: Candidates) -> tuple[Column, Column]:
        """Stages of each kind: its share of the devices."""
        p = candidates.pipeline_parallel_size
        first = p * self.kinds[0][0].num_gpus // self.num_gpus
        return first, p - first

    def _stage_seconds(self, candidates: Candidates, both: Sequence[TrainingCosts]) -> list[Column]:
        m = micro_batches(candidates, workload=self.workload)
        return [stage_seconds(one, profile=kind[1], micro_batches=m) for one, kind in zip(both, self.kinds, strict=True)]

    def _section_costs(self, candidates: Candidates, kind: int, *, layers: Column, before: Column) -> TrainingCosts:
        first, second = self.stages(candidates)
        cluster, profile = self.kinds[kind]
        here: Section = section(
            candidates,
            stages_before=first if kind else 0,
            layers_before=before,
            stages=second if kind else first,
            layers=layers,
            holds_embedding=kind == 0,
            holds_output=kind == 1,
        )
        return training_costs(
            **self._machine(cluster, profile),
            candidates=here,
            strategy=self.strategy,
            memory_headroom_fraction=self.memory_headroom_fraction,
        )

    def _machine(self, cluster: ClusterSpec, profile: EfficiencyProfile) -> dict[str, Any]:
        return {"model": self.model, "cluster": cluster, "workload": self.workload, "profile": profile}

    def _split(self, candidates: Candidates, on_first: Column) -> TrainingCosts:
        """The pipeline with `on_first` layers on each stage of the first kind."""
        first, second = self.stages(candidates)
        on_second = ceil((self.model.num_hidden_layers - first * on_first) / second)
        both = [
            self._section_costs(candidates, 0, layers=on_first, before=0),
            self._section_costs(candidates, 1, layers=on_second, before=first * on_first),
        ]
        seconds = self._stage_seconds(candidates, both)
        second_paces = seconds[1] > seconds[0]
        parts = {name: where(second_paces, both[1].parts[name], both[0].parts[name]) for name in PACED_PARTS}
        once = (name for name in TIME_PARTS if name not in PACED_PARTS)
        parts |= {name: maximum(both[0].parts[name], both[1].parts[name]) for name in once}
        parts["pipeline_bubble"] = self._bubble(candidates, both, slowest=maximum(*seconds))
        full = both[1].memory_total_bytes / both[1].capacity_bytes > both[0].memory_total_bytes / both[0].capacity_bytes
        worse = chosen(full, both[1], both[0])
        return replace(
            worse,
            parts={name: parts[name] for name in TIME_PARTS},
            step_s=step_seconds(parts),
            layers_by_kind=(on_first, on_second),
            first_stage_bytes=both[0].first_stage_bytes,
        )

    def _bubble(self, candidates: Candidates, both: Sequence[TrainingCosts], *, slowest: Column) -> Column:
        """All stages' seconds for one micro-batch but the slowest's, over v, and the transfers on the way there and back: a
        section's own bubble holds what all of its stages take, and the transfers.
        """
        c = candidates
        transfers = [
            2.0 * (c.pipeline_parallel_size - 1.0)
            * transfer_seconds(**self._machine(cluster, profile), candidates=c)
            for cluster, profile in self.kinds
        ]  # fmt: skip
        stages = sum(one.parts["pipeline_bubble"] - own for one, own in zip(both, transfers, strict=True))
        return stages - slowest / c.virtual_pipeline_parallel_size + maximum(*transfers)


def stage_seconds(costs: TrainingCosts, *, profile: EfficiencyProfile, micro_batches: FloatArray) -> Column:
    """What the slowest stage of a section takes for one micro-batch, waits for its host included."""
    waits = costs.parts["overhead"] - profile.framework.step_overhead_s
    return (sum(costs.parts[name] for name in STAGE_PARTS) + waits) / micro_batches


def chosen(condition: Any, yes: TrainingCosts, no: TrainingCosts) -> TrainingCosts:
    """Row by row one or the other."""
    names = ("layer_activations_bytes", "worst_stage", "memory_total_bytes", "first_stage_bytes", "capacity_bytes", "step_s")
    columns: dict[str, Any] = {name: where(condition, getattr(yes, name), getattr(no, name)) for name in names}
    return TrainingCosts(
        memory_parts={name: where(condition, size, no.memory_parts[name]) for name, size in yes.memory_parts.items()},
        parts={name: where(condition, seconds, no.parts[name]) for name, seconds in yes.parts.items()},
        layers_by_kind=tuple(
            np.asarray(where(condition, a, b)) if isinstance(condition, np.ndarray) else where(condition, a, b)
            for a, b in zip(yes.layers_by_kind, no.layers_by_kind, strict=True)
        ),
        **columns,
    )
