"""Build the table of a training search from its query.

It has the fastest candidates, and the best of each kind.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from functools import partial
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from hp_tool.cluster.launchers import check_known
from hp_tool.cluster.trainers.command import (
    check_trainer,
    check_varied,
    fix_other_axes,
    program_name,
    trainer_of,
    unset_settings,
    uses_axis,
)
from hp_tool.cost.candidates import MOE_ACT, PER_OP, Candidates
from hp_tool.domain.digests import problem_digest
from hp_tool.domain.hardware import ClusterSpec, GpuSpec
from hp_tool.domain.measurement import Hardware
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.profiling import unsupported_layout, unsupported_sizes, unsupported_training
from hp_tool.domain.query import Query, Reducible
from hp_tool.domain.records import JsonObject
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import prior_for
from hp_tool.loop.learning.series import series_of
from hp_tool.loop.search.problem import SearchProblem
from hp_tool.loop.search.table import candidate_table
from hp_tool.loop.tuning.clusters import ENDPOINT, LOCAL, check_profiled, launcher_name
from hp_tool.loop.tuning.reductions import Reducer, fewest_gpus
from hp_tool.loop.tuning.training_result import TuningProblem, baseline_config
from hp_tool.questions.configuration import NUM_GPUS, with_value
from hp_tool.questions.schema import set_paths
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.problem import TrainingProblem, resolve_training
from hp_tool.questions.training.ranking.best import Best, search_best
from hp_tool.questions.training.ranking.choice import choose_rows
from hp_tool.questions.training.ranking.rank import CostedRows, CostedSpace, cost_space
from hp_tool.questions.training.ranking.recommend import best_offloaded, fewest_devices
from hp_tool.questions.training.usual_settings import usual_problems

MAX_ROWS = 4096
"""Maximum number of candidates in the residual model. Larger spaces are represented by their
fastest candidates and the best of each kind.
"""
_MEMORY_DOUBT = 1.25
"""Multiple of the capacity up to which candidates are kept, because a calibration may show that
they fit.
"""


def resolve_training_search(query: Query) -> TrainingProblem:
    """Return the query's problem if actual runs can search it.

    Called before a search is stored and when it starts.

    Raises:
        InputError: See `resolve_training`; or the launcher is unknown.
        UnsupportedError: Runs do not support the query.
    """
    problem = resolve_training(query)
    baseline_config(query, problem)
    check_known(launcher_name(query))
    if launcher_name(query) == ENDPOINT:
        raise InputError(
            "endpoints support only inference queries; set kind: inference",
            field="search.launcher",
        )
    if (trainer := trainer_of(query)) is not None:
        check_trainer(trainer)
        for name in query.search.of_profiler:
            raise UnsupportedError(
                f"search.{name} is for the built-in profiler only. Remove it, or remove `trainer`.",
                field=f"search.{name}",
            )
        parallel = fix_other_axes(
            problem.parallel, trainer=trainer, framework=problem.workload.framework
        )
        problem = replace(problem, parallel=parallel)
        varied = trainer.axes is None or "moe_token_dispatcher_type" in trainer.axes
        return (
            problem
            if varied and uses_axis(trainer, "moe_token_dispatcher_type")
            else _with_one_dispatcher(problem)
        )
    check_profiled(problem.cluster.gpu)
    layout = unsupported_layout(problem.cluster, problem.strategy)
    for field, what in (
        *unsupported_training(
            model=problem.model, training=problem.workload, gpu=problem.cluster.gpu.name
        ),
        *layout,
    ):
        raise UnsupportedError(
            f"profile runs do not cover {what}; use `hp-tool recommend`", field=field
        )
    return problem


def _with_one_dispatcher(problem: TrainingProblem) -> TrainingProblem:
    """Return the problem with the default dispatcher.

    This applies if the query names no dispatcher and the command does not set one.
    """
    if not problem.model.num_experts or problem.parallel.moe_token_dispatcher_type is not None:
        return problem
    parallel = replace(
        problem.parallel, moe_token_dispatcher_type=problem.strategy.moe_token_dispatcher_type
    )
    return replace(problem, parallel=parallel)


def build_problem(
    *,
    query: Query,
    query_json: JsonObject,
    hardware: Hardware,
    calibrations: Calibrations | None = None,
    chosen: Mapping[str, Any] | None = None,
) -> TuningProblem | CostedSpace:
    """Resolve the query, and enumerate and cost its candidates.

    If no candidate can fit in memory, return only the space.

    With the objective min_gpus, use the smallest number of devices that suffices according to
    `calibrations`. If runs show that it does not suffice, the answer says so and the next search
    uses more.

    Args:
        chosen: Settings of the search's earlier runs other than layouts. None uses those of its
            ranking.
        hardware: The launcher's hardware.

    Raises:
        InputError: `hardware` differs from the query's (`launcher_mismatch`).
    """
    problem = resolve_training_search(query)
    check_gpu(problem.cluster, hardware)
    trainer = trainer_of(query)
    values, problem, best, unrun = _with_shared_values(
        query, problem=problem, calibrations=calibrations, chosen=chosen
    )
    space = _with_best(cost_space(problem=problem), best)
    if trainer is None:
        space = _profiled(space, problem)
    space = _runnable(space, problem, query=query, hardware=hardware)
    rows = _rows(
        space,
        capacity_bytes=problem.cluster.gpu.memory_bytes
        * (1.0 - problem.constraints.memory_headroom_fraction),
    )
    if len(rows) == 0:
        return space
    candidates = space.candidates.take(rows)
    if trainer is not None:
        check_varied(trainer, candidates)
    costs = problem.costs(candidates)
    table = candidate_table(case=problem, candidates=candidates, costs=costs)
    series = series_of(problem, hardware=hardware)
    if trainer is not None:  # Measurements of other programs are stored separately.
        series = replace(series, cluster_key=f"{series.cluster_key}/{program_name(trainer)}")
    # Processes share the cores of a host, unlike devices.
    shared = problem.cluster.gpu.kind == "cpu" and hardware.num_gpus >= problem.cluster.num_gpus
    reducer = Reducer(
        problem=problem,
        available_gpus=_reduced_gpus(query, problem.cluster, hardware),
        cores=hardware.num_gpus / hardware.oversubscription if shared else math.inf,
        kinds=_reducible(query),
    )
    search = SearchProblem(
        query=set_paths(deepcopy(query_json), values),
        chosen=problem.chosen,
        model=problem.model,
        cluster=problem.cluster,
        training=problem.workload,
        strategy=problem.strategy,
        settings=query.search,
        baseline=baseline_config(query, problem),
        candidates=candidates,
        table=table,
        cluster_key=series.cluster_key,
        assumed_startup_s=assumed_startup_s(query, gpu=problem.cluster.gpu),
        problem_digest=problem_digest(
            model=problem.model, cluster=problem.cluster, training=problem.workload, trainer=trainer
        ),
        reduce=reducer if reducer.kinds else None,
    )
    prior = prior_for(kind=problem.cluster.gpu.kind)
    return TuningProblem(
        query=query,
        training=problem,
        space=space,
        search=search,
        prior=prior,
        series=series,
        unrun=unrun,
    )


def _with_shared_values(
    query: Query,
    *,
    problem: TrainingProblem,
    calibrations: Calibrations | None,
    chosen: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], TrainingProblem, Best, tuple[TrainingProblem, ...]]:
    """Choose the settings that all runs share, in addition to the query's.

    Uncalibrated searches have the usual settings if runs support them, as rankings do. `chosen` are
    the values of the search's earlier runs; None if there are none.

    Returns:
        The shared values by path; the problem with them; its ranking; and the problems with usual
        settings that `recommend` assumes but the runs do not have.
    """
    predictor = None if calibrations is None else calibrations(problem)
    assuming = replace(problem, asked=query if predictor is None else None)
    usual = tuple(each for each in usual_problems(assuming) if each.usual and each.usual.set)

    def on_fewest_gpus(problem: TrainingProblem) -> TrainingProblem:
        if query.objective != "min_gpus":
            return problem
        return fewest_devices(problem=problem, keep=1, predictor=predictor)[0]

    best: Best | None = None
    if chosen is not None:
        values = {path: value for path, value in chosen.items() if path != NUM_GPUS}
        problem = on_fewest_gpus(assuming if RECIPE in values else problem)
    else:
        runs = partial(_runs, query=query)
        plain, values = problem, {}
        if usual:
            problem = on_fewest_gpus(assuming)
            values, _ = chosen_beside(problem, query=query, runs=runs)
        if RECIPE not in values:
            problem = on_fewest_gpus(plain)
            values, best = chosen_beside(problem, query=query, runs=runs)
    if values:
        problem, best = (
            resolved_with(values, query=query, problem=problem, resolve=resolve_training_search),
            None,
        )
    best = best or search_best(problem, keep=SHOWN, rank_by=query.rank_by)
    return values, problem, best, () if RECIPE in values else usual


def _runs(problem: TrainingProblem, parallel: ParallelConfig, *, query: Query) -> bool:
    """Return True if runs support the configuration and the baseline is legal in the problem.

    For a trainer, its command must be able to set the entire configuration.
    """
    try:
        baseline_config(query, problem)
    except InputError:
        return False
    if (trainer := trainer_of(query)) is not None:
        return not unset_settings(trainer, problem=problem, parallel=parallel)
    if any(
        unsupported_training(
            model=problem.model, training=problem.workload, gpu=problem.cluster.gpu.name
        )
    ):
        return False
    return not _unprofiled(Candidates.from_configs([parallel]), problem).any()


def _with_best(space: CostedSpace, best: Best) -> CostedSpace:
    """Extend the space by what `recommend` would add: other recomputation and sharding."""
    shown = choose_rows(best, count=SHOWN).best
    own = np.flatnonzero(shown.variant == 0)
    known = set(_configurations(space.candidates))
    own_rows = _configurations(shown.rows.candidates.take(own))
    new = [row for row, one in zip(own.tolist(), own_rows, strict=True) if one not in known]
    if not new:
        return space
    rows = CostedRows.concatenate(
        [space.take(np.arange(len(space.candidates))), shown.rows.take(np.array(new))]
    )
    return CostedSpace(
        **rows.columns(),
        legal=space.legal + len(new),
        feasible=space.feasible + len(new),
        rejections=space.rejections,
    )


def _configurations(candidates: Candidates) -> Iterator[tuple[int, ...]]:
    return zip(*(getattr(candidates, f.name).tolist() for f in fields(Candidates)), strict=True)


def assumed_startup_s(query: Query, *, gpu: GpuSpec) -> float:
    """Return the assumed time from a job's start to its first step, in seconds.

    It is used without measurements on the cluster.
    """
    here = launcher_name(query) == LOCAL and gpu.kind == "cpu"
    return assumed().search.local_startup_s if here else assumed().search.cluster_startup_s


def check_gpu(cluster: ClusterSpec, hardware: Hardware) -> None:
    """Check that the launcher has the query's devices.

    Raises:
        InputError: They differ (`launcher_mismatch`).
    """
    if hardware.gpu != cluster.gpu.name:
        raise InputError(
            f"the launcher runs on {hardware.gpu}, but the query's cluster has "
            f"{cluster.gpu.name}; use a launcher for that cluster, or `hp-tool recommend`",
            field="search.launcher",
            code="launcher_mismatch",
        )


def _reduced_gpus(query: Query, cluster: ClusterSpec, hardware: Hardware) -> int:
    """Return the maximum number of devices of a reduced run.

    A single host cannot show effects between nodes.
    """
    return (
        min(hardware.num_gpus, cluster.gpus_per_node)
        if launcher_name(query) == LOCAL
        else hardware.num_gpus
    )


def _runnable(
    space: CostedSpace, problem: TrainingProblem, *, query: Query, hardware: Hardware
) -> CostedSpace:
    """Return the candidates for which the launcher has enough devices.

    They must suffice for the complete run or for the smallest reduced run.

    Raises:
        InputError: There are no such candidates (`launcher_mismatch`).
    """
    available_gpus = hardware.num_gpus
    if available_gpus >= problem.cluster.num_gpus or len(space.candidates) == 0:
        return space
    needed = np.full(len(space.candidates), problem.cluster.num_gpus)
    if "replicas" in _reducible(query):
        available_gpus = _reduced_gpus(query, problem.cluster, hardware)
        needed = fewest_gpus(space.candidates, problem=problem)
    if needed.min() > available_gpus:
        raise InputError(
            f"the launcher has at most {available_gpus} x {problem.cluster.gpu.name} per job, but "
            f"the query needs at least {int(needed.min())} of its {problem.cluster.num_gpus}; "
            "lower cluster.num_gpus, or use `hp-tool recommend`",
            field="cluster.num_gpus",
            code="launcher_mismatch",
        )
    return _without_candidates(space, needed > available_gpus)


def _reducible(query: Query) -> tuple[Reducible, ...]:
    """Return the reductions that a run may use.

    For a trainer, these are the ones that its command declares.
    """
    if query.search.fidelity == "full":
        return ()
    trainer = trainer_of(query)
    return get_args(Reducible) if trainer is None else trainer.reducible


def _profiled(space: CostedSpace, problem: TrainingProblem) -> CostedSpace:
    """Return the candidates that the profiler supports. The others count as rejected."""
    return _without_candidates(space, _unprofiled(space.candidates, problem))


def _unprofiled(candidates: Candidates, problem: TrainingProblem) -> NDArray[np.bool_]:
    """Return a mask of the candidates that the profiler does not support, shape (n,)."""
    refused = np.zeros(len(candidates), dtype=np.bool_)
    rules = unsupported_sizes(
        candidates,
        model=problem.model,
        training=problem.workload,
        gpu=problem.cluster.gpu.name,
        communication=problem.strategy.context_parallel_communication,
    )
    for unsupported, _ in rules:
        refused |= unsupported
    # Only torchtitan has per-operation recomputation. Megatron recomputes moe_act only in
    # Transformer Engine's grouped matmuls.
    if problem.workload.framework == "megatron-core":
        unrun = PER_OP | MOE_ACT if problem.cluster.gpu.kind == "cpu" else PER_OP
        refused |= (candidates.recompute_modules & unrun) != 0
    return refused


def _without_candidates(space: CostedSpace, refused: NDArray[np.bool_]) -> CostedSpace:
    """Return the space without the refused candidates, which count as not profiled."""
    if not refused.any():
        return space
    rows = np.flatnonzero(~refused)
    before = space.rejections.get("not_profiled", 0)
    return CostedSpace(
        **space.take(rows).columns(),
        legal=len(rows),
        feasible=int(np.count_nonzero(space.acceptable[rows])),
        rejections={**space.rejections, "not_profiled": before + int(np.count_nonzero(refused))},
    )


def _rows(space: CostedSpace, *, capacity_bytes: float) -> NDArray[np.intp]:
    """Return the indices of the candidates to search.

    These are the fastest, and the fastest for each (t, p, SP, recomputation).
    """
    possible = np.flatnonzero(space.memory_total_bytes <= _MEMORY_DOUBT * capacity_bytes)
    order = possible[np.lexsort((space.memory_total_bytes[possible], space.step_s[possible]))]
    if len(order) <= MAX_ROWS:
        return np.sort(order)
    columns = (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "sequence_parallel",
        "recompute_method",
    )
    kinds = np.stack([getattr(space.candidates, name)[order] for name in columns], axis=1)
    _, first = np.unique(
        kinds, axis=0, return_index=True
    )  # The first of each kind in order of speed.
    return np.unique(np.concatenate([order[:MAX_ROWS], order[first]]))


OFFLOAD, EXCHANGE = "training.offload", "parallel.context_parallel_communication"
RECIPE = "training.recipe"
SHOWN = 32
"""Number of layouts in `recommend`'s answer that a search considers."""
Runs = Callable[[TrainingProblem, ParallelConfig], bool]
"""Return True if a search can run a configuration unchanged."""


def chosen_beside(
    problem: TrainingProblem, *, query: Query, runs: Runs
) -> tuple[dict[str, Any], Best]:
    """Return the query values of the ranking's first row that can run, by path, and the ranking.

    Levels of a2a+p2p are the defaults, because a ranking's levels apply to one size and a search
    tries several.
    """
    plain = search_best(problem, keep=SHOWN, rank_by=query.rank_by)
    best = plain if plain.feasible else best_offloaded(query, plain, keep=SHOWN, calibrations=None)
    shown = choose_rows(best, count=SHOWN).best
    for row, variant in enumerate(shown.variant.tolist()):
        its = shown.problems[variant]
        config = its.with_common_settings(shown.rows.candidates.config(row))
        if runs(its, config):
            exchange = config.context_parallel_communication
            differs = (
                config.context_parallel_size > 1
                and exchange != query.parallel.context_parallel_communication
            )
            values = {path: value for path, value in its.chosen.items() if path == OFFLOAD}
            if its.usual is not None:
                values |= its.usual.set
            return values | ({EXCHANGE: exchange} if differs else {}), plain
    return {}, plain


def resolved_with(
    values: Mapping[str, Any],
    *,
    query: Query,
    problem: TrainingProblem,
    resolve: Callable[[Query], TrainingProblem],
) -> TrainingProblem:
    """Resolve the query with these values, on as many devices as `problem` has."""
    ranked = {
        path: value
        for path, value in values.items()
        if path == EXCHANGE or (path == OFFLOAD and value != "none")
    }
    for path, value in ranked.items():
        query = with_value(query, path, value)
    chosen = resolve(query).with_num_gpus(problem.cluster.num_gpus).choosing(values)
    assumed = {path: value for path, value in ranked.items() if path == OFFLOAD}
    chosen = replace(chosen, assumed={**problem.assumed, **chosen.assumed, **assumed})
    if values.keys() == ranked.keys():
        return chosen
    for each in usual_problems(replace(chosen, asked=query)):
        if each.usual is not None and {**each.usual.set, **ranked} == values:
            return each
    raise InputError(
        f"This search's earlier runs used settings that are no longer supported: {dict(values)}. "
        "Start a new search.",
        field="search",
    )
