"""Disaggregated serving: enumerate, cost and rank pairs of a prefill pool and a decoding pool."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hp_tool.catalog import cluster as catalogue_cluster
from hp_tool.catalog.efficiency import pool_efficiency
from hp_tool.cost.arrays import BoolArray, FloatArray, IntArray
from hp_tool.cost.serving.candidates import ServingCandidates, ServingCase, default_max_num_seqs
from hp_tool.cost.serving.disaggregated import PoolCosts, pool_costs, pool_quantiles
from hp_tool.cost.serving.experts import fewest_redundant
from hp_tool.cost.serving.legality import legality
from hp_tool.cost.serving.load import Quantiles
from hp_tool.domain import bounds
from hp_tool.domain.hardware import ClusterQuery, ClusterSpec
from hp_tool.domain.inference import DisaggregationSpec
from hp_tool.domain.measurement import Tails
from hp_tool.domain.parallel import ParallelQuery, axis_values
from hp_tool.domain.query import Query
from hp_tool.domain.serving import PoolConfig, PoolEstimate, PoolRecommendation, ServingConfig
from hp_tool.domain.targets import quantile_fraction
from hp_tool.domain.units import SECONDS_PER_HOUR
from hp_tool.questions.serving.estimates import (
    QUANTILES,
    engine_provenance,
    tails_of_row,
    target_quantiles,
)
from hp_tool.questions.serving.highest_load import search_highest
from hp_tool.questions.serving.intervals import familiarity_of, serving_intervals
from hp_tool.questions.serving.problem import (
    ServingProblem,
    resolve_case,
    resolve_serving,
    resolve_workload,
)

MAX_PAIRS = 2_000_000
ROUNDING = 1e-9
"""Relative rounding error of a load that is recomputed from its rate and latency."""
INFEASIBLE_SCORE = 1e12
"""Score of infeasible pairs, above any other score. It also serves as a request rate above any
throughput.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs of a prefill pool and a decoding pool of one problem, one pair per row."""

    problem: ServingProblem
    cases: Sequence[ServingCase]
    prefillers: ServingCandidates
    decoders: ServingCandidates

    @property
    def by_rate(self) -> bool:
        """Whether requests arrive at a given rate."""
        unknown = self.problem.unknown
        return self.problem.request_rate_per_second is not None or (
            unknown is not None and unknown.by_rate
        )

    def cost_pairs(self, loads: FloatArray) -> PoolCosts:
        """Return the costs of all pairs, each under its own load. Loads are in requests in flight
        or in requests per second.
        """
        bounds.check_work(done=len(loads))
        return pool_costs(
            prefill=self.cases[0],
            decode=self.cases[1],
            prefillers=self.prefillers,
            decoders=self.decoders if self.by_rate else self.decoders.with_concurrency(loads),
            requests_per_second=loads if self.by_rate else None,
            handover_s=pool_efficiency().handover_s,
        )

    def find_loads(self) -> FloatArray:
        """Return the load of each pair, shape (n,): that of the query, or the highest load within
        the targets.
        """
        problem, n = self.problem, len(self.decoders)
        if problem.unknown is None:
            return np.full(n, float(problem.request_rate_per_second or problem.concurrency or 1))
        if self.by_rate:
            most = self.cost_pairs(np.full(n, INFEASIBLE_SCORE)).request_rate_per_second
        else:
            most = np.floor(
                self.cost_pairs(np.ones(n)).max_decode_batch
            ) * self.decoders.replicas.astype(np.float64)
        return search_highest(
            problem.unknown,
            targets=problem.targets,
            most=most,
            is_sustained=lambda each: self.is_acceptable(self.cost_pairs(each)),
        )

    def quantiles(self, costs: PoolCosts, quantile: str) -> Quantiles:
        return pool_quantiles(
            prefill=self.cases[0],
            decode=self.cases[1],
            decoders=self.decoders,
            costs=costs,
            share=quantile_fraction(quantile),
            independent=self.by_rate,
        )

    def is_acceptable(self, costs: PoolCosts) -> BoolArray:
        """Return a mask of pairs that fit in memory, sustain the load and meet the targets, without
        queued requests if queueing is forbidden.
        """
        acceptable = costs.fits & costs.sustained
        for _, latency, quantile, limit in self.problem.targets.limits():
            acceptable &= (
                getattr(costs if quantile is None else self.quantiles(costs, quantile), latency)
                <= limit
            )
        if not self.problem.may_queue:
            in_flight = costs.request_rate_per_second * costs.request_latency_s
            acceptable &= in_flight <= costs.max_decode_batch * self.decoders.replicas * (
                1.0 + ROUNDING
            )
        return acceptable

    def tails(self, costs: PoolCosts, rows: IntArray) -> list[Tails]:
        """Return the latency quantiles of some rows, including the quantiles used by targets."""
        names = (*QUANTILES, *target_quantiles(self.problem.targets))
        by_quantile = {name: self.quantiles(costs, name) for name in names}
        return [tails_of_row(by_quantile, row) for row in rows.tolist()]


def rank_pools(*, query: Query, top: int = 10) -> tuple[PoolRecommendation, ...]:
    """Return the best pairs of pools for the query's load, best first.

    Pairs that miss a target are omitted. The decoding pool uses all devices outside the prefill
    pool, except under the objectives min_gpus (fewest devices first) and cost. With two kinds of
    GPU (cluster.stages), the first kind runs prefill and the second runs decoding.
    """
    query = query.with_most_devices()
    assert query.inference is not None
    spec = query.inference.disaggregated or DisaggregationSpec()
    problem, sides = resolve_pools(query)
    workload = resolve_workload(query)
    cases = [resolve_case(query, workload, model=problem.model, cluster=side) for side in sides]
    pairs = _layout_pairs(
        spec,
        query.parallel,
        cases,
        shared=sides[0] is sides[1],
        every=query.objective in ("min_gpus", "cost"),
    )
    if not len(pairs):
        return ()
    prefillers, decoders = (
        _pool_candidates(side, problem, query.parallel) for side in (pairs[:, 0], pairs[:, 1])
    )
    every = Pairs(problem=problem, cases=cases, prefillers=prefillers, decoders=decoders)
    loads = every.find_loads()
    costs = every.cost_pairs(loads)
    used = [side[:, 0] * side[:, 1] * side[:, 4] for side in (pairs[:, 0], pairs[:, 1])]
    gpus = used[0] + used[1]
    dollars = _cost_per_million(sides, costs, used)
    good = np.flatnonzero(every.is_acceptable(costs))
    one_rate = problem.request_rate_per_second is not None
    score = _pair_scores(query.objective, costs, gpus=gpus, dollars=dollars, by_rate=one_rate)
    order = good[np.lexsort((gpus[good], score[good]))][:top]
    return tuple(
        PoolRecommendation(
            rank=place + 1,
            prefill=_pool(sides[0], prefillers.config(row)),
            decode=_pool(sides[1], decoders.config(row)),
            estimate=_estimate(
                every,
                costs,
                row,
                tails=tails,
                gpus=int(gpus[row]),
                dollars=dollars,
                load=float(loads[row]),
            ),
        )
        for place, (row, tails) in enumerate(
            zip(order.tolist(), every.tails(costs, order), strict=True)
        )
    )


def resolve_pools(query: Query) -> tuple[ServingProblem, tuple[ClusterSpec, ClusterSpec]]:
    """Return the problem that both pools have in common, and the devices of the prefill pool and of
    the decoding pool. Both are the same cluster unless the query has two kinds of GPU.
    """
    query = query.with_most_devices()
    cluster = catalogue_cluster(query.cluster)
    first, second = cluster.kinds or (cluster, cluster)
    return resolve_serving(dataclasses.replace(query, cluster=_with_first_kind(query))), (
        first,
        second,
    )


def pool_config(
    pool: PoolConfig, problem: ServingProblem, parallel: ParallelQuery
) -> ServingConfig:
    """Return the configuration of a pool's replicas. If the query lists several engine limits, the
    highest one is used.
    """
    engine = problem.engine
    return ServingConfig(
        tensor_parallel_size=pool.tensor_parallel_size,
        expert_parallel_size=pool.expert_parallel_size,
        attention_data_parallel_size=pool.attention_data_parallel_size,
        redundant_experts=pool.redundant_experts,
        data_parallel_size=pool.attention_data_parallel_size * pool.replicas,
        max_num_seqs=max(
            axis_values(parallel.max_num_seqs)
            or (int(default_max_num_seqs(engine, pool.attention_data_parallel_size)),)
        ),
        max_num_batched_tokens=max(
            axis_values(parallel.max_num_batched_tokens) or (engine.max_num_batched_tokens,)
        ),
    )


def _pool(side: ClusterSpec, config: ServingConfig) -> PoolConfig:
    return PoolConfig(
        gpu=side.gpu.name,
        tensor_parallel_size=config.tensor_parallel_size,
        expert_parallel_size=config.expert_parallel_size,
        attention_data_parallel_size=config.attention_data_parallel_size,
        redundant_experts=config.redundant_experts,
        replicas=config.data_parallel_size // config.attention_data_parallel_size,
    )


def requires_pools(query: Query) -> bool:
    """Return whether the query can be answered only with pools, because a single server cannot use
    two kinds of GPU.
    """
    pools = query.inference is not None and query.inference.disaggregated is not None
    return pools and not isinstance(query.cluster, str) and query.cluster.stages is not None


def _with_first_kind(query: Query) -> str | ClusterQuery:
    """Return the query's cluster with only the first of its two kinds of GPU. The query's other
    fields apply to both kinds.
    """
    if isinstance(query.cluster, str) or query.cluster.stages is None:
        return query.cluster
    first = query.cluster.stages[0]
    return dataclasses.replace(query.cluster, stages=None, gpu=first.gpu, num_gpus=first.num_gpus)


Layout = tuple[int, int, int, int]
"""Tensor-, attention-data- and expert-parallel sizes of a replica, and its number of redundant
experts.
"""


def _layout_pairs(
    spec: DisaggregationSpec,
    parallel: ParallelQuery,
    cases: Sequence[ServingCase],
    *,
    shared: bool,
    every: bool,
) -> IntArray:
    """Return the legal pairs of prefill and decoding layouts with their numbers of replicas, shape
    (n, 2, 5).

    Pairs that need more devices than available are omitted. With `shared`, both pools use devices
    of the same cluster. With `every`, pairs that leave devices unused are included.
    """
    room = [side.cluster.num_gpus for side in cases]
    copies = axis_values(parallel.redundant_experts)
    prefill_layouts = _legal_layouts(cases[0], _pool_axes(spec, "prefill"), copies)
    decode_layouts = _legal_layouts(cases[1], _pool_axes(spec, "decode"), copies)
    counts = [
        len(_replica_counts(spec.prefill_replicas, room[0] // (t * d)))
        for t, d, _, _ in prefill_layouts
    ]
    axes = {
        "prefill_tensor_parallel_size": len(prefill_layouts),
        "decode_tensor_parallel_size": len(decode_layouts),
        "prefill_replicas": max(counts, default=0),
        "decode_replicas": room[1] if every and not spec.decode_replicas else 1,
    }
    axes = {f"inference.disaggregated.{name}": count for name, count in axes.items()}
    planned = sum(counts) * axes["inference.disaggregated.decode_replicas"] * len(decode_layouts)
    bounds.announce_combinations(planned, axes=axes, most=MAX_PAIRS)
    rows: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for first in prefill_layouts:
        for second in decode_layouts:
            for n_p in _replica_counts(spec.prefill_replicas, room[0] // (first[0] * first[1])):
                bounds.check_work()
                most = (room[1] - (n_p * first[0] * first[1] if shared else 0)) // (
                    second[0] * second[1]
                )
                counted = _replica_counts(
                    spec.decode_replicas, most, fewest=1 if every else max(most, 1)
                )
                rows += [((*first, n_p), (*second, n_d)) for n_d in counted]
    bounds.check_work(done=planned)
    return np.array(rows, dtype=np.int64).reshape(-1, 2, 5)


def _pool_axes(spec: DisaggregationSpec, pool: str) -> list[tuple[int, ...]]:
    names = ("tensor", "attention_data", "expert")
    return [axis_values(getattr(spec, f"{pool}_{name}_parallel_size")) for name in names]


def _replica_counts(value: int | None, most: int, *, fewest: int = 1) -> range:
    """Return the possible numbers of replicas: only that of the query, if it sets one."""
    if value is None:
        return range(fewest, most + 1)
    return range(value, value + 1) if value <= most else range(0)


def _legal_layouts(
    case: ServingCase, sizes: Sequence[tuple[int, ...]], copies: tuple[int, ...]
) -> list[Layout]:
    """Return the legal layouts of a replica.

    Sizes are those of the query, by default powers of two. Tensor parallelism stays within an
    NVLink domain. Experts are either not sharded, or sharded over all ranks with the fewest
    redundant experts. A dense model has a single attention group, because several groups are useful
    only if they share experts.
    """
    cluster, mixture = case.cluster, case.model.num_experts is not None
    powers = tuple(1 << k for k in range(cluster.num_gpus.bit_length()))
    tensors, attentions, experts = sizes
    tensors = tensors or tuple(t for t in powers if t <= cluster.nvlink_domain_size)
    attentions = attentions or (powers if mixture else (1,))
    layouts = [
        (t, d, e, r)
        for t, d in itertools.product(tensors, attentions)
        if t * d <= cluster.num_gpus
        # Attention groups that share experts shard them over all of their ranks.
        for e in experts or (sorted({1 if d == 1 else t * d, t * d}) if mixture else (1,))
        for r in copies or (int(fewest_redundant(case.model, np.array(e))),)
    ]
    return [layout for layout in layouts if _is_legal(case, layout)]


def _is_legal(case: ServingCase, layout: Layout) -> bool:
    t, d, e, r = layout
    config = ServingConfig(
        tensor_parallel_size=t,
        attention_data_parallel_size=d,
        expert_parallel_size=e,
        redundant_experts=r,
        data_parallel_size=d,
    )
    one = ServingCandidates.from_configs([config], concurrency=[1])
    return not legality(
        model=case.model, num_gpus=t * d, candidates=one, longest_request=case.longest_request
    )[0]


def _pool_candidates(
    side: IntArray, problem: ServingProblem, parallel: ParallelQuery
) -> ServingCandidates:
    """Return the layouts `side` of one pool, shape (n, 5), as candidates under the query's load,
    with the highest engine limits of the query.
    """
    t, d, e, r, replicas = side.T
    ones, engine = np.ones_like(t), problem.engine
    limits = axis_values(parallel.max_num_seqs) or None
    return ServingCandidates(
        tensor_parallel_size=t,
        pipeline_parallel_size=ones,
        expert_parallel_size=e,
        attention_data_parallel_size=d,
        redundant_experts=r,
        data_parallel_size=d * replicas,
        max_num_seqs=default_max_num_seqs(engine, d) if limits is None else ones * max(limits),
        max_num_batched_tokens=ones
        * max(axis_values(parallel.max_num_batched_tokens) or (engine.max_num_batched_tokens,)),
        concurrency=ones * (problem.concurrency or 1),
    )


def _pair_scores(
    objective: str | None,
    costs: PoolCosts,
    *,
    gpus: IntArray,
    dollars: FloatArray | None,
    by_rate: bool,
) -> FloatArray:
    if objective == "ttft":
        return costs.ttft_s
    if objective == "tpot":
        return costs.tpot_s
    if objective == "min_gpus":
        return gpus.astype(np.float64)
    if objective == "cost":
        return dollars if dollars is not None else -costs.output_tokens_per_second_per_gpu
    return costs.request_latency_s if by_rate else -costs.output_tokens_per_second_per_gpu


def _cost_per_million(
    sides: Sequence[ClusterSpec], costs: PoolCosts, gpus: Sequence[IntArray]
) -> FloatArray | None:
    """Return US dollars per million output tokens at the prices of each pool's devices; None if a
    price is unknown.
    """
    first, second = (side.price_per_gpu_hour for side in sides)
    if first is None or second is None:
        return None
    total = (gpus[0] + gpus[1]) * costs.output_tokens_per_second_per_gpu
    spent: FloatArray = (
        (first * gpus[0] + second * gpus[1]) / SECONDS_PER_HOUR / np.maximum(total, 1e-12) * 1e6
    )
    return spent


def _estimate(
    pairs: Pairs,
    costs: PoolCosts,
    row: int,
    *,
    tails: Tails,
    gpus: int,
    dollars: FloatArray | None,
    load: float,
) -> PoolEstimate:
    problem = pairs.problem
    figures = {
        name: float(getattr(costs, name)[row])
        for name in PoolEstimate.__slots__
        if hasattr(costs, name)
    }
    price = None if dollars is None else float(dollars[row])
    rate = figures["request_rate_per_second"]
    concurrency = rate * figures["request_latency_s"] if pairs.by_rate else int(load)
    ttft, tpot, throughput = (
        figures[name] for name in ("ttft_s", "tpot_s", "output_tokens_per_second_per_gpu")
    )
    return PoolEstimate(
        feasible=True,
        reasons=(),
        num_gpus=gpus,
        **figures,
        concurrency=concurrency,
        users=math.floor(concurrency + rate * problem.think_time_s + 1e-6),
        cost_per_million_output_tokens=price,
        tails=tails,
        intervals=serving_intervals(ttft, tpot, throughput, problem, pools=pool_efficiency()),
        familiarity=familiarity_of(problem, pools=True),
        provenance=engine_provenance(problem),
    )
