"""Advice after losing nodes: the best configuration on the rest, and how long to wait for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hp_tool.domain.parallel import ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Recommendation
from hp_tool.domain.workload import ReliabilitySpec
from hp_tool.errors import InputError, UnsupportedError
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.training.answers import Training
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.problem import resolve_training
from hp_tool.questions.training.ranking.recommend import recommend

MAX_SPARE_NODES = 8
"""Maximum number of additional nodes left idle if no configuration fits all remaining nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterLoss:
    """How a job can continue without some of its nodes."""

    lost_nodes: int
    num_gpus: int
    """Number of devices that the recommended configuration uses."""
    idle_gpus: int
    """Remaining devices that the recommended configuration does not use."""
    recommendation: Recommendation
    query: dict[str, Any]
    """Recommended configuration as a query."""
    step_s: float
    pace: float
    """Tokens per second of the recommended configuration, relative to the job with all nodes."""
    checkpoint_s: float
    restart_s: float
    worth_waiting_s: float
    """Waiting for the lost nodes is better than continuing without them up to this many seconds."""
    text: str


def after_loss(
    query: Query, *, lost_nodes: int = 1, calibrations: Calibrations | None = None
) -> AfterLoss:
    """Find the best configuration without `lost_nodes`, and how long to wait for them.

    The batch size stays the same. Continuing costs a restart (R seconds) now, plus a checkpoint (C)
    and another restart when the nodes return. Waiting W seconds costs only that last restart. A job
    that continues trains at the fraction p of its full speed. Continuing is better if p (W - R) >
    C, so waiting is worthwhile for W < R + C / p.

    Raises:
        InputError: No node or no feasible configuration is left.
        UnsupportedError: The query is not a training query.
    """
    if query.kind != "training":
        raise UnsupportedError("lost_nodes supports training queries only", field="kind")
    cluster = resolve_training(query).cluster
    left = cluster.num_gpus - lost_nodes * cluster.gpus_per_node
    if left <= 0:
        raise InputError(
            f"lost_nodes {lost_nodes} must be less than the job's {cluster.num_nodes} nodes",
            field="lost_nodes",
        )
    workload = query.training
    assert workload is not None  # Training queries have a workload.
    query = replace(
        query, training=replace(workload, reliability=workload.reliability or ReliabilitySpec())
    )
    prior, calibrated = Training(query=query).estimate(with_fixes=False, calibrations=calibrations)
    whole = calibrated or prior
    free = replace(query, parallel=ParallelQuery())
    best, used_query, devices = _best(
        free, left, node=cluster.gpus_per_node, calibrations=calibrations
    )
    estimate = best.preferred_estimate
    goodput = estimate.goodput
    if (
        whole.tokens_per_second is None
        or estimate.tokens_per_second is None
        or estimate.time is None
        or goodput is None
    ):
        raise InputError(
            "The configuration with all nodes cannot run on this cluster; check its layout.",
            field="parallel",
        )
    pace = estimate.tokens_per_second / whole.tokens_per_second
    worth_s = goodput.restart_s + goodput.checkpoint_s / pace
    waiting = (
        f"waiting is worthwhile if the nodes return within {worth_s / 60.0:,.0f} minutes"
        if pace < 1.0
        else (
            "the query's configuration is slower with all nodes, so run `hp-tool recommend` for a "
            "better one"
        )
    )
    return AfterLoss(
        lost_nodes=lost_nodes,
        num_gpus=devices,
        idle_gpus=left - devices,
        recommendation=best,
        query=Configuration.from_row(best, query=used_query).mapping(),
        step_s=estimate.time.step_s,
        pace=pace,
        checkpoint_s=goodput.checkpoint_s,
        restart_s=goodput.restart_s,
        worth_waiting_s=worth_s,
        text=f"Continues at {pace:.0%} of the full pace; {waiting}.",
    )


def _best(
    query: Query, left: int, *, node: int, calibrations: Calibrations | None
) -> tuple[Recommendation, Query, int]:
    """Return the best configuration on the largest number of nodes that has a feasible one."""
    fewest = max(left - MAX_SPARE_NODES * node, min(left, node))
    for num_gpus in range(left, fewest - 1, -node):
        part = query.with_num_gpus(num_gpus)
        ranking = recommend(query=part, top=1, calibrations=calibrations)
        if ranking.recommendations:
            return ranking.recommendations[0], part, num_gpus
    raise InputError(
        f"No configuration on {fewest} to {left} devices is feasible.", field="cluster.num_gpus"
    )
