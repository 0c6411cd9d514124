"""Digests of configurations and problems. Measurements with equal digests are interchangeable."""

import hashlib
import json
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any

from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.measurement import Fidelity
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.parallel import ParallelConfig, Recompute, Strategy
from hp_tool.domain.query import TrainerCommand
from hp_tool.domain.serving import RunConfig
from hp_tool.domain.workload import TrainingWorkload


def configuration_digest(*, parallel: RunConfig, fidelity: Fidelity | None = None) -> str:
    """Return the SHA-256 (hex) of a configuration and the fidelity of its run (None: complete)."""
    if isinstance(parallel, ParallelConfig) and isinstance(
        parallel.recompute, str
    ):  # A bare name is short for the mapping.
        parallel = replace(parallel, recompute=Recompute(granularity=parallel.recompute))
    return json_digest(
        {
            "parallel": _without_defaults(parallel),
            "fidelity": _without_defaults(fidelity or Fidelity()),
        }
    )


def problem_digest(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingWorkload,
    trainer: TrainerCommand | None = None,
) -> str:
    """Return the SHA-256 (hex) of everything except the configuration that determines a step time.

    Names and prices are excluded.
    """
    return json_digest(
        {
            **({} if trainer is None else {"trainer": _without_defaults(trainer)}),
            "model": _without_defaults(replace(model, name="", left_out=None)),
            "training": _without_defaults(replace(training, total_tokens=None, reliability=None)),
            "gpu": cluster.gpu.name,
            "cluster": [
                cluster.num_gpus,
                cluster.gpus_per_node,
                cluster.nvlink_domain_size,
                cluster.inter_node_bandwidth_bytes_per_second,
                cluster.inter_node_latency_s,
                *_non_default_hardware(cluster),
            ],
        }
    )


def strategy_digest(strategy: Strategy) -> str:
    """Return the SHA-256 (hex) of the settings that all candidates of a query have in common."""
    return json_digest(_without_defaults(strategy))


def json_digest(value: Any) -> str:
    """Return the SHA-256 (hex) of a JSON value, independent of key order."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _non_default_hardware(cluster: ClusterSpec) -> list[Any]:
    """Return the cluster's non-default values, so that digests of default clusters do not
    change.
    """
    names = (
        "network_topology",
        "nodes_per_leaf",
        "network_oversubscription",
        "rank_order",
        "nvlink_segment_gpus",
    )
    defaults = {item.name: item.default for item in fields(cluster)}
    kinds = [[kind.gpu.name, kind.num_gpus] for kind in cluster.kinds]
    return kinds + [
        [name, value] for name in names if (value := getattr(cluster, name)) != defaults[name]
    ]


def _without_defaults(value: Any) -> Any:
    """Return the value without fields that have their default, so that adding a field does not
    change existing digests.
    """
    if is_dataclass(value) and not isinstance(value, type):
        values = ((item, getattr(value, item.name)) for item in fields(value))
        return {
            item.name: _without_defaults(x)
            for item, x in values
            if item.default is MISSING or x != item.default
        }
    if isinstance(value, dict):
        return {str(key): _without_defaults(x) for key, x in value.items()}
    if isinstance(value, (tuple, list)):
        return [_without_defaults(x) for x in value]
    return value
