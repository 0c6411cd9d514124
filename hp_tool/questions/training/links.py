"""Apply link bandwidths that were fitted to traces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.questions.training.problem import TrainingProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Fitted link bandwidths, relative to those specified for the cluster."""

    network: float = 1.0
    """Factor for links between nodes."""
    nvlink: float = 1.0
    """Factor for links between devices of a node."""

    @staticmethod
    def read(payload: Mapping[str, float] | None) -> Links:
        """Return the stored link factors; 1.0 for links without measurements."""
        return Links(**payload) if payload else Links()

    @property
    def as_stated(self) -> bool:
        """Whether all factors are 1."""
        return self.network == self.nvlink == 1.0


def with_links(problem: TrainingProblem, links: Links) -> TrainingProblem:
    """Return the problem with fitted link bandwidths. With two kinds of GPU, whose links differ, it
    is unchanged.
    """
    if links.as_stated or problem.kinds:
        return problem
    network = links.network * problem.cluster.inter_node_bandwidth_bytes_per_second
    return replace(
        problem,
        cluster=replace(problem.cluster, inter_node_bandwidth_bytes_per_second=network),
        profile=_with_nvlink(problem.profile, links.nvlink),
    )


def _with_nvlink(profile: EfficiencyProfile, factor: float) -> EfficiencyProfile:
    gpu = profile.gpu
    nvlink, exchange = (
        replace(link, bandwidth_fraction=factor * link.bandwidth_fraction)
        for link in (gpu.nvlink, gpu.all_to_all)
    )
    return replace(profile, gpu=replace(gpu, nvlink=nvlink, all_to_all=exchange))
