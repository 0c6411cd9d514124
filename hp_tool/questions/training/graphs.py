"""Determine whether a training run can use CUDA graphs, and its efficiency profile with them."""

from __future__ import annotations

import dataclasses

from hp_tool.cost.host import without_host
from hp_tool.cost.shared import Shared
from hp_tool.domain.efficiency import EfficiencyProfile
from hp_tool.domain.graphs import recorded_modules, recording_error
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.query import Query
from hp_tool.domain.workload import TrainingWorkload


def has_graphs(
    *, cluster: ClusterSpec, workload: TrainingWorkload, profile: EfficiencyProfile
) -> bool:
    """Return whether the framework and the devices support CUDA graphs."""
    there = (
        workload.framework == "megatron-core" and not cluster.gpu.predict_only and not cluster.kinds
    )
    return there and profile.framework.host_launch_s > 0.0


def profile_with_graphs(
    query: Query,
    *,
    cluster: ClusterSpec,
    model: ModelSpec,
    workload: TrainingWorkload,
    profile: EfficiencyProfile,
) -> EfficiencyProfile | None:
    """Return the profile with CUDA graphs; None if the query or its recipe sets cuda_graphs, or if
    the framework, GPU or model does not support graphs.
    """
    assert query.training is not None
    settled = query.training.recipe is not None or query.training.cuda_graphs is not None
    if settled or not has_graphs(cluster=cluster, workload=workload, profile=profile):
        return None
    if recording_error(dataclasses.replace(workload, cuda_graphs=True), model) is not None:
        return None
    return _profiles.get(
        (profile, model, workload),
        (),
        lambda: _with_graphs(profile, model=model, workload=workload),
    )


_profiles: Shared[EfficiencyProfile] = Shared()


def _with_graphs(
    profile: EfficiencyProfile, *, model: ModelSpec, workload: TrainingWorkload
) -> EfficiencyProfile:
    modules = recorded_modules(dataclasses.replace(workload, cuda_graphs=True), model)
    return dataclasses.replace(profile, framework=without_host(profile.framework, modules=modules))
