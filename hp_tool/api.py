"""hp_tool from Python: `hp_tool.estimate`, `hp_tool.recommend` and `hp_tool.size`, the commands of the same names.

    import hp_tool

    answer = hp_tool.recommend(model="llama-3-70b", gpu="h100-sxm-80gb", num_gpus=64,
                               sequence_length=8192, global_batch_size=128)
    best = answer.recommendations[0]
    best.parallel.tensor_parallel_size, best.estimate.time.step_s, best.estimate.memory.total_bytes

The answers are the frozen dataclasses whose JSON `--json` prints; a notebook shows them as tables. Errors are HpToolError.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

if TYPE_CHECKING:
    from hp_tool.answers import EstimateAnswer, RecommendAnswer
    from hp_tool.domain.query import Query
    from hp_tool.domain.sizing import SizingAnswer

SHORT_KEYS = {
    "model": "model",
    "gpu": "cluster.gpu",
    "num_gpus": "cluster.num_gpus",
    "sequence_length": "training.sequence_length",
    "global_batch_size": "training.global_batch_size",
    "precision": "training.precision",
    "total_tokens": "training.total_tokens",
}
"""Keys of a query that are common enough to be given without their path: as arguments here, as flags, as columns of a grid."""

SIZING_KEYS = {name: SHORT_KEYS[name] for name in ("gpu", "num_gpus")}
"""Those of a sizing query, whose other keys stand at its top."""


class QueryKeys(TypedDict, total=False):
    """Keys of a query as arguments. Sections are mappings of what docs/queries.md lists; the others are short for a path."""

    model: str | Mapping[str, Any]
    """Catalogue name, path to a config.json, or its fields."""
    gpu: str
    """cluster.gpu: a catalogue name."""
    num_gpus: int
    """cluster.num_gpus: devices in all."""
    sequence_length: int
    """training.sequence_length: tokens."""
    global_batch_size: int
    """training.global_batch_size: sequences per optimizer step."""
    precision: str
    """training.precision: bf16, fp8, ..."""
    total_tokens: float
    """training.total_tokens: adds days, GPU-hours, cost and energy."""
    id: str
    kind: Literal["training", "inference"]
    """Left out, training, or inference where that section is given."""
    cluster: str | Mapping[str, Any]
    training: Mapping[str, Any]
    inference: Mapping[str, Any]
    parallel: Mapping[str, Any]
    objective: str
    rank_by: Literal["expected", "mean"]
    constraints: Mapping[str, Any]
    targets: Mapping[str, Any]


def estimate(query: Query | Mapping[str, Any] | Path | None = None, /, **keys: Unpack[QueryKeys]) -> EstimateAnswer:
    """Memory, step time and cost of the one configuration that a query's `parallel` describes (serving: its latencies).

    `query`: one, its mapping, or a file; `keys` are laid over it. One that does not fit is an answer with
    `estimate.feasible` False, its reasons, and its fixes (`mends`). Raises HpToolError for what cannot be answered.
    """
    from hp_tool.answers import estimate_answer

    return estimate_answer(make_query(query, **keys))


def recommend(
    query: Query | Mapping[str, Any] | Path | None = None,
    /,
    *,
    top: int = 10,
    pareto: Literal["memory", "gpus", "throughput"] | None = None,
    sensitivity: bool = False,
    **keys: Unpack[QueryKeys],
) -> RecommendAnswer:
    """The best `top` of all legal configurations that fit, the one to try first; the axes that `parallel` leaves out vary.

    `pareto`: also those that no other beats in step time and memory, or number of devices; of serving, in tokens
    per second for a user and for a GPU (throughput). `sensitivity`: also how the fastest step follows the number of GPUs, each
    axis, and better hardware. Otherwise as `estimate`.
    """
    from hp_tool.answers import recommend_answer

    return recommend_answer(make_query(query, **keys), top=top, pareto=pareto, sensitivity=sensitivity)


def size(query: Mapping[str, Any] | Path | None = None, /, **keys: Any) -> SizingAnswer:
    """The training that a budget buys: model, tokens, starting hyperparameters, days and cost with failures.

    `query`: a mapping or a file of what docs/sizing.md lists; `keys` are laid over it, as in
    `hp_tool.size(gpu="h100-sxm-80gb", num_gpus=1024, days=30.0)`. Raises HpToolError.
    """
    from hp_tool.budgets import parse_sizing, size_answer
    from hp_tool.queries import schema

    changes = {SIZING_KEYS.get(key, key): value for key, value in keys.items()}
    parsed = parse_sizing(schema.lay(_read(query), changes))
    return size_answer(schema.with_own_files(parsed))


def make_query(query: Query | Mapping[str, Any] | Path | None = None, /, **keys: Unpack[QueryKeys]) -> Query:
    """The validated query that a query or its file and the keys laid over it make. Raises InputError."""
    from hp_tool.queries import schema

    data = _read(query) if query is None or isinstance(query, Mapping | Path) else schema.query_mapping(query)
    for key, value in keys.items():
        if isinstance(value, Mapping) and key != "model":
            schema.lay(data, {f"{key}.{name}": one for name, one in value.items()})
        else:
            schema.lay(data, {SHORT_KEYS.get(key, key): value})
    data.setdefault("kind", "inference" if "inference" in data else "training")
    return schema.parse_own_query(data)


def _read(query: Mapping[str, Any] | Path | None) -> dict[str, Any]:
    """A query's mapping to lay keys over: a copy of one that is given."""
    from hp_tool import documents

    return documents.read(query) if isinstance(query, Path) else copy.deepcopy(dict(query or {}))
