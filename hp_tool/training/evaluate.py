"""The one configuration that a query fixes: looked up, checked, estimated, and corrected by what was measured."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from hp_tool.cost.breakdown import estimate_alone
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import legality
from hp_tool.cost.legality_reasons import explain
from hp_tool.cost.training import TrainingCosts
from hp_tool.domain.parallel import OF_THE_QUERY, ParallelConfig, ParallelQuery, default_zero_stage
from hp_tool.domain.pipeline_layout import parse_layout
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Reason
from hp_tool.errors import InputError
from hp_tool.space import scheduled_chunks
from hp_tool.training.calibrated import Corrections, corrected_estimate
from hp_tool.training.limits import with_missed_targets
from hp_tool.training.problem import TrainingProblem, resolve_training


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """A query's configuration, and what the cost model wants to know about it."""

    query: Query
    problem: TrainingProblem
    config: ParallelConfig
    candidate: Candidates
    """Alone, as plain numbers."""
    reasons: tuple[Reason, ...]
    """Why it is illegal, and so has no costs; empty where it is legal."""

    def costed_with(self) -> Hashable:
        """Equal for queries whose configurations are candidates of one problem. Raises TypeError where a description in the
        query cannot be told from others by a hash.
        """
        query = self.query
        said_for_all = tuple(getattr(query.parallel, name) for name in OF_THE_QUERY)
        key = (query.model, query.cluster, query.training, query.constraints, said_for_all)
        hash(key)
        return key


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A configuration's place among candidates of its problem that were costed together."""

    index: int
    candidates: Candidates
    costs: TrainingCosts


def single(query: Query) -> Single:
    """The one configuration that `query.parallel` describes. Raises HpToolError where it describes none, or several."""
    problem = resolve_training(query)
    config = single_config(query.parallel, num_gpus=problem.cluster.num_gpus, framework=problem.workload.framework)
    candidate = Candidates.alone(config)
    code = int(legality(case=problem, candidates=candidate))
    reasons = explain(code, case=problem, config=config) if code else ()
    return Single(query=query, problem=problem, config=config, candidate=candidate, reasons=reasons)


def predicted(*, asked: Single, row: Row | None = None) -> Estimate:
    """What the cost model says; `row`: where it has said so already."""
    if asked.reasons:
        return Estimate(feasible=False, reasons=asked.reasons, parallel=asked.config)
    problem = asked.problem
    found = estimate_alone(
        case=problem,
        costs=problem.costs(asked.candidate) if row is None else row.costs.row(row.index),
        candidate=asked.candidate,
    )
    return with_missed_targets(replace(found, parallel=asked.config), problem)


def calibrated(*, asked: Single, corrections: Corrections, row: Row | None = None) -> Estimate | None:
    """The same after what is known of its cluster; None where that is nothing, or the configuration is illegal."""
    if asked.reasons:
        return None
    problem = asked.problem
    correction = corrections(problem)
    if correction is None:
        return None
    if row is None:
        one = Candidates.from_configs([asked.config])
        row = Row(index=0, candidates=one, costs=problem.costs(one))
    corrected = corrected_estimate(
        row.index, costs=row.costs, candidates=row.candidates, problem=problem, correction=correction
    )
    return replace(corrected, parallel=asked.config)


def single_config(parallel: ParallelQuery, *, num_gpus: int, framework: str = "megatron-core") -> ParallelConfig:
    """The one configuration a query fixes, data_parallel_size derived, zero_stage the framework's own.

    Raises InputError where an axis is a list, or the schedule is not that of the model chunks.
    """
    values: dict[str, Any] = {}
    for name in ParallelConfig.__slots__:
        value = getattr(parallel, name)
        if isinstance(value, tuple) and name not in OF_THE_QUERY:
            if len(value) != 1:
                raise InputError(f"parallel.{name} is a list; an estimate wants one value", field=f"parallel.{name}")
            value = value[0]
        if value is not None:
            values[name] = value
    values.setdefault("zero_stage", default_zero_stage(framework))
    if parallel.pipeline_layout is not None:
        values = _laid_out(values, chunks=len(parse_layout(parallel.pipeline_layout).chunks))
    schedule = values.get("pipeline_schedule")
    chunks = values.setdefault("virtual_pipeline_parallel_size", 2 if schedule == "zbv" else 1)
    scheduled_chunks((chunks,), schedule=schedule)
    if schedule in ("1f1b", "interleaved"):  # what the number of chunks says already
        del values["pipeline_schedule"]
    t = values.get("tensor_parallel_size", 1)
    if parallel.data_parallel_size is None:
        ranks = t * values.get("pipeline_parallel_size", 1) * values.get("context_parallel_size", 1)
        values["data_parallel_size"] = max(num_gpus // ranks, 1)
    values["sequence_parallel"] = t > 1 and values.get("sequence_parallel", True)
    if values.get("data_parallel_shard_size") == values.get("data_parallel_size", parallel.data_parallel_size):
        values["data_parallel_shard_size"] = 0  # the whole group
    return ParallelConfig(**values)


def _laid_out(values: dict[str, Any], *, chunks: int) -> dict[str, Any]:
    """The values with the number of stages or of chunks a stage that a pipeline layout implies, where only one is given;
    with neither, every chunk is a stage.
    """
    p, v = values.get("pipeline_parallel_size"), values.get("virtual_pipeline_parallel_size")
    if p is None:
        return values | {"pipeline_parallel_size": max(chunks // (v or 1), 1)}
    return values if v is not None else values | {"virtual_pipeline_parallel_size": max(chunks // p, 1)}
