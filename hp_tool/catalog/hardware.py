"""Resolve names of GPUs, servers and clusters to specs. Missing values are those of a typical
server.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hp_tool.catalog import library, records
from hp_tool.domain.fields import check_spec
from hp_tool.domain.hardware import ClusterQuery, ClusterRuns, ClusterSpec, GpuSpec, NodeType
from hp_tool.domain.prices import PRICED
from hp_tool.errors import InputError, NotFoundError

Cluster = str | ClusterQuery
"""Value of a query's `cluster`; a tuple lists several machines."""
RUNS_KEY = "runs"
"""Key of a cluster's catalogue entry with the launcher and the limits of its profile runs."""


def gpu(name: str, *, field: str = "gpu") -> GpuSpec:
    """Return a device's datasheet by catalogue name.

    Args:
        field: Query field for error messages.

    Raises:
        NotFoundError: The name is unknown; the error names the nearest known names.
    """
    return _gpu(library.entry("gpus", name, field=field))


def node_type(name: str, *, field: str = "cluster") -> NodeType:
    """Return a server, cloud instance or registered cluster by catalogue name.

    Raises:
        NotFoundError: The name is unknown; the error names the nearest known names.
    """
    return _node_type(library.entry("clusters", name, field=field))


def node_type_from_mapping(mapping: Mapping[str, Any]) -> NodeType:
    """Return a server from the fields of a catalogue file.

    Raises:
        InputError: A key is unknown; the error names the nearest known key.
    """
    return records.build(NodeType, mapping, field="cluster")


def cluster(query: Cluster) -> ClusterSpec:
    """Return the cluster of a query, which is a registered name or a description that catalogue
    defaults complete.

    A node type without a number of devices means a single node.

    Raises:
        InputError: A field is invalid; the error names the field, its value and the fix.
    """
    check_single_machine(query)
    if isinstance(query, str):
        node_type(
            query
        )  # Errors about an unknown name refer to `cluster`, not to cluster.node_type.
        query = ClusterQuery(name=query, node_type=query)
    try:
        return _cached_cluster(query, library.folders())
    except TypeError:  # A device described by its fields has no hash.
        return _resolve_cluster(query)


def machine_list_field(query: Cluster) -> str | None:
    """Return the field with which a query's cluster lists several machines; None for a single
    machine.

    The value of the field is a list, or `priced`, which selects all machines with a price.
    """
    if isinstance(query, tuple) or query == PRICED:
        return "cluster"
    for name in ("node_type", "gpu", "num_gpus"):
        value = getattr(query, name, None)
        if isinstance(value, tuple) or value == PRICED:
            return f"cluster.{name}"
    return None


def check_single_machine(query: Cluster) -> None:
    """Check that a query's cluster is a single machine. Only `recommend` compares several machines.

    Raises:
        InputError: The cluster lists several machines.
    """
    if (several := machine_list_field(query)) is not None:
        raise InputError(
            "Only `recommend` compares several machines; name one machine.",
            field=several,
            code="several_machines",
        )


@functools.lru_cache(maxsize=256)
def _cached_cluster(query: ClusterQuery, folders: tuple[Path, ...]) -> ClusterSpec:
    """Return the resolved cluster; equal queries return the same object."""
    return _resolve_cluster(query)


library.on_change(_cached_cluster.cache_clear)


def _resolve_cluster(query: ClusterQuery) -> ClusterSpec:
    if query.stages is not None:
        return _mixed_cluster(query)
    check_spec(query, field="cluster")
    _check_market(query)
    node = (
        node_type(query.node_type, field="cluster.node_type")
        if query.node_type is not None
        else None
    )
    device = _with_power_cap(_device(query, node), query.power_cap_w)
    num_gpus = _num_gpus(query, node)
    usual_node = node.gpus_per_node if node else device.gpus_per_node
    usual_domain = node.nvlink_domain_size if node else device.nvlink_domain_size
    gpus_per_node = _gpus_per_node(query, usual_node, num_gpus)
    domain = _nvlink_domain_size(query, usual_domain, num_gpus, gpus_per_node)
    node_gpus = _full_size(query.gpus_per_node, usual_node, num_gpus)
    prices = (
        query.price_per_gpu_hour,
        node.price_per_gpu_hour if node else None,
        device.price_per_hour,
    )
    spec = ClusterSpec(
        name=query.name or query.node_type or f"{num_gpus} x {device.name}",
        gpu=device,
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        nvlink_domain_size=domain,
        nvlink_segment_gpus=_nvlink_segment(query, domain=domain, gpus_per_node=gpus_per_node),
        node_gpus=node_gpus,
        domain_gpus=max(
            node_gpus,
            _full_size(query.nvlink_domain_size, usual_domain or node_gpus, num_gpus),
        ),
        inter_node_bandwidth_bytes_per_second=(
            query.inter_node_bandwidth_bytes_per_second
            or (node or device).inter_node_bandwidth_bytes_per_second
        ),
        price_per_gpu_hour=next((price for price in prices if price is not None), None),
        interruptions_per_node_day=query.interruptions_per_node_day or 0.0,
        grid_carbon_kg_per_kwh=query.grid_carbon_kg_per_kwh,
        power_usage_effectiveness=query.power_usage_effectiveness or 1.0,
        **_network(query, node),
    )
    if query.inter_node_latency_s is not None:
        spec = dataclasses.replace(spec, inter_node_latency_s=query.inter_node_latency_s)
    return spec


@functools.lru_cache(maxsize=1024)
def _gpu(entry: library.Entry) -> GpuSpec:
    fields = {"name": entry.name, "source": entry.source, **entry.fields}
    return records.build(GpuSpec, fields, field="gpu", origin=entry.path)


@functools.lru_cache(maxsize=1024)
def _node_type(entry: library.Entry) -> NodeType:
    fields = {"name": entry.name, "source": entry.source, **entry.fields}
    fields.pop(RUNS_KEY, None)  # Only processes that start runs need it.
    return records.build(NodeType, fields, field="cluster", origin=entry.path)


def _device(query: ClusterQuery, node: NodeType | None) -> GpuSpec:
    if query.gpu is None and node is None:
        raise InputError("gpu or node_type is missing; set one of them", field="cluster.gpu")
    requested = query.gpu if query.gpu is not None else node.gpu if node else ""
    device = (
        check_spec(requested, field="cluster.gpu")
        if isinstance(requested, GpuSpec)
        else gpu(requested, field="cluster.gpu")
    )
    if not device.peak_flops_per_second:
        raise InputError(
            "peak_flops_per_second must contain at least one precision",
            field="cluster.gpu.peak_flops_per_second",
        )
    if node is not None and device.name != gpu(node.gpu).name:
        raise InputError(
            f"{node.name} has {node.gpu}, not {device.name!r}; remove gpu or node_type",
            field="cluster.gpu",
        )
    return device


def _with_power_cap(device: GpuSpec, power_w: float | None) -> GpuSpec:
    """Return the device with its power limit set to `power_w`, which lowers its clocks."""
    if power_w is None:
        return device
    if not device.idle_w < power_w <= device.power_w:
        raise InputError(
            f"power_cap_w {power_w:g} must be between the idle power of {device.name} "
            f"({device.idle_w:g} W) and its limit ({device.power_w:g} W)",
            field="cluster.power_cap_w",
        )
    return dataclasses.replace(device, power_w=power_w, idle_power_w=device.idle_w)


def _check_market(query: ClusterQuery) -> None:
    """Check that a query for a spot or on-demand market sets the price and interruption rate of
    machines that are not in the price list.
    """
    needs = {None: (), "spot": ("price_per_gpu_hour", "interruptions_per_node_day")}.get(
        query.market, ("price_per_gpu_hour",)
    )
    for name in needs:
        if getattr(query, name) is None:
            raise InputError(
                f"market {query.market} requires {name} for a machine that is not in the price "
                "list; set it, or use node_type: priced",
                field=f"cluster.{name}",
                code="missing_field",
            )


def _num_gpus(query: ClusterQuery, node: NodeType | None) -> int:
    if query.num_gpus is not None:
        return query.num_gpus
    if node is None:
        raise InputError(
            "num_gpus is required without node_type; objective min_gpus finds the fewest",
            field="cluster.num_gpus",
        )
    return node.num_gpus or node.gpus_per_node


def _gpus_per_node(query: ClusterQuery, usual: int, num_gpus: int) -> int:
    """Return the number of devices per host. It is smaller than usual if a small cluster uses only
    part of a host.
    """
    gpus_per_node = min(query.gpus_per_node or usual, num_gpus)
    if num_gpus % gpus_per_node:
        fewer = num_gpus - num_gpus % gpus_per_node
        raise InputError(
            f"num_gpus {num_gpus} is not a multiple of gpus_per_node {gpus_per_node}; "
            f"use {fewer} or {fewer + gpus_per_node}, or set gpus_per_node",
            field="cluster.num_gpus",
        )
    return gpus_per_node


def _full_size(size: int | None, usual: int, num_gpus: int) -> int:
    return usual if size is None or size == num_gpus < usual else size


def _network(query: ClusterQuery, node: NodeType | None) -> dict[str, Any]:
    names = ("network_topology", "nodes_per_leaf", "network_oversubscription")
    levels = {
        name: value
        for name in names
        if (value := getattr(query, name) or getattr(node, name, None)) is not None
    }
    if levels.get("network_oversubscription", 1.0) > 1.0 and "nodes_per_leaf" not in levels:
        raise InputError(
            "network_oversubscription requires nodes_per_leaf, the number of nodes "
            "below the oversubscribed level",
            field="cluster.nodes_per_leaf",
            code="missing_field",
        )
    return levels


def _nvlink_domain_size(
    query: ClusterQuery, usual: int | None, num_gpus: int, gpus_per_node: int
) -> int:
    if query.nvlink_domain_size is None:
        return max(gpus_per_node, min(usual or gpus_per_node, num_gpus))
    size = min(query.nvlink_domain_size, num_gpus)
    if size % gpus_per_node:
        raise InputError(
            f"nvlink_domain_size {size} is not a multiple of gpus_per_node "
            f"{gpus_per_node}; use {gpus_per_node}, or set gpus_per_node to the devices "
            "of one host",
            field="cluster.nvlink_domain_size",
        )
    return size


def _nvlink_segment(query: ClusterQuery, *, domain: int, gpus_per_node: int) -> int | None:
    """Return how many devices of an NVLink domain a job uses together; None if the query does not
    set it.

    The number must not exceed the size of the domain.
    """
    segment = query.nvlink_segment_gpus
    if segment is None:
        return None
    size = min(segment, domain)
    if size % gpus_per_node:
        raise InputError(
            f"nvlink_segment_gpus {segment} is not a multiple of gpus_per_node {gpus_per_node}; "
            "use a multiple of it",
            field="cluster.nvlink_segment_gpus",
        )
    return size


def _mixed_cluster(query: ClusterQuery) -> ClusterSpec:
    """Return a cluster with the two kinds of GPU in `query.stages`. Its `kinds` has one cluster for
    each.
    """
    stages = query.stages or ()
    if len(stages) != 2:
        raise InputError(
            f"stages lists {len(stages)} kinds of GPU; list two, in the order of their "
            "pipeline stages",
            field="cluster.stages",
        )
    for name in ("gpu", "node_type"):
        if getattr(query, name) is not None:
            raise InputError(
                f"{name} and stages both set the GPUs; remove one of them",
                field=f"cluster.{name}",
            )
    total = sum(stage.num_gpus for stage in stages)
    if query.num_gpus not in (None, total):
        raise InputError(
            f"num_gpus {query.num_gpus} is not the sum of the stages' num_gpus ({total}); "
            "remove it, or correct the stages",
            field="cluster.num_gpus",
        )
    kinds = tuple(
        cluster(dataclasses.replace(query, stages=None, gpu=stage.gpu, num_gpus=stage.num_gpus))
        for stage in stages
    )
    name = " + ".join(f"{kind.num_gpus} x {kind.gpu.name}" for kind in kinds)
    prices = [kind.price_per_gpu_hour for kind in kinds if kind.price_per_gpu_hour is not None]
    return dataclasses.replace(
        min(kinds, key=lambda kind: kind.inter_node_bandwidth_bytes_per_second),
        name=query.name or name,
        gpu=_mean_gpu(kinds),
        num_gpus=total,
        gpus_per_node=min(kind.gpus_per_node for kind in kinds),
        nvlink_domain_size=min(kind.nvlink_domain_size for kind in kinds),
        node_gpus=min(kind.node_gpus or kind.gpus_per_node for kind in kinds),
        domain_gpus=min(kind.domain_gpus or kind.nvlink_domain_size for kind in kinds),
        price_per_gpu_hour=_device_mean(kinds, prices) if len(prices) == len(kinds) else None,
        kinds=kinds,
    )


def _mean_gpu(kinds: Sequence[ClusterSpec]) -> GpuSpec:
    """Return a device with the mean values of both kinds. It is used for MFU and energy."""
    gpus = [kind.gpu for kind in kinds]
    if gpus[0].kind != gpus[1].kind:
        raise InputError(
            "A CPU and a GPU cannot share a pipeline; use two kinds of GPU.",
            field="cluster.stages",
        )
    precisions = [
        name for name in gpus[0].peak_flops_per_second if name in gpus[1].peak_flops_per_second
    ]
    idle = [gpu.idle_w for gpu in gpus]
    return dataclasses.replace(
        gpus[0],
        name=" + ".join(gpu.name for gpu in gpus),
        memory_bytes=min(gpu.memory_bytes for gpu in gpus),
        peak_flops_per_second={
            name: _device_mean(kinds, [gpu.peak_flops_per_second[name] for gpu in gpus])
            for name in precisions
        },
        power_w=_device_mean(kinds, [gpu.power_w for gpu in gpus]),
        idle_power_w=_device_mean(kinds, idle),
        host_power_w=_device_mean(kinds, [gpu.host_power_w for gpu in gpus]),
        price_per_hour=None,
        predict_only=any(gpu.predict_only for gpu in gpus),
        source="means over the devices of both kinds",
    )


def _device_mean(kinds: Sequence[ClusterSpec], values: Sequence[float]) -> float:
    weighed = sum(kind.num_gpus * value for kind, value in zip(kinds, values, strict=True))
    return weighed / sum(kind.num_gpus for kind in kinds)


def cluster_name(cluster: str | ClusterQuery) -> str | None:
    """Return the name of the query's registered cluster or node type; None if it has no name."""
    check_single_machine(cluster)
    return cluster if isinstance(cluster, str) else cluster.node_type


def cluster_runs(cluster: str | ClusterQuery) -> ClusterRuns | None:
    """Return `runs` from a registered cluster's entry in the user's catalogue; None if the entry
    has no `runs`.

    The field contains the operator's programs, folders and shell code. For security, it is read
    only from files, never from a query or over HTTP.

    Raises:
        InputError: The entry is malformed.
    """
    name = cluster_name(cluster)
    if name is None:
        return None
    try:
        entry = library.entry("clusters", name, field="cluster")
    except NotFoundError:
        return None
    if RUNS_KEY not in entry.fields:
        return None
    runs = entry.fields[RUNS_KEY]
    if not isinstance(runs, dict):
        raise InputError(
            f"{entry.path}: runs must be a mapping of launcher, options and limits",
            field="cluster.runs",
        )
    settings = records.build(ClusterRuns, runs, field="cluster.runs", origin=entry.path)
    if settings.launcher == "local" and settings.options:
        raise InputError(
            f"{entry.path}: launcher local accepts no options; remove them",
            field="cluster.runs.options",
        )
    return settings
