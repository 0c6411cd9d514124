"""Runs of a search for a way to serve in its own words: a run stores a replica in training's (hp_tool.search.serving)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hp_tool.catalog import cluster as catalogue_cluster
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import Query
from hp_tool.domain.records import JsonObject
from hp_tool.domain.serving import ServingConfig
from hp_tool.errors import HpToolError
from hp_tool.queries import schema
from hp_tool.render.words import serving_arithmetic
from hp_tool.search.serving import TARGETS, Latencies, Seen, Served, deployment, observed
from hp_tool.serving.problem import ServingProblem, resolve_serving
from hp_tool.tuning.serving import batched_tokens, load_of, serving_candidates
from service.dashboard import formats
from service.dashboard.contexts import Quantity

LATENCIES = {"ttft_s": "time to first token", "tpot_s": "time per output token", "request_latency_s": "request latency"}


def serves(query: JsonObject) -> bool:
    """Whether a stored query asks for a way to serve."""
    return query.get("kind") == "inference"


def run_words(query: JsonObject, runs: Sequence[ParallelConfig]) -> tuple[list[str], list[str]]:
    """The arithmetic and the details of stored runs of a query."""
    if not serves(query):
        return [formats.arithmetic(run) for run in runs], [formats.details(run) for run in runs]
    num_gpus = _num_gpus(query)
    arithmetic = [
        serving_arithmetic(
            ServingConfig(tensor_parallel_size=run.tensor_parallel_size),
            replicas=num_gpus // run.tensor_parallel_size if num_gpus else None,
        )
        for run in runs
    ]
    return arithmetic, [batch_words(run.micro_batch_size) for run in runs]


def batch_words(requests: int) -> str:
    """What a replica serves at once."""
    return f"up to {requests} request{'' if requests == 1 else 's'} at once"


def asked_of(query: JsonObject, run: ParallelConfig) -> ParallelConfig | ServingConfig:
    """The configuration that a stored run of a query stands for, as a query says it. Raises HpToolError."""
    return ServingRuns.of(query).config(run) if serves(query) else run


def quantity(query: JsonObject) -> Quantity:
    """What the runs of a query are compared by."""
    if not serves(query):
        return Quantity(seconds="Step time", charged=False, rate="Tokens/s per GPU")
    targets = query.get("targets") or {}
    charged = any(targets.get(name) is not None for name in TARGETS)
    return Quantity(seconds="Request latency", charged=charged, rate="Output tokens/s per GPU")


@dataclass(frozen=True, kw_only=True)
class ServingRuns:
    """What a search's runs say of the load that its query describes."""

    query: Query
    problem: ServingProblem

    @classmethod
    def of(cls, query: JsonObject) -> ServingRuns:
        """Raises HpToolError, as for a query of another version that says what is no longer known."""
        parsed = schema.parse_query(query)
        return cls(query=parsed, problem=resolve_serving(parsed))

    @property
    def targets(self) -> dict[str, float]:
        """Those given, by the name of the latency."""
        given = {name: getattr(self.problem.targets, name) for name in TARGETS}
        return {name: limit for name, limit in given.items() if limit is not None}

    def config(self, run: ParallelConfig) -> ServingConfig:
        """The whole deployment."""
        tokens = batched_tokens(self.query, self.problem)
        return deployment(run, num_gpus=self.problem.cluster.num_gpus, max_num_batched_tokens=tokens)

    def seen(self, served: Served, run: ParallelConfig) -> Latencies:
        """What was measured of one replica, under the whole load."""
        return observed(served, run, load=load_of(self.problem))

    def predicted(self, runs: Sequence[ParallelConfig]) -> ServingCosts:
        """The cost model's word on the same."""
        tokens = batched_tokens(self.query, self.problem)
        return self.problem.costs(serving_candidates(self.problem, runs, max_num_batched_tokens=tokens))

    def misses(self, seen: Seen) -> tuple[str, ...]:
        """The targets that latencies miss, in words."""
        return tuple(
            f"{LATENCIES[name]} {formats.seconds(getattr(seen, name))} is above {formats.seconds(limit)}"
            for name, limit in self.targets.items()
            if getattr(seen, name) > limit
        )


def _num_gpus(query: dict[str, Any]) -> int | None:
    try:
        return catalogue_cluster(schema.parse_query(query).cluster).num_gpus
    except HpToolError:
        return None
