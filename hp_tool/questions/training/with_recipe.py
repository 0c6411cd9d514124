"""Predict the step time of a query with the current recipe, using the settings that the layout
supports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from hp_tool.catalog import library
from hp_tool.domain.knobs import KNOBS
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, WithRecipe
from hp_tool.domain.workload import OverlapSpec, TrainingWorkload
from hp_tool.errors import HpToolError
from hp_tool.questions import schema
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.evaluate import ResolvedConfiguration, resolve_configuration
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.recipes import get_recipe

NEWEST_FAMILY = "megatron-bridge"
"""Name of the newest release's recipe. With a suffix, it is the name of another release's
recipe.
"""
AUDITED = "mlperf-training-5.0"
"""Name of the recipe of NVIDIA's audited runs."""
NUMERICS_PATHS = frozenset(f"training.{name}" for name, knob in KNOBS.items() if knob.trains)
"""Paths of settings that change the numerics."""
CAPACITY_KEY = "training.expert_capacity_factor"
LAYOUT_SETTINGS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {}),
    ({"cuda_graphs": True}, {}),  # Full-iteration graphs, which allow recomputation of layers.
    ({"cuda_graphs": False}, {}),
    ({"overlap": OverlapSpec(expert_parallel=False)}, {}),
    ({"overlap": OverlapSpec(expert_parallel=False), "cuda_graphs": False}, {}),
    (
        {"overlap": OverlapSpec(expert_parallel=False), "offload": "none"},
        {"zero_stage": 1, "recompute": "none"},
    ),
)
"""Values of `training` and `parallel` that replace those of a recipe, because the recipe's depend
on its own layout. A layout gets the first pair that it supports.
"""


def with_recipe_figure(
    estimate: Estimate,
    *,
    query: Query,
    problem: TrainingProblem | None = None,
    calibrations: Calibrations | None = None,
) -> Estimate:
    """Return the estimate with the step time under the current recipe in `with_recipe`.

    The estimate is unchanged if the query names a recipe, or if there is none for its framework and
    device. `problem` is the query's problem, if already resolved. `calibrations` correct the step
    time with the recipe in the same way as the estimate.
    """
    workload = query.training
    if workload is None or workload.recipe is not None or estimate.time is None:
        return estimate
    problem = problem or resolve_training(query)
    supported = supported_recipe(query, problem)
    if supported is None:
        return estimate
    named, resolved = supported
    uncalibrated = resolved.estimate(with_fixes=False)
    figure = resolved.calibrated_estimate(calibrations) or uncalibrated
    assert uncalibrated.time is not None
    assert figure.time is not None and figure.intervals is not None  # the configuration is legal
    changes = changed_settings(before=problem, after=resolved.problem)
    name = current_recipe(problem)
    assert name is not None  # it is supported
    return replace(
        estimate,
        with_recipe=WithRecipe(
            recipe=name,
            set=inserted_settings(query, named),
            step_s=figure.time.step_s,
            interval_s=figure.intervals.step_s,
            feasible=figure.feasible,
            changes=changes,
            gains=_numerics_ratios(
                named, changes=changes, before=problem, step_s=uncalibrated.time.step_s
            ),
        ),
    )


def supported_recipe(
    query: Query, problem: TrainingProblem
) -> tuple[Query, ResolvedConfiguration] | None:
    """Return the query with the current recipe and the first of LAYOUT_SETTINGS that its layout
    supports, and the configuration.

    None if there is no recipe, the layout supports none of LAYOUT_SETTINGS, or the recipe changes
    no setting.
    """
    for named in recipe_queries(query, problem):
        resolved = _try_resolve(named)
        if resolved is not None and not resolved.reasons:
            changes = changed_settings(before=problem, after=resolved.problem)
            return (named, resolved) if changes else None
    return None


def recipe_queries(query: Query, problem: TrainingProblem) -> Iterator[Query]:
    """Yield the query with the current recipe and each of LAYOUT_SETTINGS."""
    assert query.training is not None
    name = current_recipe(problem) if query.training.recipe is None else None
    for training, parallel in LAYOUT_SETTINGS if name is not None else ():
        yield _fill_open(query, training={"recipe": name, **training}, parallel=parallel)


def current_recipe(problem: TrainingProblem) -> str | None:
    """Return the name of the recipe that training runs like this one use; None if there is none.

    It is the recipe of the query's release if there is one. Otherwise, it is the newest recipe,
    except for a LoRA run whose model occurs only in NVIDIA's audited runs; then it is the recipe of
    these.
    """
    workload, gpu = problem.workload, problem.cluster.gpu
    if (
        workload.framework != "megatron-core"
        or gpu.predict_only
        or problem.model.architecture != "decoder"
    ):
        return None
    newest, name = get_recipe(NEWEST_FAMILY), problem.model.name
    audited = (
        workload.task == "lora" and name in get_recipe(AUDITED).models and name not in newest.models
    )
    linked = gpu.nvlink_bandwidth_bytes_per_second is not None  # as in all recipes
    if "bf16" not in gpu.peak_flops_per_second or not (linked or audited):
        return None
    released = f"{NEWEST_FAMILY}-{workload.framework_version}"
    if linked and workload.framework_version is not None and library.has_entry("recipes", released):
        return released
    return AUDITED if audited else newest.name


def _try_resolve(query: Query) -> ResolvedConfiguration | None:
    try:
        return resolve_configuration(query)
    except HpToolError:  # This layout does not support the recipe's settings.
        return None


def _fill_open(query: Query, *, training: Mapping[str, Any], parallel: Mapping[str, Any]) -> Query:
    """Return the query with these values for keys that it omits."""
    assert query.training is not None
    workload, layout = query.training, query.parallel
    filled = replace(workload, **_open_values(workload, training))
    return replace(
        query, training=filled, parallel=replace(layout, **_open_values(layout, parallel))
    )


def _open_values(
    section: TrainingWorkload | ParallelQuery, values: Mapping[str, Any]
) -> dict[str, Any]:
    return {name: value for name, value in values.items() if getattr(section, name) is None}


def inserted_settings(query: Query, named: Query) -> dict[str, Any]:
    """Return the values, by path, that `named` has and `query` lacks. The recipe comes first."""
    assert named.training is not None
    before, after = (schema.to_dict(each) for each in (query, named))
    return {"training.recipe": named.training.recipe} | {
        f"{section}.{name}": value
        for section in ("training", "parallel")
        for name, value in after[section].items()
        if value != before[section].get(name)
    }


def changed_settings(*, before: TrainingProblem, after: TrainingProblem) -> dict[str, Any]:
    """Return the settings by path that differ between two problems, with the values of `after`."""
    old, new = (_problem_knobs(each) for each in (before, after))
    return {
        path: value
        for path, value in new.items()
        if value != old.get(path) and path not in ("training.recipe", "training.framework")
    }


def _problem_knobs(problem: TrainingProblem) -> dict[str, Any]:
    names = {
        path: value
        for path, value in problem.assumed.items()
        if path != "training.framework_version"
    }
    recompute = problem.parallel.recompute
    return names if recompute is None else names | {"parallel.recompute": schema.to_dict(recompute)}


def _numerics_ratios(
    named: Query, *, changes: Mapping[str, Any], before: TrainingProblem, step_s: float
) -> dict[str, float]:
    """Return, for each setting of the recipe that changes the numerics, the step time without the
    setting divided by `step_s`.
    """
    gains: dict[str, float] = {}
    for path in (path for path in changes if path in NUMERICS_PATHS and path in before.assumed):
        if path == CAPACITY_KEY and before.workload.expert_capacity_factor is None:
            resolved = _try_resolve(named)
            problem = None if resolved is None else _without_expert_capacity(resolved.problem)
        else:
            value = {path.removeprefix("training."): before.assumed[path]}
            resolved = _try_resolve(_fill_open(named, training=value, parallel={}))
            problem = None if resolved is None else resolved.problem
        if resolved is not None and problem is not None and not resolved.reasons:
            gains[path] = float(problem.costs(resolved.candidate).step_s) / step_s
    return gains


def _without_expert_capacity(problem: TrainingProblem) -> TrainingProblem:
    """Return the problem without an expert capacity, which a query with this recipe cannot
    unset.
    """
    return replace(problem, workload=replace(problem.workload, expert_capacity_factor=None))
