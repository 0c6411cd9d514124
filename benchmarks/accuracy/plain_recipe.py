"""Accuracy of published runs as full queries, as queries with a recipe name, and as minimal
queries: `python -m benchmarks.accuracy.plain_recipe [--data DIR]`.

A minimal query names model, GPUs, precision, batch and layout. Each query is predicted by the
shipped constants and by constants fitted without its model, as in the groups of docs/accuracy.md. A
minimal query is compared alone and with the settings of the current recipe.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.comparison import Comparison
from benchmarks.accuracy.data import print_report
from benchmarks.accuracy.fit_frameworks import today_left_out
from benchmarks.accuracy.groups import figures
from benchmarks.accuracy.prepared import Prepared, compare_all
from benchmarks.accuracy.runs import dgxc_cases, mlperf_cases, pretraining
from evidence.cases import Case
from hp_tool.domain.frameworks import framework_facts
from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.releases import release_numbers
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.errors import HpToolError
from hp_tool.questions.schema import parse_query, query_mapping, set_paths
from hp_tool.questions.training import estimate
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.recipes import list_recipes
from hp_tool.questions.training.usual_settings import usual_settings
from hp_tool.questions.training.with_recipe import AUDITED, NEWEST_FAMILY, with_recipe_figure

TRAINING_KEYS = ("sequence_length", "global_batch_size", "precision", "framework", "task", "lora")
"""Keys of `training` that a minimal query has."""
PARALLEL_KEYS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
    "sequence_parallel",
    "zero_stage",
    "recompute",
)
"""Keys of `parallel` that a minimal query has."""


def runs_by_kind(folder: Path) -> dict[str, list[Case]]:
    """Return the runs of each kind, which are then written as queries."""
    audited, cloud = mlperf_cases(folder), dgxc_cases(folder)

    def of(precision: str) -> list[Case]:
        return [case for case in cloud if case.training.precision == precision]

    return {
        "dense in 16 bits on H100": of("bf16"),
        "dense in fp8 on H100": of("fp8"),
        "MLPerf's pre-training": [case for case in audited if case.task == "pretrain"],
        "LoRA of MLPerf": [
            case for case in audited if case.task == "lora" and not case.card.startswith("mi3")
        ],
        "MoE models": [case for case in pretraining(folder) if case.has_experts],
    }


def without_model(folder: Path, cases: Sequence[Case]) -> list[Comparison]:
    """Return the cases predicted by constants fitted without their model. Adapters have no fitted
    constants, so LoRA is predicted by the shipped ones.
    """
    adapters = all(case.task == "lora" for case in cases)
    return (
        compare_all(cases, Prepared.shipped) if adapters else today_left_out(folder, cases, "name")
    )


def plain_answers(folder: Path, cases: Sequence[Case]) -> list[Comparison]:
    """Return the minimal queries as an estimate answers them: with the usual settings of such runs,
    and an interval that includes the step time without these settings.
    """
    plain = plain_cases(cases)
    rows, without = (
        without_model(folder, each) for each in ([with_usual(case) for case in plain], plain)
    )
    return [
        row
        if row.low is None or row.high is None or not math.isfinite(other.predicted)
        else dataclasses.replace(
            row, low=min(row.low, other.predicted), high=max(row.high, other.predicted)
        )
        for row, other in zip(rows, without, strict=True)
    ]


def plain_cases(cases: Iterable[Case]) -> list[Case]:
    """Return the cases as minimal queries."""
    return [_plain(case) for case in cases]


def named_cases(cases: Iterable[Case]) -> list[Case]:
    """Return the minimal queries with the name of a recipe: MLPerf's, or the newest that is not
    later than the run's release (the earliest recipe if all are later). If the run's release
    differs from the recipe's, the query names it too.
    """
    return [_named(case) for case in cases]


def todays_cases(cases: Iterable[Case]) -> list[Case]:
    """Return the minimal queries with the settings of the current recipe; unchanged if there is no
    such recipe.
    """
    return [_with_todays_recipe(case) for case in plain_cases(cases)]


def _plain(case: Case, **more: str | None) -> Case:
    whole, layout = case.training, case.query.parallel
    training = TrainingWorkload(**{name: getattr(whole, name) for name in TRAINING_KEYS}, **more)
    parallel = ParallelQuery(**{name: getattr(layout, name) for name in PARALLEL_KEYS})
    parallel = dataclasses.replace(
        parallel,  # anybody who sets the sizes of a layout knows these, too
        zero_stage=parallel.zero_stage or framework_facts(whole.framework).default_zero_stage,
        recompute=parallel.recompute or "none",
    )
    query = dataclasses.replace(case.query, training=training, parallel=parallel)
    return dataclasses.replace(case, query=query)


def _named(case: Case) -> Case:
    if case.source == "MLPerf Training":
        return _plain(case, recipe=AUDITED, framework_version=case.release or None)
    known = {
        each.name.removeprefix(f"{NEWEST_FAMILY}-")
        for each in list_recipes()
        if each.name.startswith(NEWEST_FAMILY)
    }
    numbers, releases = release_numbers(case.release)[:2], sorted(known, key=release_numbers)
    recipe = next(
        (each for each in reversed(releases) if release_numbers(each) <= numbers), releases[0]
    )
    other = release_numbers(recipe) != numbers
    return _plain(
        case, recipe=f"{NEWEST_FAMILY}-{recipe}", framework_version=case.release if other else None
    )


def with_usual(case: Case) -> Case:
    """Return the case with the settings that estimates assume if a query omits them."""
    try:
        resolved = resolve_configuration(case.query)
        estimate = resolved.estimate(with_fixes=False)
        settings = usual_settings(estimate, query=case.query, problem=resolved.problem)
    except HpToolError:
        return case
    return _with_settings(case, settings)


def _with_settings(case: Case, settings: Mapping[str, object]) -> Case:
    return dataclasses.replace(
        case, query=parse_query(set_paths(query_mapping(case.query), dict(settings)))
    )


def _with_todays_recipe(case: Case) -> Case:
    try:
        stated = with_recipe_figure(
            estimate(query=case.query, with_fixes=False), query=case.query
        ).with_recipe
    except HpToolError:
        return case
    return case if stated is None else _with_settings(case, stated.set)


QUESTIONS: Mapping[str, Callable[[Sequence[Case]], list[Case]]] = {
    "everything said": list,
    "recipe by name": named_cases,
    "plain, bare": plain_cases,
    "plain, today's recipe": todays_cases,
}


def evaluate(folder: Path) -> list[dict[str, Any]]:
    """Return the figures of each kind of query about each kind of run."""
    return [
        {
            "runs": title,
            "question": question,
            **_figures("shipped", compare_all(queries, Prepared.shipped)),
            **_figures("model left out", without_model(folder, queries)),
        }
        for title, cases in runs_by_kind(folder).items()
        for question, worded in QUESTIONS.items()
        for queries in [worded(cases)]
    ]


def _figures(constants: str, rows: list[Comparison]) -> dict[str, Any]:
    found = figures(rows)
    names = ("rows", "configurations", "mean_error", "median_error", "coverage", "width", "refused")
    return {f"{constants}: {name}": found[name] for name in names}


if __name__ == "__main__":
    print_report(description=__doc__, evaluate=evaluate)
