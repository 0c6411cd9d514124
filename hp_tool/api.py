"""hp_tool from Python: `hp_tool.estimate`, `recommend`, `size`, `export` and `explain`, the
commands of the same names.

    import hp_tool

    answer = hp_tool.recommend(model="llama-3-70b", gpu="h100-sxm-80gb", num_gpus=64,
                               sequence_length=8192, global_batch_size=128)
    best = answer.recommendations[0]
    best.parallel.tensor_parallel_size, best.estimate.time.step_s, best.estimate.memory.total_bytes

The answers are the frozen dataclasses whose JSON `--json` prints; a notebook shows them as tables.
Errors are HpToolError.
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
"""Those of a sizing query, whose other keys stand at its top."""


class QueryKeys(TypedDict, total=False):
    """Keys of a query as arguments. Sections are mappings of what docs/queries.md lists; the others
    are short for a path.
    """

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


def _with_keys(function: F) -> F:
    """The function, whose signature names the keys of a query for completion and `help`: sessions
    do not see into Unpack.
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
    """Memory, step time and cost of the one configuration that a query's `parallel` describes
    (serving: its latencies).

    `query`: one, its mapping, or a file; `keys` are laid over it: model, gpu, num_gpus,
    sequence_length, global_batch_size, precision, total_tokens, and the sections kind, cluster,
    training, inference, parallel, objective, rank_by, constraints, targets, id:

        hp_tool.estimate(model="llama-3-8b", gpu="h100-sxm-80gb", num_gpus=8, sequence_length=8192,
                         global_batch_size=64, parallel={"tensor_parallel_size": 4, "recompute":
                         "full"})

    One that does not fit is an answer with `estimate.feasible` False, its reasons, and its fixes
    (`fixes`). Raises HpToolError for what cannot be answered.
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
    """The best `top` of all legal configurations that fit, the one to try first; the axes that
    `parallel` leaves out vary.

    `pareto`: also those that no other beats in step time and memory, or number of devices; of
    serving, in tokens per second for a user and for a GPU (throughput). `sensitivity`: also how the
    fastest step follows the number of GPUs, each axis, and better hardware. `query` and `keys` as
    of `estimate`: model, gpu, num_gpus, sequence_length, global_batch_size, precision,
    total_tokens, kind, cluster, training, inference, parallel, objective, rank_by, constraints,
    targets, id. In `parallel` a value or a list narrows an axis.
    """
    from hp_tool.questions.answers import answer_recommend

    return answer_recommend(
        make_query(query, **keys), top=top, pareto=pareto, sensitivity=sensitivity
    )


def size(query: Mapping[str, Any] | Path | None = None, /, **keys: Any) -> SizingAnswer:
    """The training that a budget buys: model, tokens, starting hyperparameters, days and cost with
    failures.

    `query`: a mapping or a file of what docs/sizing.md lists; `keys` (gpu, num_gpus, days, model,
    parameters, tokens, flops, tokens_per_parameter, law, style, sequence_length, global_batch_size,
    cluster, ...) are laid over it, as in `hp_tool.size(gpu="h100-sxm-80gb", num_gpus=1024,
    days=30.0)`. Raises HpToolError.
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
    """A recommendation in another tool's words: `text`, ready to run.

    `result`: an answer, its JSON, or a query, which is answered first. `format`: as `hp-tool
    export` lists them. `rerank`: rank again among what the tool can run, and say what that costs.
    Raises HpToolError for what the tool has no setting for.
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
    """Where the seconds of recorded steps went, beside the prediction for the configuration that
    ran.

    `traces`: files of torch.profiler, one for each rank, reports of Nsight Systems exported to
    SQLite, or one log with Megatron's timers, of which less is known. `query` and `keys` as of
    `estimate`; without them ranks and groups are held against each other alone. Raises HpToolError.
    """
    from hp_tool.traces.explain.recorded import explain_files

    parsed = None if query is None and not keys else make_query(query, **keys)
    return explain_files([Path(each) for each in traces], query=parsed)


def make_query(
    query: Query | Mapping[str, Any] | Path | None = None, /, **keys: Unpack[QueryKeys]
) -> Query:
    """The validated query that a query or its file and the keys laid over it make. Raises
    InputError.
    """
    from hp_tool.questions import schema

    return schema.parse_own_query(as_mapping(query, **keys))


def as_mapping(
    query: Query | Mapping[str, Any] | Path | None = None, /, **keys: Any
) -> dict[str, Any]:
    """The mapping of a query or its file with the keys laid over it and its kind said, not yet
    validated.
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
    """A query's mapping to lay keys over: a copy of one that is given."""
    from hp_tool.catalog import documents

    return documents.read(query) if isinstance(query, Path) else copy.deepcopy(dict(query or {}))
