"""Resolve, check and predict the single configuration of a training query."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from hp_tool.cost.breakdown import estimate_alone
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.legality import legality
from hp_tool.cost.legality_reasons import explain_violations
from hp_tool.cost.training import TrainingCosts
from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.parallel import (
    QUERY_STRATEGY_FIELDS,
    STRATEGY_FIELDS,
    ParallelConfig,
    ParallelQuery,
    Recompute,
)
from hp_tool.domain.pipeline_layout import parse_layout
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Reason
from hp_tool.errors import InputError
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.fixes import fixes
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.recipes import PARALLEL_KNOBS
from hp_tool.space import scheduled_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class CostedRow:
    """A row of candidates of one problem that were costed together."""

    index: int
    candidates: Candidates
    costs: TrainingCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfiguration:
    """The single configuration of a query, with everything that its estimate depends on."""

    query: Query
    problem: TrainingProblem
    config: ParallelConfig
    candidate: Candidates
    """The configuration as a single row of candidates."""
    reasons: tuple[Reason, ...]
    """Reasons why the configuration is illegal and has no costs; empty if it is legal."""
    row: CostedRow | None = None
    """Costs computed together with those of other configurations; None if not computed yet."""

    def estimate(self, *, with_fixes: bool = True) -> Estimate:
        """Return the estimate of the cost model.

        With `with_fixes`, an infeasible estimate contains fixes. They take as long as several
        hundred estimates.
        """
        if self.reasons:
            estimate = Estimate(feasible=False, reasons=self.reasons, parallel=self.config)
        else:
            costs = (
                self.problem.costs(self.candidate)
                if self.row is None
                else self.row.costs.row(self.row.index)
            )
            if self.problem.lengths is not None:
                costs = self.problem.scheduled(costs, self.candidate)
            estimate = estimate_alone(
                case=self.problem, costs=costs, candidate=self.candidate, config=self.config
            )
            estimate = self.problem.with_missed_targets(estimate)
        if estimate.feasible or not with_fixes:
            return estimate
        return replace(
            estimate, fixes=fixes(query=self.query, problem=self.problem, infeasible=estimate)
        )

    def calibrated_estimate(self, calibrations: Calibrations | None) -> Estimate | None:
        """Return the calibrated estimate; None without a calibration or for an illegal
        configuration.
        """
        predictor = None if self.reasons or calibrations is None else calibrations(self.problem)
        if predictor is None:
            return None
        row = self.row
        if row is None:
            one = Candidates.from_configs([self.config])
            row = CostedRow(index=0, candidates=one, costs=self.problem.costs(one))
        estimate = predictor.estimate(
            row.index, costs=row.costs, candidates=row.candidates, problem=self.problem
        )
        return replace(estimate, parallel=self.config)

    def problem_key(self) -> Hashable:
        """Return a key. Configurations with equal keys can be costed together.

        Raises:
            TypeError: A mapping in the query, which has no hash, describes the model or the device.
        """
        query = self.query
        strategy = tuple(getattr(query.parallel, name) for name in STRATEGY_FIELDS)
        key = (query.model, query.cluster, query.training, query.constraints, strategy)
        hash(key)
        return key


def estimate(*, query: Query, with_fixes: bool = True) -> Estimate:
    """Predict the configuration in `query.parallel`.

    Omitted sizes are 1, recompute is none and zero_stage is 1, unless the framework has other
    defaults. If the configuration is illegal, does not fit in memory or misses a limit, the
    estimate has feasible=False, reasons and fixes.
    """
    return resolve_configuration(query).estimate(with_fixes=with_fixes)


def resolve_configuration(query: Query) -> ResolvedConfiguration:
    """Return the single configuration in `query.parallel`.

    Raises:
        HpToolError: The query is invalid, or `query.parallel` is not a single configuration.
    """
    query.check_num_gpus()
    problem = resolve_training(query)
    parallel = query.parallel
    if query.training is not None and query.training.recipe is not None:
        parallel = replace(
            parallel, **{name: getattr(problem.parallel, name) for name in PARALLEL_KNOBS}
        )
    config = resolve_config(
        parallel, num_gpus=problem.cluster.num_gpus, framework=problem.workload.framework
    )
    candidate = Candidates.alone(config)
    code = int(legality(case=problem, candidates=candidate))
    reasons = explain_violations(code, case=problem, config=config) if code else ()
    return ResolvedConfiguration(
        query=query,
        problem=problem,
        config=problem.with_common_settings(config),
        candidate=candidate,
        reasons=reasons,
    )


def resolve_config(
    parallel: ParallelQuery, *, num_gpus: int, framework: str = "megatron-core"
) -> ParallelConfig:
    """Return the configuration in `parallel`. Omitted axes have the framework's defaults.

    data_parallel_size follows from the number of devices.

    Raises:
        InputError: An axis is a list, or the schedule does not support the number of model chunks.
    """
    values = single_values(parallel, ParallelConfig.__slots__)
    values.setdefault("zero_stage", framework_facts(framework).default_zero_stage)
    if parallel.recompute is None and checkpoints_layers(
        framework, sharded=values["zero_stage"] >= 3 and num_gpus > 1
    ):
        values["recompute"] = Recompute(granularity="full")
    if parallel.pipeline_layout is not None:
        num_chunks = len(
            parse_layout(parallel.pipeline_layout).chunks
        )  # p v. If the query sets neither, each chunk is one stage.
        p, v = values.get("pipeline_parallel_size"), values.get("virtual_pipeline_parallel_size")
        if p is None:
            values["pipeline_parallel_size"] = max(num_chunks // (v or 1), 1)
        elif v is None:
            values["virtual_pipeline_parallel_size"] = max(num_chunks // p, 1)
    schedule = values.get("pipeline_schedule")
    chunks = values.setdefault(
        "virtual_pipeline_parallel_size", 2 if schedule in ("zbv", "dualpipe-v") else 1
    )
    if schedule is not None:
        scheduled_chunks((chunks,), schedule=schedule)
    if schedule in ("1f1b", "interleaved"):  # The number of chunks determines it.
        del values["pipeline_schedule"]
    t = values.get("tensor_parallel_size", 1)
    if parallel.data_parallel_size is None:
        ranks = t * values.get("pipeline_parallel_size", 1) * values.get("context_parallel_size", 1)
        values["data_parallel_size"] = max(num_gpus // ranks, 1)
    values["sequence_parallel"] = t > 1 and values.get("sequence_parallel", True)
    if values.get("data_parallel_shard_size") == values.get(
        "data_parallel_size", parallel.data_parallel_size
    ):
        values["data_parallel_shard_size"] = 0  # The whole group.
    return ParallelConfig(**values)


def checkpoints_layers(framework: str, *, sharded: bool) -> bool:
    """Return whether the framework recomputes all layers by default."""
    default = framework_facts(framework).checkpoints
    return default == "full" or (default == "sharded" and sharded)


def single_values(parallel: ParallelQuery, axes: Iterable[str]) -> dict[str, Any]:
    """Return the query's values of these axes. Axes that it omits are left out.

    Raises:
        InputError: An axis is a list.
    """
    values: dict[str, Any] = {}
    for name in axes:
        value = getattr(parallel, name)
        if isinstance(value, tuple) and name not in QUERY_STRATEGY_FIELDS:
            if len(value) != 1:
                raise InputError(
                    f"parallel.{name} is a list; an estimate requires a single value",
                    field=f"parallel.{name}",
                )
            value = value[0]
        if value is not None:
            values[name] = value
    return values
