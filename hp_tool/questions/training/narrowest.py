"""What a training query leaves unsaid that widens the interval of its step time, and how narrow
naming it makes it.
"""

import math
from dataclasses import replace
from typing import Any

from hp_tool.domain.query import Query
from hp_tool.domain.releases import LATEST, is_later
from hp_tool.domain.result import Estimate, Narrowest
from hp_tool.errors import HpToolError
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.releases import release_variance
from hp_tool.questions.training.usual import as_usual

LEAST = 1.1
"""How many times as wide an interval must be, in the logarithm, for what narrows it to be named."""


def with_narrowest(
    estimate: Estimate, *, query: Query, problem: TrainingProblem | None = None
) -> Estimate:
    """Return the estimate of the query's one configuration with what would narrow its interval
    most, if anything does: naming the release, or that kernels are recorded, or both.

    `problem`: the query's, if it was resolved earlier.
    """
    if estimate.intervals is None or query.training is None:
        return estimate
    release = _narrowing(problem or resolve_training(query))
    named: dict[str, Any] = {} if release is None else {"framework_version": release}
    usual = estimate.provenance.get("usual")
    settings = usual["set"] if isinstance(usual, dict) else {}
    launched = "with_cuda_graphs" in estimate.provenance or "training.cuda_graphs" in settings
    recorded = {"cuda_graphs": True} if launched else {}
    if "training.recipe" in settings:
        named = {"recipe": settings["training.recipe"]}
    for values in filter(None, (named, recorded and named | recorded)):
        naming = replace(query, training=replace(query.training, **values))
        try:
            resolved = resolve_configuration(naming)
        except HpToolError:  # the recipe has a setting that the query's own rule out
            continue
        narrowed = as_usual(
            resolved.estimate(with_fixes=False), query=naming, problem=resolved.problem
        ).intervals
        if narrowed is not None and _width(estimate.intervals.step_s) > LEAST * _width(
            narrowed.step_s
        ):
            paths = {f"training.{name}": value for name, value in values.items()}
            return replace(estimate, narrowest=Narrowest(set=paths, step_s=narrowed.step_s))
    return estimate


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
