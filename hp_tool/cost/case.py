"""Inputs of a prediction other than the candidates: model, machine and training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import DEFAULT_STRATEGY, Strategy
from hp_tool.domain.workload import TrainingWorkload


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Devices and links, and the achievable fractions of their datasheet rates."""

    cluster: ClusterSpec
    profile: EfficiencyProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCase(Machine):
    """Model, machine and training settings: all inputs that the candidates share."""

    model: ModelSpec
    workload: TrainingWorkload
    strategy: Strategy = DEFAULT_STRATEGY
    assumed: Mapping[str, object] = field(default_factory=dict)
    """Values assumed for settings that the query omits, by key; listed in the estimate's
    provenance.
    """
    recorded: EfficiencyProfile | None = None
    """The efficiency profile with CUDA graphs, if the query does not set cuda_graphs; else None."""

    def of(self, model: ModelSpec) -> TrainingCase:
        """Return the case with a model that has only layers of one kind (`ModelSpec.kinds`)."""
        return TrainingCase(
            model=model,
            cluster=self.cluster,
            workload=self.workload,
            profile=self.profile,
            strategy=self.strategy,
            recorded=self.recorded,
        )

    @property
    def with_graphs(self) -> TrainingCase:
        """Return the case with CUDA graphs if the query does not set cuda_graphs, else None."""
        return TrainingCase(
            model=self.model,
            cluster=self.cluster,
            workload=self.workload,
            profile=self.recorded or self.profile,
            strategy=self.strategy,
        )
