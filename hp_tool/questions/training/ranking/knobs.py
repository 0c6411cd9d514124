"""Settings that do not change the numerics. If the query leaves them open, a ranking chooses those
that shorten the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hp_tool.cost.legality import legality
from hp_tool.domain.query import Query
from hp_tool.domain.workload import OverlapSpec
from hp_tool.errors import InputError
from hp_tool.questions.training.graphs import has_graphs
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.ranking.best import Best
from hp_tool.questions.training.usual_settings import usual_problems

HIDDEN_OVERLAPS = {"expert_parallel": True}
"""Value of `training.overlap` with which experts' all-to-alls overlap another micro-batch."""
MAX_STEP_RATIO = 0.99
"""Maximum ratio of the shortest step time with a setting to that without it, for the setting to be
chosen.
"""
NUM_LAYOUTS = 10
"""Number of best layouts that determine the choice, whatever the number of rows shown."""


def choose_free_knobs(query: Query, best: Best) -> tuple[TrainingProblem, ...]:
    """Return the query's problem with the free settings that shorten its shortest step most; empty
    if none does.

    The settings are CUDA graphs, a fused loss and, for MoE models, overlapped all-to-alls, if
    supported by the framework and the GPU.

    If no configuration is acceptable without them, return the problems to try, in order: with all
    settings, then for MoE models with fewer, because graphs and overlapped all-to-alls exclude some
    recomputations and layouts. A fused loss saves memory, and the other settings may help to meet a
    deadline.
    """
    before = best.problems[0].plain
    if not has_free_knobs(query, before):
        return ()
    if not best.feasible:
        candidates = [
            _problem_with(query, values, before=before) for values in _knob_values(query, before)
        ]
        resolved = [problem for problem in reversed(candidates) if problem is not None]
        without_graphs = [
            problem
            for problem in resolved[1:]
            if not problem.workload.cuda_graphs and problem.model.num_experts
        ]
        return (*resolved[:1], *without_graphs)
    fastest_s = _fastest_s(
        before, best
    )  # by the cost model in both cases, because rows may be calibrated
    chosen: TrainingProblem | None = None
    for values in _knob_values(query, before):
        problem = _problem_with(query, values, before=before)
        if (
            problem is not None
            and (step_s := _fastest_s(problem, best)) < MAX_STEP_RATIO * fastest_s
        ):
            chosen, fastest_s = problem, step_s
    return () if chosen is None else (chosen,)


def has_free_knobs(query: Query, problem: TrainingProblem) -> bool:
    """Return whether the framework and the device support the free settings, and neither the
    query's recipe nor the usual one sets them.
    """
    assert query.training is not None
    workload = problem.workload
    if problem.model.num_experts and usual_problems(problem)[0].usual is not None:
        return False
    supports_graphs = workload.cuda_graphs or has_graphs(
        cluster=problem.cluster, workload=workload, profile=problem.profile
    )
    return bool(supports_graphs) and query.training.recipe is None


def _knob_values(query: Query, problem: TrainingProblem) -> Iterator[dict[str, Any]]:
    """Yield combinations of the free settings as values of `training` by name, fewest first."""
    assert query.training is not None
    workload = problem.workload
    values: dict[str, Any] = {}
    if query.training.cross_entropy is None and workload.cross_entropy is None:
        values["cross_entropy"] = "fused"
        yield dict(values)
    can_overlap = bool(problem.model.num_experts) and workload.overlap is None
    if can_overlap:
        yield values | {"overlap": OverlapSpec(**HIDDEN_OVERLAPS)}
    if problem.recorded is not None:  # the query leaves graphs open
        values["cuda_graphs"] = True
        yield dict(values)
        if can_overlap:
            yield values | {"overlap": OverlapSpec(**HIDDEN_OVERLAPS)}


def _problem_with(
    query: Query, values: Mapping[str, Any], *, before: TrainingProblem
) -> TrainingProblem | None:
    assert query.training is not None
    training = replace(query.training, **values)
    try:
        problem = resolve_training(replace(query, training=training))
    except InputError:  # not supported by the framework, the model or the device
        return None
    paths = {
        f"training.{name}": HIDDEN_OVERLAPS if name == "overlap" else value
        for name, value in values.items()
    }
    asked = None if before.asked is None else replace(query, training=training)
    return replace(
        problem.with_num_gpus(before.cluster.num_gpus),
        asked=asked,
        assumed={**before.assumed, **problem.assumed, **paths},
        chosen={**before.chosen, **paths},
    )


def _fastest_s(problem: TrainingProblem, best: Best) -> float:
    """Return the shortest step time of the NUM_LAYOUTS best layouts under the problem, in seconds;
    infinity if none of them is legal and fits.
    """
    firsts = np.sort(np.unique(best.layout, return_index=True)[1])
    beaten = best.variant[: firsts[NUM_LAYOUTS]] if len(firsts) > NUM_LAYOUTS else best.variant
    rows = best.rows.candidates.take(np.flatnonzero(np.isin(beaten, best.bases)))
    rows = rows.take(np.flatnonzero(legality(case=problem, candidates=rows) == 0))
    if not len(rows):
        return np.inf
    costs = problem.costs(rows)
    return float(np.min(np.where(costs.feasible, costs.step_s, np.inf)))
