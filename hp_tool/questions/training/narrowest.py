"""Find the omitted setting that would narrow the step-time interval of a training query most."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hp_tool.domain.query import Query
from hp_tool.domain.releases import LATEST, is_later
from hp_tool.domain.result import Estimate, Narrowest
from hp_tool.errors import HpToolError
from hp_tool.questions.schema import parse_query, query_mapping, set_paths
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.releases import release_variance
from hp_tool.questions.training.usual_settings import with_usual_settings

MIN_WIDTH_RATIO = 1.1
"""Minimum ratio of the log-widths of the interval without and with a setting for the setting to be
reported.
"""

TRAINER = "hf-trainer"
"""Trainer suggested for fine-tuning if the query's framework was measured only for pre-training."""


def with_narrowest(
    estimate: Estimate, *, query: Query, problem: TrainingProblem | None = None
) -> Estimate:
    """Return the estimate with the setting that would narrow its interval most, if there is one.

    The settings tried are the trainer (for fine-tuning), the release or recipe, and these together
    with CUDA graphs. `problem` is the query's problem, if already resolved.
    """
    if estimate.intervals is None or query.training is None:
        return estimate
    problem = problem or resolve_training(query)
    is_unmeasured_tuning = (
        query.training.task != "pretrain" and problem.profile.framework.tuning_log_sd
    )
    trainer = {"training.framework": TRAINER} if is_unmeasured_tuning else {}
    release = _narrowing_release(problem)
    usual = estimate.provenance.get("usual")
    assumed: dict[str, Any] = usual["set"] if isinstance(usual, dict) else {}
    named: dict[str, Any] = {} if release is None else {"training.framework_version": release}
    if "training.recipe" in assumed:
        named = assumed
    may_use_graphs = "with_cuda_graphs" in estimate.provenance or "training.cuda_graphs" in assumed
    graphs: dict[str, Any] = {"training.cuda_graphs": True} if may_use_graphs else {}
    for settings in filter(None, (trainer, named, graphs and named | graphs)):
        narrowed = _step_interval(query, settings)
        if narrowed is not None and _interval_width(
            estimate.intervals.step_s
        ) > MIN_WIDTH_RATIO * _interval_width(narrowed):
            return replace(estimate, narrowest=Narrowest(set=settings, step_s=narrowed))
    return estimate


def _step_interval(query: Query, settings: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the step-time interval of the query with these settings; None if they are not
    supported.
    """
    try:
        query = parse_query(set_paths(query_mapping(query), settings))
        resolved = resolve_configuration(query)
    except HpToolError:  # The recipe conflicts with a setting of the query.
        return None
    estimate = with_usual_settings(
        resolved.estimate(with_fixes=False), query=query, problem=resolved.problem
    )
    return None if estimate.intervals is None else estimate.intervals.step_s


def _narrowing_release(problem: TrainingProblem) -> str | None:
    """Return the newest known release if the query sets none and naming a release narrows the
    interval; else None.
    """
    if problem.workload.framework_version is not None:
        return None
    newest = problem.profile.framework.newest_release
    release = newest if newest is not None and is_later(newest, than=LATEST) else LATEST
    variance_without, variance_with = (
        release_variance(
            problem.profile,
            experts=bool(problem.model.num_experts),
            gpu=problem.cluster.gpu,
            release=each,
        )
        for each in (None, release)
    )
    return release if variance_with < variance_without else None


def _interval_width(interval: tuple[float, float]) -> float:
    low, high = interval
    return math.log(high / low)
