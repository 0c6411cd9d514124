"""Disaggregated serving: every pair of pools that the devices allow, costed, compared with the targets and ranked."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from hp_tool import bounds
from hp_tool.catalog import cluster as catalogue_cluster
from hp_tool.cost.arrays import FloatArray, IntArray
from hp_tool.cost.serving.candidates import ServingCandidates, ServingCase
from hp_tool.cost.serving.disaggregated import PoolCosts, pool_costs
from hp_tool.cost.serving.legality import legality
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.parallel import axis_values
from hp_tool.domain.query import Query
from hp_tool.domain.serving import PoolConfig, PoolEstimate, PoolRecommendation, ServingConfig
from hp_tool.domain.workload import DisaggregationSpec
from hp_tool.errors import UnsupportedError
from hp_tool.serving.problem import ServingProblem, resolve_serving, serving_case
from hp_tool.units import SECONDS_PER_HOUR

MAX_PAIRS = 2_000_000
_TARGETS = ("ttft_s", "tpot_s", "request_latency_s")


def disaggregated(*, query: Query, top: int = 10) -> tuple[PoolRecommendation, ...]:
    """The best pairs of pools for the query's load, best by its objective first; those that miss a target are left out.

    Decoding takes all devices that prefill leaves, except under objective min_gpus (fewest devices first). With two kinds of
    GPU (cluster.stages) the first prefills and the second decodes.
    """
    assert query.inference is not None
    spec = query.inference.disaggregated or DisaggregationSpec()
    cluster = catalogue_cluster(query.cluster)
    sides = cluster.kinds or (cluster, cluster)
    problem = resolve_serving(dataclasses.replace(query, cluster=_one_kind(query)))
    _refuse_unmodelled(problem)
    cases = [serving_case(model=problem.model, cluster=side, workload=query.inference, engine=problem.engine) for side in sides]
    t_p, t_d, n_p, n_d = _pairs(spec, cases, shared=not cluster.kinds, every=query.objective == "min_gpus")
    if len(t_p) == 0:
        return ()
    costs = pool_costs(
        prefill=cases[0],
        decode=cases[1],
        prefillers=_candidates(t_p, n_p, problem),
        decoders=_candidates(t_d, n_d, problem),
        requests_per_second=problem.request_rate_per_second,
    )
    gpus = t_p * n_p + t_d * n_d
    dollars = _cost_per_million(sides, costs, [t_p * n_p, t_d * n_d])
    acceptable = costs.fits & costs.sustained
    for name in _TARGETS:
        if (limit := getattr(problem.targets, name)) is not None:
            acceptable &= getattr(costs, name) <= limit
    good = np.flatnonzero(acceptable)
    score = _score(query.objective, costs, gpus=gpus, dollars=dollars, by_rate=problem.request_rate_per_second is not None)
    order = good[np.lexsort((gpus[good], score[good]))][:top]
    return tuple(
        PoolRecommendation(
            rank=place + 1,
            prefill=PoolConfig(gpu=sides[0].gpu.name, tensor_parallel_size=int(t_p[row]), replicas=int(n_p[row])),
            decode=PoolConfig(gpu=sides[1].gpu.name, tensor_parallel_size=int(t_d[row]), replicas=int(n_d[row])),
            estimate=_estimate(costs, int(row), gpus=int(gpus[row]), dollars=dollars),
        )
        for place, row in enumerate(order.tolist())
    )


def only_pools(query: Query) -> bool:
    """Whether only separate pools can answer, since no server spans two kinds of GPU."""
    pools = query.inference is not None and query.inference.disaggregated is not None
    return pools and not isinstance(query.cluster, str) and query.cluster.stages is not None


def _one_kind(query: Query) -> str | ClusterQuery:
    """The query's cluster, or of two kinds the first: what else the query says is the same for both."""
    if isinstance(query.cluster, str) or query.cluster.stages is None:
        return query.cluster
    first = query.cluster.stages[0]
    return dataclasses.replace(query.cluster, stages=None, gpu=first.gpu, num_gpus=first.num_gpus)


def _refuse_unmodelled(problem: ServingProblem) -> None:
    for name in problem.targets.__slots__:
        if name not in _TARGETS and getattr(problem.targets, name) is not None:
            raise UnsupportedError(f"pools are modelled in means, no {name}; leave it out", field=f"targets.{name}")
    if problem.model.num_experts:
        raise UnsupportedError(
            "pools are modelled by tensor parallelism alone, which serves no experts well; leave disaggregated out",
            field="inference.disaggregated",
        )


def _pairs(spec: DisaggregationSpec, cases: Sequence[ServingCase], *, shared: bool, every: bool) -> IntArray:
    """(4, n): t_p, t_d, n_p and n_d of replicas of legal sizes that the devices suffice for. `shared`: both pools take theirs
    from the same devices; `every`: also pairs that leave some of them free.
    """
    room = [side.cluster.num_gpus for side in cases]
    prefill_sizes = _legal(cases[0], spec.prefill_tensor_parallel_size)
    decode_sizes = _legal(cases[1], spec.decode_tensor_parallel_size)
    axes = {
        "prefill_tensor_parallel_size": len(prefill_sizes),
        "decode_tensor_parallel_size": len(decode_sizes),
        "prefill_replicas": 1 if spec.prefill_replicas else room[0],
        "decode_replicas": room[1] if every and not spec.decode_replicas else 1,
    }
    axes = {f"inference.disaggregated.{name}": count for name, count in axes.items()}
    bounds.plan(pairs := math.prod(axes.values()), axes=axes, most=MAX_PAIRS)
    rows: list[tuple[int, int, int, int]] = []
    for t_p in prefill_sizes:
        for t_d in decode_sizes:
            for n_p in _replicas(spec.prefill_replicas, room[0] // t_p):
                bounds.check()
                most = (room[1] - (n_p * t_p if shared else 0)) // t_d
                counts = _replicas(spec.decode_replicas, most, fewest=1 if every else max(most, 1))
                rows += [(t_p, t_d, n_p, n_d) for n_d in counts]
    bounds.check(done=pairs)
    return np.array(rows, dtype=np.int64).reshape(-1, 4).T


def _replicas(value: int | None, most: int, *, fewest: int = 1) -> range:
    """The query's one value if it is possible, else all of them."""
    if value is None:
        return range(fewest, most + 1)
    return range(value, value + 1) if value <= most else range(0)


def _legal(case: ServingCase, axis: int | tuple[int, ...] | None) -> list[int]:
    """Tensor-parallel sizes that divide the model: the query's, or powers of two within a domain of fast links."""
    sizes = axis_values(axis) or tuple(1 << k for k in range(case.cluster.nvlink_domain_size.bit_length()))
    legal = []
    for t in sizes:
        if not 1 <= t <= case.cluster.num_gpus:
            continue
        one = ServingCandidates.from_configs([ServingConfig(tensor_parallel_size=t)], concurrency=[1])
        if legality(model=case.model, num_gpus=t, candidates=one)[0] == 0:
            legal.append(t)
    return legal


def _candidates(t: IntArray, replicas: IntArray, problem: ServingProblem) -> ServingCandidates:
    ones = np.ones_like(t)
    return ServingCandidates(
        tensor_parallel_size=t,
        pipeline_parallel_size=ones,
        expert_parallel_size=ones,
        attention_data_parallel_size=ones,
        redundant_experts=np.zeros_like(t),
        data_parallel_size=replicas,
        max_num_seqs=ones * problem.engine.max_num_seqs,
        max_num_batched_tokens=ones * problem.engine.max_num_batched_tokens,
        concurrency=ones * (problem.concurrency or 1),
    )


def _score(objective: str | None, costs: PoolCosts, *, gpus: IntArray, dollars: FloatArray | None, by_rate: bool) -> FloatArray:
    """What to minimise."""
    if objective == "ttft":
        return costs.ttft_s
    if objective == "tpot":
        return costs.tpot_s
    if objective == "min_gpus":
        return gpus.astype(np.float64)
    if objective == "cost" and dollars is not None:
        return dollars
    return costs.request_latency_s if by_rate else -costs.output_tokens_per_second_per_gpu


def _cost_per_million(sides: Sequence[ClusterSpec], costs: PoolCosts, gpus: Sequence[IntArray]) -> FloatArray | None:
    """US dollars by million output tokens, each pool at its own price; None where one has none."""
    first, second = (side.price_per_gpu_hour for side in sides)
    if first is None or second is None:
        return None
    total = (gpus[0] + gpus[1]) * costs.output_tokens_per_second_per_gpu
    spent: FloatArray = (first * gpus[0] + second * gpus[1]) / SECONDS_PER_HOUR / np.maximum(total, 1e-12) * 1e6
    return spent


def _estimate(costs: PoolCosts, row: int, *, gpus: int, dollars: FloatArray | None) -> PoolEstimate:
    figures = {name: float(getattr(costs, name)[row]) for name in PoolEstimate.__slots__ if hasattr(costs, name)}
    price = None if dollars is None else float(dollars[row])
    return PoolEstimate(feasible=True, reasons=(), num_gpus=gpus, **figures, cost_per_million_output_tokens=price)
