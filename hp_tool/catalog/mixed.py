"""A cluster of two kinds of GPU: each kind resolved on its own, and the figures that hold for both together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hp_tool.domain.hardware import ClusterQuery, ClusterSpec, GpuSpec
from hp_tool.errors import InputError

_OF_ONE_KIND = ("gpu", "node_type")


def mixed_cluster(query: ClusterQuery, *, one_kind: Callable[[ClusterQuery], ClusterSpec]) -> ClusterSpec:
    """The cluster that `query.stages` describes; `one_kind` resolves each of its kinds. Raises InputError."""
    stages = query.stages or ()
    if len(stages) != 2:
        raise InputError(
            f"stages names {len(stages)} kinds of GPU; give two, in the order of their pipeline stages", field="cluster.stages"
        )
    for name in _OF_ONE_KIND:
        if getattr(query, name) is not None:
            raise InputError(f"{name} and stages both say which GPUs there are; leave one of them out", field=f"cluster.{name}")
    total = sum(stage.num_gpus for stage in stages)
    if query.num_gpus not in (None, total):
        raise InputError(f"num_gpus {query.num_gpus} is not the {total} that stages add up to", field="cluster.num_gpus")
    kinds = tuple(one_kind(dataclasses.replace(query, stages=None, gpu=stage.gpu, num_gpus=stage.num_gpus)) for stage in stages)
    name = " + ".join(f"{kind.num_gpus} x {kind.gpu.name}" for kind in kinds)
    return dataclasses.replace(
        min(kinds, key=lambda kind: kind.inter_node_bandwidth_bytes_per_second),
        name=query.name or name,
        gpu=_mean_gpu(kinds),
        num_gpus=total,
        gpus_per_node=min(kind.gpus_per_node for kind in kinds),
        nvlink_domain_size=min(kind.nvlink_domain_size for kind in kinds),
        price_per_gpu_hour=_mean(kinds, [kind.price_per_gpu_hour for kind in kinds]),
        kinds=kinds,
    )


def _mean_gpu(kinds: Sequence[ClusterSpec]) -> GpuSpec:
    """A device that stands for all of them: MFU divides by the mean peak, energy counts the mean power."""
    gpus = [kind.gpu for kind in kinds]
    if gpus[0].kind != gpus[1].kind:
        raise InputError("one of the kinds is cpu, the other a GPU; they cannot share a pipeline", field="cluster.stages")
    known = [name for name in gpus[0].peak_flops_per_second if name in gpus[1].peak_flops_per_second]
    idle = [gpu.idle_power_w if gpu.idle_power_w is not None else 0.25 * gpu.power_w for gpu in gpus]
    return dataclasses.replace(
        gpus[0],
        name=" + ".join(gpu.name for gpu in gpus),
        memory_bytes=min(gpu.memory_bytes for gpu in gpus),
        peak_flops_per_second={name: _sure(kinds, [gpu.peak_flops_per_second[name] for gpu in gpus]) for name in known},
        power_w=_sure(kinds, [gpu.power_w for gpu in gpus]),
        idle_power_w=_sure(kinds, idle),
        host_power_w=_sure(kinds, [gpu.host_power_w for gpu in gpus]),
        price_per_hour=None,
        source="means over the devices of both kinds",
    )


def _mean(kinds: Sequence[ClusterSpec], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _sure(kinds, known) if len(known) == len(kinds) else None


def _sure(kinds: Sequence[ClusterSpec], values: Sequence[float]) -> float:
    """The mean over devices."""
    weighed = sum(kind.num_gpus * value for kind, value in zip(kinds, values, strict=True))
    return weighed / sum(kind.num_gpus for kind in kinds)
