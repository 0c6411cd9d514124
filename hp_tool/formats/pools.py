"""Read two server commands, of a prefill and a decode pool, as one query."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hp_tool.formats import imports
from hp_tool.formats.manifests import PodCommand
from hp_tool.formats.reading import Reading
from hp_tool.formats.source import Source

ROLES = ("prefill", "decode")
_SIZE_FIELDS = ("tensor_parallel_size", "expert_parallel_size", "attention_data_parallel_size")
_BRANCH_LABEL = re.compile(r"(?m)^[ \t]*\(?(prefill|decode)\)[ \t]*$")
_REPLICAS_COMMENT = re.compile(r"(?m)^#\s*(prefill|decode): (?:one of )?(\d{1,6}) replicas?$")
"""Matches the comment in an exported script that gives a pool's number of replicas."""


def split_pools(source: Source, started: PodCommand | None) -> dict[str, Source] | None:
    """Return the command of each pool by role; None if all servers have the same role."""
    if started is not None:
        if started.prefill is None:
            return None
        return {
            role: replace(
                source,
                text=each.script,
                environment=each.environment,
                unset=each.unknown,
                is_pool=True,
            )
            for role, each in zip(ROLES, (started.prefill, started), strict=True)
        }
    if "1" in source.variables or set(_BRANCH_LABEL.findall(source.text)) != set(ROLES):
        return None
    return {
        role: replace(source, variables={**source.variables, "1": role}, is_pool=True)
        for role in ROLES
    }


def count_replicas(source: Source, started: PodCommand | None) -> dict[str, int]:
    """Return the number of replicas of each pool, from the manifest or the script."""
    if started is not None and started.prefill is not None:
        return {"prefill": started.prefill.replicas, "decode": started.replicas}
    return {role: int(count) for role, count in _REPLICAS_COMMENT.findall(source.text)}


def read_pools(
    pools: Mapping[str, Source], replicas: Mapping[str, int], *, format: str | None
) -> Reading:
    """Return the query of both pools, and record how each setting is used.

    Raises:
        InputError: A command is invalid.
        UnsupportedError: A setting is not modelled.
    """
    readings = {
        role: imports.read_source(replace(each, num_gpus=None), format=format)
        for role, each in pools.items()
    }
    first, second = (readings[role] for role in ROLES)
    merged = Reading(tool=second.tool, overrides=second.overrides, hints=second.hints)
    for role, each in readings.items():
        merged.refused += [f"{role}: {why}" for why in each.refused]
        merged.read += [
            replace(read_setting, field=_pool_field(read_setting.field, role))
            for read_setting in each.read
        ]
        merged.ignored += each.ignored
    seen = set()
    for lacking in (*first.missing, *second.missing):
        if lacking.field not in seen:
            seen.add(lacking.field)
            merged.missing.append(lacking)
    sizes: dict[str, Any] = {}
    total: int | None = 0
    for role, each in readings.items():
        parallel = dict(each.query.get("parallel", {}))
        for name in _SIZE_FIELDS:
            sizes[f"{role}_{name}"] = parallel.pop(name, 1)
        if parallel.pop("pipeline_parallel_size", 1) != 1:
            merged.refuse(f"{role}: pipeline parallelism in a pool is not supported")
        ranks = (
            sizes[f"{role}_tensor_parallel_size"] * sizes[f"{role}_attention_data_parallel_size"]
        )
        path = f"inference.disaggregated.{role}_replicas"
        count = replicas.get(role, merged.overrides.get(path))
        if isinstance(count, int):
            sizes[f"{role}_replicas"] = count
            total = None if total is None else total + ranks * count
        else:
            total = None
            merged.add_missing(
                path, f"the number of replicas of the {role} pool is not set; add", example=1
            )
        each.query["parallel"] = parallel
    merged.query = dict(second.query)
    merged.query["parallel"] = _merge_shared(first, second, "parallel", merged)
    merged.query["inference"] = _merge_shared(first, second, "inference", merged) | {
        "disaggregated": sizes
    }
    if first.query.get("model") != second.query.get("model"):
        merged.refuse(
            f"the pools serve different models: {first.query.get('model')} and "
            f"{second.query.get('model')}"
        )
    merged.num_gpus = total
    return merged


def _pool_field(field: str, role: str) -> str:
    name = field.rpartition(".")[2]
    return f"inference.disaggregated.{role}_{name}" if name in _SIZE_FIELDS else field


def _merge_shared(first: Reading, second: Reading, section: str, merged: Reading) -> dict[str, Any]:
    """Return the settings of a section that the pools must share; reject settings that differ."""
    prefill, decode = (each.query.get(section, {}) for each in (first, second))
    shared: dict[str, Any] = {}
    for name in dict.fromkeys((*prefill, *decode)):
        if prefill.get(name) == decode.get(name):
            shared[name] = prefill[name]
        elif name == "redundant_experts":
            merged.hints["parallel.redundant_experts"] = "as many as divide the experts"
        else:
            merged.refuse(
                f"{section}.{name} differs between the pools (prefill {prefill.get(name)}, "
                f"decode {decode.get(name)}), which is not supported"
            )
    return shared
