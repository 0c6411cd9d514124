"""Build the table of a serving search from its query: replicas of each size and batch limit."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np

from hp_tool.cluster.launchers import check_known
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.legality import rejection_counts
from hp_tool.domain.digests import json_digest
from hp_tool.domain.inference import InferenceWorkload, TraceSpec
from hp_tool.domain.measurement import Hardware, Runner
from hp_tool.domain.parallel import axis_values
from hp_tool.domain.profiling import unsupported_serving, unsupported_serving_sizes
from hp_tool.domain.query import Query
from hp_tool.domain.records import JsonObject
from hp_tool.domain.serving import ServingConfig
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.loop.calibration import prior_for
from hp_tool.loop.learning.series import Series, cluster_key, model_family
from hp_tool.loop.search.serving import TARGETS, EndpointSearch, ServingSearch
from hp_tool.loop.tuning.clusters import ENDPOINT, check_profiled, launcher_name
from hp_tool.loop.tuning.problem import assumed_startup_s, check_gpu
from hp_tool.loop.tuning.serving_result import ServingTuning, baseline_config
from hp_tool.loop.tuning.serving_table import (
    in_flight_of,
    legality_codes,
    serving_candidates,
    serving_table,
)
from hp_tool.questions.serving.estimates import QUANTILES
from hp_tool.questions.serving.problem import (
    CostedRows,
    ServingProblem,
    resolve_serving,
    resolve_workload,
)
from hp_tool.questions.serving.replay import arrivals_s

_MEASURED_OBJECTIVES = (None, "throughput_per_gpu", "cost")
"""Objectives optimised by the shortest repetition of a closed load on given devices. Other
objectives can be recommended, but not searched.
"""
HOPELESS = 100.0
"""Maximum ratio of a requested rate to the predicted maximum. Constants without measurements are
off by at most a factor of 16.
"""
STARTS: dict[Runner, int] = {"megatron-core": 1, "vllm": 2, ENDPOINT: 1}
"""Number of engine starts per run. vLLM starts once for a single token and once for all tokens."""
_AXES: dict[Runner, tuple[str, ...]] = {
    "megatron-core": ("tensor_parallel_size", "max_num_seqs"),
    "vllm": ("tensor_parallel_size", "max_num_seqs"),
    ENDPOINT: ("max_num_seqs",),
}
"""Axes that runs can vary. For an endpoint, this is only the number of concurrent requests."""


def resolve_serving_search(query: Query) -> ServingProblem:
    """Return the query's problem if actual runs can search it.

    Called before a search is stored and when it starts.
    """
    problem = resolve_serving(query)
    check_known(launcher_name(query))
    check_profiled(problem.cluster.gpu)
    assert query.inference is not None  # Resolved.
    baseline_config(query, problem)
    if query.trainer is not None:
        raise InputError("trainer is for training queries only; remove it", field="trainer")
    for name in query.search.of_profiler:
        raise InputError(
            f"search.{name} is for training queries only; remove it", field=f"search.{name}"
        )
    if query.objective not in _MEASURED_OBJECTIVES:
        raise UnsupportedError(
            f"Searches do not support objective {query.objective}. Set a target for it, or use "
            "`hp-tool recommend`.",
            field="objective",
        )
    runner = runner_of(query)
    for name, _, quantile, _ in problem.targets.limits():
        if quantile is not None and runner != ENDPOINT:
            raise UnsupportedError(
                f"Runs measure mean latencies only, not {name}; set {' or '.join(TARGETS)}",
                field=f"targets.{name}",
            )
        if quantile not in (None, *QUANTILES):
            kept = ", ".join(QUANTILES)
            raise UnsupportedError(
                f"runs record only the latency quantiles {kept}, not {quantile}; use one of these",
                field=f"targets.{name}",
            )
    for name in ServingConfig.__slots__:
        value = getattr(query.parallel, name)
        several = isinstance(value, tuple) and len(value) > 1
        fixed = (
            runner != ENDPOINT and value not in (None, 0, 1, (1,)) and not name.startswith("max_")
        )
        if name not in _AXES[runner] and (several or fixed):
            axes = " and ".join(_AXES[runner])
            advice = (
                "set the value that the server was started with"
                if runner == ENDPOINT
                else "remove it"
            )
            raise UnsupportedError(
                f"runs vary {axes}, not {name}; {advice}", field=f"parallel.{name}"
            )
    if (
        runner == ENDPOINT
        and query.parallel.tensor_parallel_size is None
        and problem.cluster.num_gpus > 1
    ):
        raise InputError(
            "Describe how the endpoint was started: set parallel.tensor_parallel_size, and every "
            "other size that is not 1.",
            field="parallel.tensor_parallel_size",
            code="missing_field",
        )
    for field, what in unsupported_serving(
        model=problem.model, inference=_load(query, problem), runner=runner
    ):
        raise UnsupportedError(
            f"inference runs do not cover {what}; use `hp-tool recommend`", field=field
        )
    return problem


def runner_of(query: Query) -> Runner:
    """Return the serving software of the query's engine, or that of the running server."""
    assert query.inference is not None
    if launcher_name(query) == ENDPOINT:
        return ENDPOINT
    engine = query.inference.engine
    runners: tuple[Runner, ...] = tuple(each for each in get_args(Runner) if each != ENDPOINT)
    if engine not in runners:
        raise UnsupportedError(
            f"no profile runs with engine {engine}; choose {' or '.join(runners)}, or use `hp-tool "
            "recommend`",
            field="inference.engine",
        )
    return runners[runners.index(engine)]


def build_serving(*, query: Query, query_json: JsonObject, hardware: Hardware) -> ServingTuning:
    """Resolve the query, and enumerate and cost its candidates.

    Raises:
        InputError: `hardware` differs from the query's (`launcher_mismatch`).
    """
    problem = resolve_serving_search(query)
    check_gpu(problem.cluster, hardware)
    assert query.inference is not None  # Resolved.
    runner = runner_of(query)
    if runner == ENDPOINT:
        candidates, rejections = _endpoint_candidates(query, problem)
    else:
        candidates, rejections = _candidates(query, problem, available_gpus=hardware.num_gpus)
    rows = problem.cost_candidates(candidates)
    costs, load = rows.costs, _load(query, problem)
    if runner == ENDPOINT:
        _check_rate(problem, rows)
    common: dict[str, Any] = {
        "query": query_json,
        "model": problem.model,
        "cluster": problem.cluster,
        "settings": query.search,
        "baseline": baseline_config(query, problem),
        "candidates": candidates,
        "table": serving_table(rows),
        "cluster_key": cluster_key(problem.cluster, hardware),
        "assumed_startup_s": assumed_startup_s(query, gpu=problem.cluster.gpu) * STARTS[runner],
        "problem_digest": json_digest({**query_json, "id": None, "search": None}),
        "inference": load,
        "targets": problem.targets,
        "runner": runner,
    }
    if runner == ENDPOINT:
        search: ServingSearch = EndpointSearch(
            **common, in_flight=float(in_flight_of(rows).max()), trace=_sent(problem)
        )
    else:
        search = ServingSearch(**common)
    series = Series(
        cluster_key=search.cluster_key,
        framework=search.framework,
        model_family=model_family(problem.model),
    )
    prior = prior_for(kind=problem.cluster.gpu.kind)
    return ServingTuning(
        query=query,
        problem=problem,
        search=search,
        costs=costs,
        prior=prior,
        series=series,
        rejections=rejections,
    )


def _load(query: Query, problem: ServingProblem) -> InferenceWorkload:
    """Return the query's load, with the mean lengths and the rate of its trace."""
    workload = resolve_workload(query)
    lengths = {
        name: getattr(problem, name)
        for name in ("input_length", "output_length", "prefix_cache_hit_rate")
    }
    rate = problem.request_rate_per_second or workload.request_rate_per_second
    return replace(workload, trace=None, request_rate_per_second=rate, **lengths)


def _sent(problem: ServingProblem) -> TraceSpec | None:
    """Return the trace's requests at the problem's rate, as sent by a run.

    Return None if all requests have the same length.
    """
    if problem.trace is None:
        return None
    return replace(problem.trace, arrival_s=arrivals_s(problem)).spec()


def _check_rate(problem: ServingProblem, rows: CostedRows) -> None:
    """Check that the rate is feasible.

    Raises:
        InputError: The rate exceeds the throughput of full batches by more than any model error
            (`overloaded`).
    """
    rate, gpus = problem.request_rate_per_second, problem.cluster.num_gpus
    most = float(rows.costs.output_tokens_per_second_per_gpu.max()) * gpus / problem.output_length
    if rate is not None and rate > HOPELESS * most:
        raise InputError(
            f"{rate:g} requests per second exceed the predicted maximum of {most:.3g} for this "
            "deployment; set a lower rate",
            field="inference.request_rate_per_second",
            code="overloaded",
        )


def _candidates(
    query: Query, problem: ServingProblem, *, available_gpus: int
) -> tuple[ServingCandidates, dict[str, int]]:
    """Return the deployments to search, and the number of rejected ones by reason.

    The load can fill their replicas, engines accept them, and the launcher has enough devices.
    """
    inference = query.inference
    assert inference is not None and problem.concurrency is not None
    num_gpus, load, allowed = problem.cluster.num_gpus, problem.concurrency, query.parallel
    sizes = axis_values(allowed.tensor_parallel_size) or tuple(
        k for k in range(1, num_gpus + 1) if num_gpus % k == 0
    )
    batches = axis_values(allowed.max_num_seqs) or tuple(1 << k for k in range(load.bit_length()))
    tokens = axis_values(allowed.max_num_batched_tokens) or (problem.engine.max_num_batched_tokens,)
    configs = [
        ServingConfig(
            tensor_parallel_size=t,
            data_parallel_size=num_gpus // t,
            max_num_seqs=b,
            max_num_batched_tokens=tokens[0],
        )
        for t in dict.fromkeys(sizes)
        for b in sorted({min(b, max(-(-load * t // num_gpus), 1)) for b in batches})
        if num_gpus % t == 0
    ]
    candidates = serving_candidates(problem, configs)
    codes = legality_codes(problem, candidates)
    rejections = rejection_counts(codes)

    def is_run(config: ServingConfig) -> bool:
        replica, batch = (
            replace(config, data_parallel_size=1),
            replace(inference, concurrency=config.max_num_seqs),
        )
        unserved_here = unsupported_serving_sizes(
            model=problem.model, inference=batch, parallel=replica
        )
        return config.tensor_parallel_size <= available_gpus and not list(unserved_here)

    legal = np.flatnonzero(codes == 0)
    kept = np.array([row for row in legal if is_run(configs[row])], dtype=np.intp)
    if len(kept) < len(legal):
        rejections["not_profiled"] = rejections.get("not_profiled", 0) + len(legal) - len(kept)
    if not len(kept):
        raise InputError(
            f"No configuration can run here (rejected: {rejections}). Try other values of "
            "parallel.tensor_parallel_size.",
            field="parallel",
            code="launcher_mismatch",
        )
    return candidates.take(kept), rejections


def _endpoint_candidates(
    query: Query, problem: ServingProblem
) -> tuple[ServingCandidates, dict[str, int]]:
    """Return the endpoint's deployment for each number of concurrent requests per scheduler."""
    num_gpus, allowed = problem.cluster.num_gpus, query.parallel
    sizes = {name: axis_values(getattr(allowed, name)) for name in ServingConfig.__slots__}
    fixed: dict[str, Any] = {name: values[0] for name, values in sizes.items() if values}
    stages = fixed.get("tensor_parallel_size", 1) * fixed.get("pipeline_parallel_size", 1)
    fixed = {"max_num_batched_tokens": problem.engine.max_num_batched_tokens} | fixed
    fixed["data_parallel_size"] = max(num_gpus // stages, 1)
    batches = axis_values(allowed.max_num_seqs) or (problem.engine.max_num_seqs,)
    configs = [ServingConfig(**{**fixed, "max_num_seqs": batch}) for batch in sorted({*batches})]
    candidates = serving_candidates(problem, configs)
    codes = legality_codes(problem, candidates)
    if rejections := rejection_counts(codes):
        raise InputError(
            f"The endpoint's deployment of {problem.model.name} cannot run on {num_gpus} "
            f"devices: {rejections}. Check `parallel`.",
            field="parallel",
        )
    return candidates, {}
