"""Python API: `hp_tool.estimate`, `recommend`, `size`, `export` and `explain`, like the commands
with the same names.

    import hp_tool

    answer = hp_tool.recommend(model="llama-3-70b", gpu="h100-sxm-80gb", num_gpus=64,
                               sequence_length=8192, global_batch_size=128)
    best = answer.recommendations[0]
    best.parallel.tensor_parallel_size, best.estimate.time.step_s, best.estimate.memory.total_bytes

Answers are frozen dataclasses; `--json` prints the same data. Notebooks show them as tables. Errors
are subclasses of HpToolError.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

from hp_tool.questions.short_names import COMMON

if TYPE_CHECKING:
    from hp_tool.domain.query import Query
    from hp_tool.domain.sizing import SizingAnswer
    from hp_tool.formats.exchange import Exported
    from hp_tool.questions.answers import EstimateAnswer, RecommendAnswer
    from hp_tool.traces.explain.explanation import Explanation
    from hp_tool.traces.explain.logged import LoggedExplanation

F = TypeVar("F", bound=Callable[..., Any])

SIZING_KEYS = {name: COMMON[name] for name in ("gpu", "num_gpus")}
"""Paths of short names in a sizing query; all other keys are at the top level."""


class QueryKeys(TypedDict, total=False):
    """Query keys as keyword arguments. Sections are mappings with the fields in docs/queries.md;
    short names set single fields.
    """

    model: str | Mapping[str, Any]
    """Catalogue name, path of a config.json, or a mapping of the model's fields."""
    gpu: str
    """cluster.gpu: a name in the catalogue."""
    num_gpus: int
    """cluster.num_gpus: total number of devices."""
    sequence_length: int
    """training.sequence_length: tokens per sequence."""
    global_batch_size: int
    """training.global_batch_size: sequences per optimizer step."""
    precision: str
    """training.precision: bf16, fp8, ..."""
    total_tokens: float
    """training.total_tokens: adds days, GPU-hours, cost and energy."""
    id: str
    kind: Literal["training", "inference"]
    """Default: training, or inference if the `inference` section is given."""
    cluster: str | Mapping[str, Any]
    training: Mapping[str, Any]
    inference: Mapping[str, Any]
    parallel: Mapping[str, Any]
    objective: str
    rank_by: Literal["expected", "mean"]
    constraints: Mapping[str, Any]
    targets: Mapping[str, Any]


def _with_keys(function: F) -> F:
    """Return the function with the query keys in its signature. Tab completion and `help` do not
    resolve Unpack.
    """
    signature = inspect.signature(function)
    named = [
        each
        for each in signature.parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    named += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        for name in QueryKeys.__annotations__
    ]
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


@_with_keys
def estimate(
    query: Query | Mapping[str, Any] | Path | None = None, /, **keys: Unpack[QueryKeys]
) -> EstimateAnswer:
    """Predict the memory, step time and cost of the configuration in the query's `parallel` (for
    serving: its latencies).

    `query`: a query, a mapping, or a file; `keys` override its values: model, gpu, num_gpus,
    sequence_length, global_batch_size, precision, total_tokens, and the sections kind, cluster,
    training, inference, parallel, objective, rank_by, constraints, targets, id:

        hp_tool.estimate(model="llama-3-8b", gpu="h100-sxm-80gb", num_gpus=8, sequence_length=8192,
                         global_batch_size=64, parallel={"tensor_parallel_size": 4, "recompute":
                         "full"})

    If the configuration does not fit, `estimate.feasible` is False, and the answer has the reasons
    and `fixes`. Raises HpToolError if the query cannot be answered.
    """
    from hp_tool.questions.answers import answer_estimate

    return answer_estimate(make_query(query, **keys))


@_with_keys
def recommend(
    query: Query | Mapping[str, Any] | Path | None = None,
    /,
    *,
    top: int = 10,
    pareto: Literal["memory", "gpus", "throughput"] | None = None,
    sensitivity: bool = False,
    **keys: Unpack[QueryKeys],
) -> RecommendAnswer:
    """Rank all legal configurations that fit and return the best `top`; rank 1 is the one to try
    first. Axes that `parallel` omits vary.

    `pareto`: also return the configurations that no other beats in step time and memory, or in step
    time and number of devices; for serving, in tokens per second per user and per GPU (throughput).
    `sensitivity`: also return how the fastest step depends on the number of GPUs, each axis, and
    better hardware. `query` and `keys` are those of `estimate`: model, gpu, num_gpus,
    sequence_length, global_batch_size, precision, total_tokens, kind, cluster, training, inference,
    parallel, objective, rank_by, constraints, targets, id. In `parallel`, a value or a list
    restricts an axis.
    """
    from hp_tool.questions.answers import answer_recommend

    return answer_recommend(
        make_query(query, **keys), top=top, pareto=pareto, sensitivity=sensitivity
    )


def size(query: Mapping[str, Any] | Path | None = None, /, **keys: Any) -> SizingAnswer:
    """Plan the training that a budget allows: model, tokens, starting hyperparameters, days and
    cost including failures.

    `query`: a mapping or a file with the keys in docs/sizing.md; `keys` (gpu, num_gpus, days,
    model, parameters, tokens, flops, tokens_per_parameter, law, style, sequence_length,
    global_batch_size, cluster, ...) override its values, as in `hp_tool.size(gpu="h100-sxm-80gb",
    num_gpus=1024, days=30.0)`. Raises HpToolError.
    """
    from hp_tool.questions import schema
    from hp_tool.questions.budgets import answer_sizing, parse_sizing

    changes = {SIZING_KEYS.get(key, key): value for key, value in keys.items()}
    parsed = parse_sizing(schema.set_paths(_read(query), changes))
    return answer_sizing(schema.allow_own_files(parsed))


def export(
    result: Query | Mapping[str, Any] | Path | EstimateAnswer | RecommendAnswer,
    /,
    *,
    format: str,
    rank: int = 1,
    rerank: bool = False,
) -> Exported:
    """Write a recommendation in another tool's format: `text` is ready to run.

    `result`: an answer, its JSON, or a query, which is answered first. `format`: a name that
    `hp-tool export` lists. `rerank`: rank only the layouts that the tool supports, and report how
    much slower the best of them is. Raises HpToolError if the tool lacks a setting for the
    configuration.
    """
    from hp_tool.formats import exchange
    from hp_tool.questions import schema

    content = _read(result) if isinstance(result, Mapping | Path) else schema.to_dict(result)
    if rerank:
        return exchange.export_for_tool(result=content, format=format, read=schema.parse_own_query)
    return exchange.export_configuration(
        result=content, format=format, rank=rank, read=schema.parse_own_query
    )


@_with_keys
def explain(
    *traces: Path | str,
    query: Query | Mapping[str, Any] | Path | None = None,
    **keys: Unpack[QueryKeys],
) -> Explanation | LoggedExplanation:
    """Return the time of recorded steps by part, compared with the prediction for the configuration
    that ran.

    `traces`: files of torch.profiler, one for each rank, reports of Nsight Systems exported to
    SQLite, or one log with Megatron's timers, which are less detailed. `query` and `keys` are those
    of `estimate`; without them, ranks and groups are only compared with each other. Raises
    HpToolError.
    """
    from hp_tool.traces.explain.recorded import explain_files

    parsed = None if query is None and not keys else make_query(query, **keys)
    return explain_files([Path(each) for each in traces], query=parsed)


def make_query(
    query: Query | Mapping[str, Any] | Path | None = None, /, **keys: Unpack[QueryKeys]
) -> Query:
    """Return the validated query from a query or its file, overridden by the keys. Raises
    InputError.
    """
    from hp_tool.questions import schema

    return schema.parse_own_query(as_mapping(query, **keys))


def as_mapping(
    query: Query | Mapping[str, Any] | Path | None = None, /, **keys: Any
) -> dict[str, Any]:
    """Return a query or its file as an unvalidated mapping, with `kind` and the values of `keys`
    added.
    """
    from hp_tool.questions import schema

    data = (
        _read(query)
        if query is None or isinstance(query, Mapping | Path)
        else schema.query_mapping(query)
    )
    for key, value in keys.items():
        if isinstance(value, Mapping) and value and key != "model":
            schema.set_paths(data, {f"{key}.{name}": one for name, one in value.items()})
        else:
            schema.set_paths(data, {COMMON.get(key, key): value})
    data.setdefault("kind", "inference" if "inference" in data else "training")
    return data


def _read(query: Mapping[str, Any] | Path | None) -> dict[str, Any]:
    """Return a query as a mapping that can be modified; a given mapping is copied."""
    from hp_tool.catalog import documents

    return documents.read(query) if isinstance(query, Path) else copy.deepcopy(dict(query or {}))
