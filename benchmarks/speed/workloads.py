"""What is timed: a dense space (GPT-3 175B on 1,024 A100) with single queries drawn from it, one of
mixture-of-experts configurations (Mixtral 8x22B on 512 H100), one of a trillion parameters that
grows to forty million candidates, and all that an expert would try for Llama 3.1 405B on 2,048
H100.
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
    """None, selective, and full of both methods with 1 to `largest` layers."""
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
"""Axes of spaces of about a thousand, forty thousand, half a million, 4 and 40 million legal
candidates of LARGE_QUERY.
"""


def dense_query() -> Query:
    """Every tensor, pipeline and virtual size and micro-batch that divides, 16 ways to recompute,
    all ZeRO stages.
    """
    return parse_query(QUERY | {"parallel": DENSE})


def moe_query() -> Query:
    """Return a mixture's query with every expert-parallel size, and experts split up to four
    ways.
    """
    return parse_query(MOE_QUERY | {"parallel": MOE})


def mixed_query() -> Query:
    """The dense space's axes for a model with dense layers before those with experts."""
    return parse_query(MIXED_QUERY | {"parallel": EVERYTHING | {"recompute": recomputations(7)}})


def unlike_query(*, alike: bool = False) -> Query:
    """The dense space's axes for layers of which three in four have a delta rule, which split no
    sequence; `alike`: for as many layers of attention.
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
    """One of the GROWTH."""
    return parse_query(LARGE_QUERY | {"parallel": EVERYTHING | GROWTH[step]})


def legal_space(query: Query) -> tuple[TrainingProblem, list[Candidates]]:
    """The problem and its legal candidates, in chunks as `recommend` costs them."""
    problem = resolve_training(query)
    chunks = legal_chunks(axes=default_axes(query=query.parallel, case=problem), case=problem)
    return problem, [chunk.candidates for chunk in chunks if len(chunk.candidates)]


def single_queries(count: int) -> list[Query]:
    """Queries of one configuration each, all different."""
    return drawn(
        parse_query(QUERY), Candidates.concatenate(legal_space(dense_query())[1]), count=count
    )


def drawn(query: Query, candidates: Candidates, *, count: int) -> list[Query]:
    """Return the query with `count` different ones of the candidates, one each."""
    rows = np.random.default_rng(0).choice(len(candidates), size=count, replace=False)
    return [replace(query, parallel=config_query(candidates.config(int(row)))) for row in rows]


def query_lines(queries: list[Query]) -> list[bytes]:
    """Return queries as JSON lines, without the fields that are not set."""
    return [json.dumps(_given(to_dict(query))).encode() for query in queries]


def _given(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return value
