"""Runs of serving searches in words, and the cost model's predictions of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.domain.records import JsonObject
from hp_tool.domain.serving import Configuration, ServingConfig
from hp_tool.queries import schema
from hp_tool.render.words import serving_arithmetic
from hp_tool.search.serving import TARGETS, AnyLatencies
from hp_tool.serving.problem import resolve_serving
from hp_tool.tuning.serving import serving_candidates
from service.dashboard import formats
from service.dashboard.contexts import Quantity

LATENCIES = {"ttft_s": "time to first token", "tpot_s": "time per output token", "request_latency_s": "request latency"}


def serves(query: JsonObject) -> bool:
    """Whether a stored query is of kind inference."""
    return query.get("kind") == "inference"


def words(config: Configuration) -> tuple[str, str]:
    """(arithmetic, details) of a configuration."""
    if not isinstance(config, ServingConfig):
        return formats.arithmetic(config), formats.details(config)
    replicas = config.data_parallel_size // config.attention_data_parallel_size
    requests = config.max_num_seqs
    return serving_arithmetic(config, replicas=replicas), f"up to {requests} concurrent request{'' if requests == 1 else 's'}"


def quantity(query: JsonObject) -> Quantity:
    """What a search compares the runs of its query by."""
    if not serves(query):
        return Quantity(seconds="Step time", charged=False, rate="Tokens/s per GPU")
    return Quantity(seconds="Request latency", charged=bool(targets_of(query)), rate="Output tokens/s per GPU")


def targets_of(query: JsonObject) -> dict[str, float]:
    """The query's targets in seconds, by the name of the latency."""
    targets = query.get("targets") or {}
    return {name: targets[name] for name in TARGETS if targets.get(name) is not None}


def misses(latencies: AnyLatencies, *, targets: dict[str, float]) -> tuple[str, ...]:
    """The targets that `latencies` miss, in words."""
    seconds: dict[str, Any] = {name: getattr(latencies, name) for name in targets}
    return tuple(
        f"{LATENCIES[name]} {formats.seconds(seconds[name])} is above {formats.seconds(limit)}"
        for name, limit in targets.items()
        if seconds[name] > limit
    )


def predicted_costs(query: JsonObject, configs: Sequence[Configuration]) -> ServingCosts:
    """The cost model's predictions of serving configurations under a stored query's load.

    Raises HpToolError, for example for a query of another version with names that no longer exist.
    """
    problem = resolve_serving(schema.parse_query(query))
    serving = [config for config in configs if isinstance(config, ServingConfig)]
    return problem.costed(serving_candidates(problem, serving)).costs
