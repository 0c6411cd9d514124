"""Settings besides the layout that a search adopts from a ranking for all of its runs.

These are offload, if nothing fits without it, and the context exchange.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.query import Query
from hp_tool.questions.configuration import with_value
from hp_tool.questions.training.problem import TrainingProblem
from hp_tool.questions.training.ranking.best import Best, search_best
from hp_tool.questions.training.ranking.choice import choose_rows
from hp_tool.questions.training.ranking.recommend import best_offloaded

OFFLOAD, EXCHANGE = "training.offload", "parallel.context_parallel_communication"
SHOWN = 32
"""Number of layouts of `recommend`'s answer that a search considers."""
Runs = Callable[[TrainingProblem, ParallelConfig], bool]
"""Returns whether a search can run a configuration unchanged."""


def chosen_beside(
    problem: TrainingProblem, *, query: Query, runs: Runs
) -> tuple[dict[str, Any], Best]:
    """Return the query values, by path, of the first row of its ranking that can run, and the
    ranking.

    Levels of a2a+p2p are the defaults, because a ranking's levels apply to one size and a search
    tries several.
    """
    plain = search_best(problem, keep=SHOWN, rank_by=query.rank_by)
    best = plain if plain.feasible else best_offloaded(query, plain, keep=SHOWN, calibrations=None)
    shown = choose_rows(best, count=SHOWN).best
    for row, variant in enumerate(shown.variant.tolist()):
        its = shown.problems[variant]
        config = its.named(shown.rows.candidates.config(row))
        if runs(its, config):
            exchange = config.context_parallel_communication
            differs = (
                config.context_parallel_size > 1
                and exchange != query.parallel.context_parallel_communication
            )
            offload = {path: value for path, value in its.chosen.items() if path == OFFLOAD}
            return offload | ({EXCHANGE: exchange} if differs else {}), plain
    return {}, plain


def resolved_with(
    values: Mapping[str, Any],
    *,
    query: Query,
    problem: TrainingProblem,
    resolve: Callable[[Query], TrainingProblem],
) -> TrainingProblem:
    """Return the query's problem with these values, on the same number of devices as `problem`."""
    for path, value in values.items():
        query = with_value(query, path, value)
    chosen = resolve(query).with_num_gpus(problem.cluster.num_gpus).choosing(values)
    assumed = {path: value for path, value in values.items() if path == OFFLOAD}
    return replace(chosen, assumed={**problem.assumed, **chosen.assumed, **assumed})
