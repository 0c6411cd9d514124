"""What one calibration covers: a cluster, the software on it, and a family of models. Other sizes and node counts share it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.measurement import Hardware
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.training.problem import TrainingProblem

ModelFamily = Literal["dense", "moe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The key of calibrations that are versions of each other."""

    cluster_key: str
    framework: str
    """With its release, as `megatron-core 0.16.1`, where a query names one."""
    model_family: str
    """dense or moe; empty: all families (older calibrations)."""

    def nearest_first(self) -> tuple[Series, ...]:
        """This series and those that stand in for it: any release of the framework, then any family."""
        any_release = replace(self, framework=self.framework.split(" ")[0])
        return tuple(dict.fromkeys((self, any_release, replace(any_release, model_family=""))))


def series_of(problem: TrainingProblem, *, hardware: Hardware) -> Series:
    """The series that speaks for a problem on this hardware."""
    return Series(
        cluster_key=cluster_key(problem.cluster, hardware),
        framework=software(problem.workload),
        model_family=model_family(problem.model),
    )


def cluster_key(cluster: ClusterSpec, hardware: Hardware) -> str:
    """The device, its node and its network; hosts' CPUs differ, so `cpu` is kept apart by host."""
    network = f"{cluster.inter_node_bandwidth_bytes_per_second / 1e9:g}GBps"
    key = f"{cluster.gpu.name}/node{cluster.gpus_per_node}/nvlink{cluster.nvlink_domain_size}/{network}"
    return key if cluster.gpu.kind == "gpu" else "/".join((cluster.gpu.name, hardware.device_name, *hardware.hosts))


def software(workload: TrainingWorkload) -> str:
    """The framework, and its release where the query names one."""
    return " ".join(filter(None, (workload.framework, workload.framework_version)))


def model_family(model: ModelSpec) -> ModelFamily:
    """Models whose steps are made of the same operations: an all-to-all teaches nothing to those that have none."""
    return "moe" if model.num_experts else "dense"


def own_hardware(cluster: ClusterSpec) -> Hardware:
    """What runs would have been filed under: GPUs are alike wherever they stand, CPUs are those of this host."""
    if cluster.gpu.kind == "gpu":
        return Hardware(gpu=cluster.gpu.name, num_gpus=cluster.num_gpus)
    from hp_tool.launchers.devices import detect

    return detect(cpu_only=True)
