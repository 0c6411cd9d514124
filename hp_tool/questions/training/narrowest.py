"""What a training query leaves unsaid that widens the interval of its step time, and how narrow
naming it makes it.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hp_tool.domain.query import Query
from hp_tool.domain.releases import LATEST, is_later
from hp_tool.domain.result import Estimate, Narrowest
from hp_tool.errors import HpToolError
from hp_tool.questions.schema import lay, parse_query, query_mapping
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.releases import release_variance
from hp_tool.questions.training.usual import as_usual

LEAST = 1.1
"""How many times as wide an interval must be, in the logarithm, for what narrows it to be named."""

TRAINER = "hf-trainer"
"""The trainer named to who fine-tunes under a framework that was measured in pre-training alone."""


def with_narrowest(
    estimate: Estimate, *, query: Query, problem: TrainingProblem | None = None
) -> Estimate:
    """Return the estimate of the query's one configuration with what would narrow its interval
    most, if anything does: naming the trainer, the release, or that kernels are recorded, or both.

    `problem`: the query's, if it was resolved earlier.
    """
    if estimate.intervals is None or query.training is None:
        return estimate
    problem = problem or resolve_training(query)
    tunes = query.training.task != "pretrain" and problem.profile.framework.tuning_log_sd
    trainer = {"training.framework": TRAINER} if tunes else {}
    release = _narrowing(problem)
    usual = estimate.provenance.get("usual")
    assumed: dict[str, Any] = usual["set"] if isinstance(usual, dict) else {}
    named: dict[str, Any] = {} if release is None else {"training.framework_version": release}
    if "training.recipe" in assumed:
        named = assumed
    launched = "with_cuda_graphs" in estimate.provenance or "training.cuda_graphs" in assumed
    recorded: dict[str, Any] = {"training.cuda_graphs": True} if launched else {}
    for settings in filter(None, (trainer, named, recorded and named | recorded)):
        narrowed = _step_interval(query, settings)
        if narrowed is not None and _width(estimate.intervals.step_s) > LEAST * _width(narrowed):
            return replace(estimate, narrowest=Narrowest(set=settings, step_s=narrowed))
    return estimate


def _step_interval(query: Query, settings: Mapping[str, Any]) -> tuple[float, float] | None:
    """The interval that the estimate of the query with these settings states for its step; None if
    it cannot run so.
    """
    try:
        query = parse_query(lay(query_mapping(query), settings))
        resolved = resolve_configuration(query)
    except HpToolError:  # the recipe has a setting that the query's own rule out
        return None
    estimate = as_usual(resolved.estimate(with_fixes=False), query=query, problem=resolved.problem)
    return None if estimate.intervals is None else estimate.intervals.step_s


def _narrowing(problem: TrainingProblem) -> str | None:
    """The newest release that is known, if no release is given and predictions for this one scatter
    less.
    """
    if problem.workload.framework_version is not None:
        return None
    newest = problem.profile.framework.newest_release
    release = newest if newest is not None and is_later(newest, than=LATEST) else LATEST
    unsaid, named = (
        release_variance(
            problem.profile,
            experts=bool(problem.model.num_experts),
            gpu=problem.cluster.gpu,
            release=each,
        )
        for each in (None, release)
    )
    return release if named < unsaid else None


def _width(interval: tuple[float, float]) -> float:
    low, high = interval
    return math.log(high / low)
