"""The step time with today's recipe for a query without a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hp_tool.catalog import library
from hp_tool.domain.knobs import CHOICES
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, WithRecipe
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.errors import HpToolError
from hp_tool.questions import schema
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.evaluate import ResolvedConfiguration, resolve_configuration
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.recipes import recipe

NEWEST = "megatron-bridge"
AUDITED = "mlperf-training-5.0"
TRAINED = (*(f"training.{name}" for name in CHOICES), "training.frozen_precision")
"""Settings that change the numerics."""
CAPACITY = "training.expert_capacity_factor"
OF_THE_LAYOUT: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({"cuda_graphs": True}, {}),  # of whole iterations, which allow recomputation of layers
    ({"cuda_graphs": False}, {}),
    ({"overlap": OverlapSpec(expert_parallel=False)}, {}),
    ({"overlap": OverlapSpec(expert_parallel=False), "cuda_graphs": False}, {}),
    (
        {"overlap": OverlapSpec(expert_parallel=False), "offload": "none"},
        {"zero_stage": 1, "recompute": "none"},
    ),
)
"""Replacements for values that a recipe chose for its own layout, tried in turn until one is
supported.
"""


def with_recipe_figure(
    estimate: Estimate,
    *,
    query: Query,
    problem: TrainingProblem | None = None,
    calibrations: Calibrations | None = None,
) -> Estimate:
    """Return the estimate with the step time of today's recipe.

    Queries with a recipe, and frameworks and devices without one, are unchanged. `problem` is the
    query's, if it was resolved earlier. `calibrations` correct the recipe's step like a calibrated
    `estimate`.
    """
    workload = query.training
    if workload is None or workload.recipe is not None or estimate.time is None:
        return estimate
    problem = problem or resolve_training(query)
    name = _todays(problem)
    if name is None:
        return estimate
    for training, parallel in OF_THE_LAYOUT:
        named = _filled(query, training={"recipe": name, **training}, parallel=parallel)
        resolved = _resolved(named)
        if resolved is not None and not resolved.reasons:
            break
    else:
        return estimate
    alone = resolved.estimate(with_fixes=False)
    figure = resolved.calibrated_estimate(calibrations) or alone
    assert alone.time is not None
    assert figure.time is not None and figure.intervals is not None  # the configuration is legal
    changes = _changes(before=problem, after=resolved.problem)
    if not changes:
        return estimate
    return replace(
        estimate,
        with_recipe=WithRecipe(
            recipe=name,
            set={"training.recipe": name} | _paths(query, named),
            step_s=figure.time.step_s,
            interval_s=figure.intervals.step_s,
            feasible=figure.feasible,
            changes=changes,
            gains=_gains(named, changes=changes, before=problem, step_s=alone.time.step_s),
        ),
    )


def _todays(problem: TrainingProblem) -> str | None:
    """Return the recipe for a training.

    It is that of the query's release, that of the audited runs if only these have its model and
    task, else the newest.
    """
    workload, gpu = problem.workload, problem.cluster.gpu
    if (
        workload.framework != "megatron-core"
        or gpu.predict_only
        or problem.model.architecture != "decoder"
    ):
        return None
    newest, name = recipe(NEWEST), problem.model.name
    audited = (
        workload.task == "lora" and name in recipe(AUDITED).models and name not in newest.models
    )
    linked = (
        gpu.nvlink_bandwidth_bytes_per_second is not None
    )  # as all that releases have recipes for
    if "bf16" not in gpu.peak_flops_per_second or not (linked or audited):
        return None
    released = f"{NEWEST}-{workload.framework_version}"
    if linked and workload.framework_version is not None and library.knows("recipes", released):
        return released
    return AUDITED if audited else newest.name


def _resolved(query: Query) -> ResolvedConfiguration | None:
    try:
        return resolve_configuration(query)
    except HpToolError:  # this layout does not support what the recipe sets
        return None


def _filled(query: Query, *, training: Mapping[str, Any], parallel: Mapping[str, Any]) -> Query:
    """Return the query with these values for open keys."""
    assert query.training is not None
    workload, layout = query.training, query.parallel
    filled = replace(workload, **_open(workload, training))
    return replace(query, training=filled, parallel=replace(layout, **_open(layout, parallel)))


def _open(section: TrainingWorkload | ParallelQuery, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values whose key the section leaves open."""
    return {name: value for name, value in values.items() if getattr(section, name) is None}


def _paths(query: Query, named: Query) -> dict[str, Any]:
    """Return what was inserted into the query in addition to the recipe, by path."""
    before, after = (schema.to_dict(each) for each in (query, named))
    return {
        f"{section}.{name}": value
        for section in ("training", "parallel")
        for name, value in after[section].items()
        if name != "recipe" and value != before[section].get(name)
    }


def _changes(*, before: TrainingProblem, after: TrainingProblem) -> dict[str, Any]:
    """Return settings by path that the recipe sets to other values than the query's."""
    old, new = (_knobs(each) for each in (before, after))
    return {
        path: value
        for path, value in new.items()
        if value != old.get(path) and not path.endswith(("recipe", "framework"))
    }


def _knobs(problem: TrainingProblem) -> dict[str, Any]:
    names = {
        path: value
        for path, value in problem.assumed.items()
        if path != "training.framework_version"
    }
    recompute = problem.parallel.recompute
    return names if recompute is None else names | {"parallel.recompute": schema.to_dict(recompute)}


def _gains(
    named: Query, *, changes: Mapping[str, Any], before: TrainingProblem, step_s: float
) -> dict[str, float]:
    """Return the step-time ratio without each setting that changes the numerics."""
    gains: dict[str, float] = {}
    for path in (path for path in changes if path in TRAINED and path in before.assumed):
        if path == CAPACITY and before.workload.expert_capacity_factor is None:
            kept = _resolved(named)
            problem = None if kept is None else _with_all_tokens(kept.problem)
        else:
            value = {path.removeprefix("training."): before.assumed[path]}
            kept = _resolved(_filled(named, training=value, parallel={}))
            problem = None if kept is None else kept.problem
        if kept is not None and problem is not None and not kept.reasons:
            gains[path] = float(problem.costs(kept.candidate).step_s) / step_s
    return gains


def _with_all_tokens(problem: TrainingProblem) -> TrainingProblem:
    """Return the problem without an expert capacity, which no query of the recipe can set."""
    return replace(problem, workload=replace(problem.workload, expert_capacity_factor=None))
