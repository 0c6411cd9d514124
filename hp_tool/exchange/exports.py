"""A result, or a query, as another tool's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hp_tool import serving, training
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import Query
from hp_tool.domain.serving import ServingConfig
from hp_tool.errors import InputError
from hp_tool.formats import accelerate, deepspeed, engines, megatron_bridge, megatron_lm, torchtitan
from hp_tool.formats.setup import ServingSetup, TrainingSetup
from hp_tool.queries import schema
from hp_tool.serving.problem import cache_precision, resolve_serving
from hp_tool.training.problem import TrainingProblem, resolve_training

TRAINING: dict[str, Callable[[TrainingSetup], str]] = {
    "megatron-lm": megatron_lm.command,
    "megatron-lm-yaml": megatron_lm.yaml,
    "nemo": megatron_bridge.text,
    "torchtitan": torchtitan.toml,
    "deepspeed": deepspeed.text,
    "accelerate": accelerate.text,
    "slurm": megatron_lm.slurm,
}
FORMATS = (*TRAINING, *engines.ENGINES)


def export(
    *,
    result: Mapping[str, Any],
    format: str,
    rank: int = 1,
    read: Callable[[Mapping[str, Any]], Query] = schema.parse_query,
) -> str:
    """The text of one configuration in another tool's words.

    `result` is what estimate, recommend or tune answered with --json (its `query` says the model and the workload), or a
    query, which is answered first. `rank` picks a recommendation, `read` parses the query. Raises InputError, UnsupportedError.
    """
    if format not in FORMATS:
        raise InputError(f"no format {format}; choose one of {', '.join(FORMATS)}", field="format")
    if "kind" in result:
        query = read(result)
        return _write(query, _recommended(query, rank), format)
    if not isinstance(result.get("query"), dict):
        raise InputError(
            "the result does not hold its query; export what estimate, recommend or tune print with --json",
            field="query",
            code="missing_field",
        )
    query = read(result["query"])
    return _write(query, _chosen(result, rank, kind=ServingConfig if query.kind == "inference" else ParallelConfig), format)


def _recommended(query: Query, rank: int) -> ParallelConfig | ServingConfig:
    """The configuration that a query's own answer puts at this rank."""
    ranking = (serving.recommend if query.kind == "inference" else training.recommend)(query=query, top=rank)
    rows = ranking.recommendations
    if len(rows) < rank:
        raise InputError(f"the query has {len(rows)} acceptable configurations; rank {rank} is not among them", field="rank")
    return rows[rank - 1].parallel


def _chosen(result: Mapping[str, Any], rank: int, *, kind: type[Any]) -> Any:
    """The configuration of this rank in a result's recommendations, or the one it estimates."""
    rows = result.get("recommendations")
    if rows is None and isinstance(result.get("estimate"), dict):
        rows = [result["estimate"]]
    if not isinstance(rows, list) or not 1 <= rank <= len(rows) or not isinstance(rows[rank - 1], dict):
        count = len(rows) if isinstance(rows, list) else 0
        raise InputError(f"the result has {count} configurations; rank {rank} is not among them", field="rank")
    return schema.parse(kind, rows[rank - 1].get("parallel") or {})


def _write(query: Query, config: ParallelConfig | ServingConfig, format: str) -> str:
    if isinstance(config, ServingConfig):
        if format not in engines.ENGINES:
            raise InputError(f"{format} trains; a serving configuration becomes {', '.join(engines.ENGINES)}", field="format")
        problem, workload = resolve_serving(query), query.inference
        assert workload is not None  # checked with the query
        setup = ServingSetup(
            model=problem.model,
            model_path=query.model if isinstance(query.model, str) else problem.model.name,
            cluster=problem.cluster,
            workload=replace(workload, kv_cache_precision=cache_precision(workload, engine=problem.engine)),
            parallel=config,
            memory_fraction=min(problem.engine.memory_fraction, 1.0 - query.constraints.memory_headroom_fraction),
        )
        return engines.command(setup, engine=format)
    if format not in TRAINING:
        raise InputError(f"{format} serves; a training configuration becomes {', '.join(TRAINING)}", field="format")
    return TRAINING[format](training_setup(resolve_training(query), config))


def training_setup(problem: TrainingProblem, config: ParallelConfig) -> TrainingSetup:
    """The case of one configuration; objective min_gpus may have chosen fewer devices than the query has."""
    model_parallel = config.tensor_parallel_size * config.pipeline_parallel_size * config.context_parallel_size
    used = model_parallel * config.data_parallel_size
    at = problem if used == problem.cluster.num_gpus else problem.with_num_gpus(used)
    return TrainingSetup(model=at.model, cluster=at.cluster, workload=at.workload, parallel=config, strategy=at.strategy)
