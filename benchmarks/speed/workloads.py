"""What is timed: a dense space of GPT-3 175B on 1,024 A100, and single queries drawn from it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from hp_tool.app import config_query
from hp_tool.cost.candidates import Candidates
from hp_tool.domain.query import Query
from hp_tool.problem import TrainingProblem, resolve_training
from hp_tool.schema import parse_query, to_dict
from hp_tool.space import default_axes, enumerate_space

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "gpt3-175b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 1024},
    "training": {"sequence_length": 2048, "global_batch_size": 1536, "total_tokens": 300e9},
}
DENSE = {
    "sequence_parallel": [True, False],
    "recompute": [
        "none",
        "selective",
        *(
            {"granularity": "full", "method": method, "num_layers": layers}
            for method in ("uniform", "block")
            for layers in (1, 2, 3, 4, 6, 8, 12)
        ),
    ],
}


def dense_query() -> Query:
    """Every tensor, pipeline and virtual size and micro-batch that divides, with 16 ways to recompute."""
    return parse_query(QUERY | {"parallel": DENSE})


def dense_space() -> tuple[TrainingProblem, Candidates]:
    """The problem and its legal candidates."""
    query = dense_query()
    problem = resolve_training(query)
    nouns = {"model": problem.model, "cluster": problem.cluster, "workload": problem.workload}
    return problem, enumerate_space(axes=default_axes(query=query.parallel, **nouns), **nouns).candidates


def repeated(candidates: Candidates, *, size: int) -> Candidates:
    """`size` candidates: the space over again, shuffled so that neighbours differ."""
    rows = np.random.default_rng(0).permutation(np.arange(size) % len(candidates))
    return candidates.take(rows)


def single_queries(count: int) -> list[Query]:
    """Queries of one configuration each, all different."""
    query = parse_query(QUERY)
    _, candidates = dense_space()
    rows = np.random.default_rng(0).choice(len(candidates), size=count, replace=False)
    return [replace(query, parallel=config_query(candidates.config(int(row)))) for row in rows]


def query_lines(queries: list[Query]) -> list[bytes]:
    """The same as JSON lines, without the fields that are not set."""
    return [json.dumps(_given(to_dict(query))).encode() for query in queries]


def _given(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return value
