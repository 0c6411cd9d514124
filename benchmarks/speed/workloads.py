"""Training queries that the speed benchmarks time, and the layouts in their spaces.

They are: a dense model (GPT-3 175B on 1,024 A100), from whose space single queries are drawn; an
MoE model (Mixtral 8x22B on 512 H100); models whose layers differ; a model of a trillion parameters
with spaces of up to 40 million candidates; and Llama 3.1 405B on 2,048 H100 with all axes free.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from hp_tool.cost.candidates import Candidates
from hp_tool.domain.query import Query
from hp_tool.questions.schema import parse_query, to_dict
from hp_tool.questions.training import config_query
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.space import default_axes, legal_chunks

QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "gpt3-175b",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 1024},
    "training": {"sequence_length": 2048, "global_batch_size": 1536, "total_tokens": 300e9},
}
EXPERT_QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "llama-3.1-405b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 2048},
    "training": {"sequence_length": 8192, "global_batch_size": 2048},
}
MOE_QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "mixtral-8x22b",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 512},
    "training": {"sequence_length": 16384, "global_batch_size": 1536},
}
MIXED_QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "deepseek-v3",
    "cluster": {"gpu": "h100-sxm-80gb", "num_gpus": 1024},
    "training": {"sequence_length": 4096, "global_batch_size": 1536},
}
UNLIKE_QUERY: dict[str, Any] = QUERY | {
    "model": {
        "name": "100 unlike blocks",
        "num_hidden_layers": 100,
        "hidden_size": 12288,
        "num_attention_heads": 96,
        "vocab_size": 51200,
        "linear_num_key_heads": 96,
        "linear_key_head_dim": 128,
        "blocks": [{"count": 3, "mixer": "gated_delta"}, {}],
    }
}
LARGE_QUERY: dict[str, Any] = {
    "kind": "training",
    "model": "gpt-1t",
    "cluster": {"gpu": "a100-sxm-80gb", "num_gpus": 4096},
    "training": {"sequence_length": 8192, "global_batch_size": 9216},
}


def recomputations(largest: int) -> list[Any]:
    """Return no recomputation, selective, and both methods of full recomputation with 1 to
    `largest` layers.
    """
    layers = range(1, largest + 1)
    full = [
        {"granularity": "full", "method": how, "num_layers": n}
        for how in ("uniform", "block")
        for n in layers
    ]
    return ["none", "selective", *full]


EVERYTHING: dict[str, Any] = {"sequence_parallel": [True, False], "zero_stage": [0, 1, 2, 3]}
DENSE = EVERYTHING | {"recompute": recomputations(7), "context_parallel_size": [1, 2, 4]}
MOE = EVERYTHING | {"recompute": recomputations(7), "expert_tensor_parallel_size": [1, 2, 4]}
_FEW = {"tensor_parallel_size": 8, "context_parallel_size": [1, 2, 4, 8, 16]}
GROWTH: tuple[dict[str, Any], ...] = (
    {
        **_FEW,
        "pipeline_parallel_size": 8,
        "context_parallel_size": 1,
        "recompute": recomputations(0),
    },
    {**_FEW, "pipeline_parallel_size": [8, 16], "recompute": recomputations(0)},
    {"context_parallel_size": [1, 2, 4, 8, 16], "recompute": recomputations(0)},
    {"context_parallel_size": [1, 2, 4, 8, 16], "recompute": recomputations(8)},
    {"context_parallel_size": [1, 2, 4, 8, 16], "recompute": recomputations(87)},
)
"""Axes of LARGE_QUERY with about 1,000, 40,000, 500,000, 4 million and 40 million legal
candidates.
"""


def dense_query() -> Query:
    """Return the dense query with all tensor, pipeline and virtual pipeline sizes, all micro-batch
    sizes, 16 kinds of recomputation and all ZeRO stages.
    """
    return parse_query(QUERY | {"parallel": DENSE})


def moe_query() -> Query:
    """Return the MoE query with all expert-parallel sizes, and expert tensor parallelism up to
    4.
    """
    return parse_query(MOE_QUERY | {"parallel": MOE})


def mixed_query() -> Query:
    """Return the query of a model whose first layers are dense and whose other layers have
    experts.
    """
    return parse_query(MIXED_QUERY | {"parallel": EVERYTHING | {"recompute": recomputations(7)}})


def unlike_query(*, alike: bool = False) -> Query:
    """Return the query of a model in which three of four layers are gated delta rules; `alike`: of
    a model of the same size whose layers all have attention.
    """
    model = {
        name: value
        for name, value in UNLIKE_QUERY["model"].items()
        if not (alike and name == "blocks")
    }
    return parse_query(
        UNLIKE_QUERY | {"model": model, "parallel": DENSE | {"context_parallel_size": 1}}
    )


def growing_query(step: int) -> Query:
    """Return LARGE_QUERY with the axes GROWTH[step]."""
    return parse_query(LARGE_QUERY | {"parallel": EVERYTHING | GROWTH[step]})


def legal_space(query: Query) -> tuple[TrainingProblem, list[Candidates]]:
    """Return the problem and its legal candidates, in the chunks in which `recommend` costs
    them.
    """
    problem = resolve_training(query)
    chunks = legal_chunks(axes=default_axes(query=query.parallel, case=problem), case=problem)
    return problem, [chunk.candidates for chunk in chunks if len(chunk.candidates)]


def single_queries(count: int) -> list[Query]:
    """Return queries of different single configurations of the dense space."""
    return draw_queries(
        parse_query(QUERY), Candidates.concatenate(legal_space(dense_query())[1]), count=count
    )


def draw_queries(query: Query, candidates: Candidates, *, count: int) -> list[Query]:
    """Return the query with each of `count` different candidates, drawn at random."""
    rows = np.random.default_rng(0).choice(len(candidates), size=count, replace=False)
    return [replace(query, parallel=config_query(candidates.config(int(row)))) for row in rows]


def query_lines(queries: list[Query]) -> list[bytes]:
    """Return queries as JSON lines without unset fields."""
    return [json.dumps(_without_unset(to_dict(query))).encode() for query in queries]


def _without_unset(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_unset(item) for key, item in value.items() if item is not None}
    return value
