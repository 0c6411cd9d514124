"""From an inference query to the table a search works on: replicas of each size with each batch they may serve at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np

from hp_tool.calibration import Prior, prior_for
from hp_tool.cost.candidates import Candidates
from hp_tool.cost.serving.candidates import ServingCandidates
from hp_tool.cost.serving.engine import ServingCosts
from hp_tool.cost.serving.legality import legality, rejection_counts
from hp_tool.domain.digests import json_digest
from hp_tool.domain.measurement import Hardware, Runner
from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.profiling import unserved, unserved_sizes
from hp_tool.domain.query import Query
from hp_tool.domain.records import JsonObject
from hp_tool.domain.serving import ServingConfig
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.launchers import check_known
from hp_tool.learning.series import Series, cluster_key, model_family
from hp_tool.search.serving import TARGETS, Load, ServingSearch, charge, deployment, software
from hp_tool.search.table import CandidateTable
from hp_tool.serving.problem import ServingProblem, resolve_serving
from hp_tool.tuning.clusters import launcher_name
from hp_tool.tuning.problem import check_gpu

_MEASURED_OBJECTIVES = (None, "throughput_per_gpu", "cost")
"""What the shortest round of a closed load on given devices serves; the others are recommended, not searched."""
_AXES = ("tensor_parallel_size", "max_num_seqs")
"""What runs can vary."""


@dataclass(frozen=True, kw_only=True)
class ServingTuning:
    """A serving search's question at both levels: what the cost model takes, and what the search works on."""

    query: Query
    problem: ServingProblem
    search: ServingSearch
    costs: ServingCosts
    """Row by row those of the table."""
    prior: Prior
    series: Series
    rejections: dict[str, int]


def resolve_serving_search(query: Query) -> ServingProblem:
    """The query's problem, if real runs can search it at all: asked before a search is stored, and again when it starts."""
    problem = resolve_serving(query)
    check_known(launcher_name(query))
    assert query.inference is not None  # resolved
    if query.trainer is not None:
        raise InputError("trainer belongs to training; leave it out", field="trainer")
    if query.search.breakdown:
        raise InputError("search.breakdown belongs to training; leave it out", field="search.breakdown")
    if query.objective not in _MEASURED_OBJECTIVES:
        raise UnsupportedError(
            f"objective {query.objective} is not searched with real runs; give a target for it, or use `hp-tool recommend`",
            field="objective",
        )
    for name in problem.targets.__slots__:
        if name not in TARGETS and getattr(problem.targets, name) is not None:
            raise UnsupportedError(f"runs show means, no {name}; give {' or '.join(TARGETS)}", field=f"targets.{name}")
    for name in ServingConfig.__slots__:
        value = getattr(query.parallel, name)
        several = isinstance(value, tuple) and len(value) > 1
        if name not in _AXES and (several or (value not in (None, 1, (1,)) and name.endswith("parallel_size"))):
            raise UnsupportedError(f"runs vary {' and '.join(_AXES)}, not {name}; leave it out", field=f"parallel.{name}")
    for field, what in unserved(model=problem.model, inference=query.inference, runner=runner_of(query)):
        raise UnsupportedError(f"inference runs do not cover {what}; use `hp-tool recommend`", field=field)
    return problem


def runner_of(query: Query) -> Runner:
    """The software that serves, named by the engine."""
    assert query.inference is not None
    engine = query.inference.engine
    runners: tuple[Runner, ...] = get_args(Runner)
    if engine not in runners:
        raise UnsupportedError(
            f"no profile runs with engine {engine}; choose {' or '.join(runners)}, or use `hp-tool recommend`",
            field="inference.engine",
        )
    return runners[runners.index(engine)]


def build_serving(*, query: Query, query_json: JsonObject, hardware: Hardware) -> ServingTuning:
    """Resolve, enumerate and cost. Raises InputError `launcher_mismatch` where `hardware` is not what the query asks about."""
    problem = resolve_serving_search(query)
    check_gpu(problem.cluster, hardware)
    assert query.inference is not None and problem.concurrency is not None  # unserved refuses loads without
    configs, rejections = _configurations(query, problem, available_gpus=hardware.num_gpus)
    budget = batched_tokens(query, problem)
    table, costs = serving_table(problem, configs, max_num_batched_tokens=budget)
    runner = runner_of(query)
    series = Series(
        cluster_key=cluster_key(problem.cluster, hardware),
        framework=software(runner),
        model_family=model_family(problem.model),
    )
    search = ServingSearch(
        query=query_json,
        model=problem.model,
        cluster=problem.cluster,
        settings=query.search,
        candidates=Candidates.from_configs(configs),
        table=table,
        cluster_key=series.cluster_key,
        problem_digest=json_digest({**query_json, "id": None, "search": None}),
        inference=query.inference,
        load=load_of(problem),
        targets=problem.targets,
        max_num_batched_tokens=budget,
        runner=runner,
    )
    prior = prior_for(kind=problem.cluster.gpu.kind)
    return ServingTuning(
        query=query, problem=problem, search=search, costs=costs, prior=prior, series=series, rejections=rejections
    )


def load_of(problem: ServingProblem) -> Load:
    """The closed load that runs stand for."""
    return Load(
        concurrency=problem.concurrency or 1,
        output_length=problem.nouns.output_length,
        num_gpus=problem.cluster.num_gpus,
    )


def serving_table(
    problem: ServingProblem, configs: Sequence[ParallelConfig], *, max_num_batched_tokens: int
) -> tuple[CandidateTable, ServingCosts]:
    """The cost model's word on replicas as runs are stored, in seconds of one round of the load, by part."""
    candidates = serving_candidates(problem, configs, max_num_batched_tokens=max_num_batched_tokens)
    costs = problem.costs(candidates)
    beyond = costs.request_latency_s * charge(costs, targets=problem.targets)
    parts = {**costs.parts, "beyond_targets": beyond}
    nouns, memory = problem.nouns, costs.bytes
    per_replica = np.maximum(candidates.concurrency / candidates.schedulers, 1.0)
    passes = nouns.output_length + np.ceil(costs.running * nouns.input_length / candidates.max_num_batched_tokens)
    held = memory.capacity - memory.kv_capacity
    held = held + costs.running * (nouns.input_length + nouns.output_length) * memory.kv_per_token
    device = problem.cluster.gpu.memory_bytes - memory.overhead
    table = CandidateTable(
        axes={
            "tensor_parallel_size": tuple(candidates.tensor_parallel_size.tolist()),
            "max_num_seqs": tuple(candidates.max_num_seqs.tolist()),
        },
        parts_s=parts,
        layer_passes=per_replica / costs.running * passes * problem.model.num_hidden_layers,
        memory_bytes=held - memory.overhead,
        usable_bytes=memory.capacity - memory.overhead,
        device_bytes=device,
        features=_features(problem, candidates),
    )
    return table, costs


def serving_candidates(
    problem: ServingProblem, configs: Sequence[ParallelConfig], *, max_num_batched_tokens: int
) -> ServingCandidates:
    """Stored replicas as the deployments they stand for."""
    num_gpus = problem.cluster.num_gpus
    whole = [deployment(one, num_gpus=num_gpus, max_num_batched_tokens=max_num_batched_tokens) for one in configs]
    return ServingCandidates.from_configs(whole, concurrency=[problem.concurrency or 1] * len(whole))


def _configurations(
    query: Query, problem: ServingProblem, *, available_gpus: int
) -> tuple[list[ParallelConfig], dict[str, int]]:
    """Replicas that the load can fill, that engines accept, and that fit the launcher; and how many were turned away why."""
    num_gpus, load = problem.cluster.num_gpus, problem.concurrency or 1
    asked = query.parallel
    sizes = _values(asked.tensor_parallel_size) or tuple(k for k in range(1, num_gpus + 1) if num_gpus % k == 0)
    batches = _values(asked.max_num_seqs) or tuple(1 << k for k in range(load.bit_length()))
    every = [
        ParallelConfig(tensor_parallel_size=t, micro_batch_size=b)
        for t in dict.fromkeys(sizes)
        for b in sorted({min(b, max(-(-load * t // num_gpus), 1)) for b in batches})
        if num_gpus % t == 0
    ]
    candidates = serving_candidates(problem, every, max_num_batched_tokens=batched_tokens(query, problem))
    codes = legality(model=problem.model, num_gpus=num_gpus, candidates=candidates)
    rejections = rejection_counts(codes)
    assert query.inference is not None
    kept = []
    for one, code in zip(every, codes.tolist(), strict=True):
        if code:
            continue
        config = ServingConfig(tensor_parallel_size=one.tensor_parallel_size, max_num_seqs=one.micro_batch_size)
        load_of_one = replace(query.inference, concurrency=one.micro_batch_size)
        runs = one.tensor_parallel_size <= available_gpus
        if runs and not list(unserved_sizes(model=problem.model, inference=load_of_one, parallel=config)):
            kept.append(one)
        else:
            rejections["not_profiled"] = rejections.get("not_profiled", 0) + 1
    if not kept:
        raise InputError(
            f"no configuration can be run here (turned away: {rejections}); give other values of parallel.{_AXES[0]}",
            field="parallel",
            code="launcher_mismatch",
        )
    return kept, rejections


def batched_tokens(query: Query, problem: ServingProblem) -> int:
    """Of one forward pass: the query's, or the engine's default."""
    given = _values(query.parallel.max_num_batched_tokens)
    return given[0] if given else problem.engine.max_num_batched_tokens


def _features(problem: ServingProblem, candidates: ServingCandidates) -> dict[str, Any]:
    """What the residual model sees; names and scales are those of training where they mean the same."""
    same = np.ones(len(candidates))
    return {
        "tensor_parallel": np.log2(candidates.tensor_parallel_size),
        "micro_batch": np.log2(candidates.max_num_seqs),
        "devices": same * np.log2(problem.cluster.num_gpus),
        "hidden_size": same * np.log2(problem.model.hidden_size),
        "layers": same * np.log2(problem.model.num_hidden_layers),
    }


def _values(value: int | tuple[int, ...] | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    return value if isinstance(value, tuple) else (value,)
