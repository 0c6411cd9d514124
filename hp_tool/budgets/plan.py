"""The training that a budget buys: a shape, its tokens and batch, and the fastest configuration on the cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hp_tool import training
from hp_tool.budgets.query import query_parameters
from hp_tool.cost.roofline import peak_flops
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.query import Constraints, Query
from hp_tool.domain.result import Estimate, Ranking, Reason, Recommendation
from hp_tool.domain.sizing import SizingQuery
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.sizing import ScalingLaw, batch_sequences, hyperparameter_flops, shaped
from hp_tool.training.calibrated import Calibrations
from hp_tool.units import SECONDS_PER_DAY

CLOSE = 0.02
"""Days off the budget at which tokens fill the rest."""
MAX_PLANS = 24
_SMALLER = 4.0
"""Factor on compute after a model that fits nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained, and how fast if there is a cluster."""

    model: ModelSpec
    target_parameters: float
    """Active parameters that `model` was shaped for."""
    workload: TrainingWorkload
    query: Query | None = None
    """The cost model's query; None without a cluster."""
    recommendation: Recommendation | None = None
    """None without a cluster, or if nothing is acceptable."""
    reasons: tuple[Reason, ...] = ()

    @property
    def tokens(self) -> float:
        assert self.workload.total_tokens is not None
        return self.workload.total_tokens

    @property
    def estimate(self) -> Estimate | None:
        """The recommendation's, calibrated if anything was measured on the cluster."""
        row = self.recommendation
        return None if row is None else row.calibrated_estimate or row.estimate

    @property
    def effective_days(self) -> float | None:
        """Calendar days, time lost to failures included."""
        return None if self.estimate is None else self.estimate.effective_days


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Makes plans of different sizes for one sizing query."""

    query: SizingQuery
    law: ScalingLaw
    model: ModelSpec | None
    cluster: ClusterSpec | None
    calibrations: Calibrations | None

    def of_flops(self, flops: float) -> Plan:
        """The training of 6 N D = `flops`, not yet timed; what the query leaves open follows from the law."""
        parameters = query_parameters(self.query, model=self.model)
        if parameters is None:
            tokens = self.query.tokens
            parameters = self.law.parameters(flops) if tokens is None else flops / (6.0 * tokens)
        model = self.model or self._shaped(parameters)
        tokens = self.query.tokens if self.query.tokens is not None else flops / (6.0 * parameters)
        return Plan(model=model, target_parameters=parameters, workload=self._workload(model, tokens))

    def timed(self, plan: Plan, *, deadline_days: float | None = None) -> Plan:
        """The plan with its fastest configuration on the whole cluster; with a deadline in calendar days, on the fewest devices
        that meet it.
        """
        if self.cluster is None or self.query.cluster is None:
            return plan
        query = Query(
            id=self.query.id,
            kind="training",
            model=self.query.model or plan.model,
            cluster=self.query.cluster,
            training=plan.workload,
            parallel=self.query.parallel,
            objective=None if deadline_days is None else "min_gpus",
            constraints=Constraints(max_days=deadline_days),
        )
        ranking = training.recommend(query=query, top=1, calibrations=self.calibrations)
        best = next(iter(ranking.recommendations), None)
        return replace(plan, query=query, recommendation=best, reasons=_reasons(ranking) if best is None else ())

    def _shaped(self, parameters: float) -> ModelSpec:
        query = self.query
        return shaped(
            parameters=parameters,
            style=query.style,
            sequence_length=query.sequence_length,
            vocab_size=query.vocab_size,
            ratio=query.aspect_ratio,
            num_key_value_heads=query.num_key_value_heads,
            experts=query.experts,
        )

    def _workload(self, model: ModelSpec, tokens: float) -> TrainingWorkload:
        query = self.query
        batch = query.global_batch_size or batch_sequences(
            flops=hyperparameter_flops(model=model, sequence_length=query.sequence_length, tokens=tokens),
            sequence_length=query.sequence_length,
            num_gpus=1 if self.cluster is None else self.cluster.num_gpus,
        )
        return TrainingWorkload(
            sequence_length=query.sequence_length,
            global_batch_size=batch,
            precision=query.precision,
            framework=query.framework,
            total_tokens=tokens,
            reliability=query.reliability,
        )


def _reasons(ranking: Ranking[Recommendation]) -> tuple[Reason, ...]:
    """Why nothing is acceptable: what lacks least, or how many each rule turned away."""
    if ranking.nearest_misses:
        return ranking.nearest_misses[0].estimate.reasons
    return tuple(
        Reason(code=code, message=f"turns away {count:,} combinations of the axes", needed=None, available=None)
        for code, count in ranking.rejections.items()
    )


def solve(planner: Planner, *, flops: float | None) -> Plan:
    """The plan of 6 N D = `flops`, on the fewest devices for a deadline; None: the largest plan that the time allows."""
    days = planner.query.days
    if flops is None:
        assert days is not None
        return _largest(planner, days=days)
    return planner.timed(planner.of_flops(flops), deadline_days=days)


def _largest(planner: Planner, *, days: float) -> Plan:
    """The largest plan by the law that the cluster does in so many calendar days.

    Compute and throughput settle together: the compute of a plan times the budget over its days is the next one's. The first
    is what the devices would do at their peak, so an upper bound. Shapes are coarse, and memory may end the way up; so the
    tokens then fill the time of the nearest plan that fits.
    """
    assert planner.cluster is not None
    peak = peak_flops(planner.cluster.gpu, precision=planner.query.precision)
    flops = peak * planner.cluster.num_gpus * days * SECONDS_PER_DAY
    low, high = 0.0, math.inf
    best, nearest = None, math.inf
    for _ in range(MAX_PLANS):
        plan = planner.timed(planner.of_flops(flops))
        following = flops / _SMALLER
        if (needed := plan.effective_days) is None:
            high = flops
        else:
            share = days / needed
            low, high = (flops, high) if share >= 1.0 else (low, flops)
            following = flops * share
            if abs(math.log(share)) < nearest:
                best, nearest = plan, abs(math.log(share))
        if nearest <= CLOSE or high <= low * (1.0 + CLOSE):
            break
        flops = following if low < following < high else math.sqrt(low * high)
    if best is None:
        return plan
    assert best.effective_days is not None
    tokens = best.tokens * days / best.effective_days
    return planner.timed(replace(best, workload=replace(best.workload, total_tokens=tokens)))
