"""One training on the cluster: a shape, its tokens and batch, and what the cost model says of the fastest configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hp_tool.budgets.asked import asked_parameters
from hp_tool.domain.hardware import ClusterSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.query import Constraints, Query
from hp_tool.domain.result import Estimate, Reason, Recommendation
from hp_tool.domain.sizing import SizingQuery
from hp_tool.domain.workload import TrainingWorkload
from hp_tool.sizing import ScalingLaw, batch_sequences, hyperparameter_flops, shaped
from hp_tool.training import recommend as app
from hp_tool.training.calibrated import Corrections


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is trained, and how fast where there is a cluster."""

    model: ModelSpec
    asked_parameters: float
    """Of which `model` is the shape."""
    workload: TrainingWorkload
    query: Query | None = None
    """What was asked of the cost model; None without a cluster."""
    recommendation: Recommendation | None = None
    """None without a cluster, or where nothing is acceptable."""
    reasons: tuple[Reason, ...] = ()

    @property
    def tokens(self) -> float:
        assert self.workload.total_tokens is not None
        return self.workload.total_tokens

    @property
    def estimate(self) -> Estimate | None:
        """After what was measured on the cluster, where anything was."""
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
    corrections: Corrections

    def of_flops(self, flops: float) -> Plan:
        """The training of 6 N D = `flops`, not yet timed; what is not asked for follows from the law."""
        asked = asked_parameters(self.query, model=self.model)
        if asked is None:
            tokens = self.query.tokens
            asked = self.law.parameters(flops) if tokens is None else flops / (6.0 * tokens)
        model = self.model or self._shaped(asked)
        tokens = self.query.tokens if self.query.tokens is not None else flops / (6.0 * asked)
        return Plan(model=model, asked_parameters=asked, workload=self._workload(model, tokens))

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
        found = app.recommend(query=query, top=1, corrections=self.corrections)
        best = next(iter(found.recommendations), None)
        return replace(
            plan,
            query=query,
            recommendation=best,
            reasons=() if best is not None else _reasons(found),
        )

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


def _reasons(found: app.RecommendationResult) -> tuple[Reason, ...]:
    """Why nothing is acceptable: what lacks least, or how many each rule turned away."""
    if found.nearest_misses:
        return found.nearest_misses[0].estimate.reasons
    return tuple(
        Reason(code=code, message=f"turns away {count:,} combinations of the axes", needed=None, available=None)
        for code, count in found.rejections.items()
    )
