"""After a lost node: the best configuration of what is left, and whether waiting for another node
pays.
"""

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

MOST_SPARES = 8
"""Further nodes that are left idle where the rest cannot be divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterLoss:
    """What a job can do without some of its nodes."""

    lost_nodes: int
    num_gpus: int
    """Devices of the best configuration of what is left."""
    idle_gpus: int
    """Devices that are left and that it does not use."""
    recommendation: Recommendation
    query: dict[str, Any]
    """That configuration as a query."""
    step_s: float
    pace: float
    """Its tokens per second over those of the whole job."""
    checkpoint_s: float
    restart_s: float
    worth_waiting_s: float
    """Waiting pays where the nodes are back sooner than this."""
    text: str


def after_loss(
    query: Query, *, lost_nodes: int = 1, calibrations: Calibrations | None = None
) -> AfterLoss:
    """The best configuration of the query's devices less `lost_nodes`, the batch unchanged, and how
    long a wait is worth it.

    Going on costs a restart of R seconds now, and C for a checkpoint before the restart that takes
    the nodes back in; that last restart follows a wait of W seconds too. Between them it trains at
    the share p of the whole job's pace. It wins where p (W - R) > C, so waiting pays below W = R +
    C / p.

    Raises InputError where nothing is left, or where no configuration of the rest is feasible.
    """
    if query.kind != "training":
        raise UnsupportedError(
            "what is left of a service is not advised; give a training query", field="kind"
        )
    cluster = resolve_training(query).cluster
    left = cluster.num_gpus - lost_nodes * cluster.gpus_per_node
    if left <= 0:
        raise InputError(
            f"the job has {cluster.num_nodes} nodes: without {lost_nodes} none is left",
            field="lost_nodes",
        )
    workload = query.training
    assert workload is not None  # it trains
    query = replace(
        query, training=replace(workload, reliability=workload.reliability or ReliabilitySpec())
    )
    prior, calibrated = Training(query=query).estimate(with_fixes=False, calibrations=calibrations)
    whole = calibrated or prior
    free = replace(query, parallel=ParallelQuery())
    best, used, devices = _best(free, left, node=cluster.gpus_per_node, calibrations=calibrations)
    known = best.known
    goodput = known.goodput
    if (
        whole.tokens_per_second is None
        or known.tokens_per_second is None
        or known.time is None
        or goodput is None
    ):
        raise InputError("the configuration cannot run as a whole", field="parallel")
    pace = known.tokens_per_second / whole.tokens_per_second
    worth_s = goodput.restart_s + goodput.checkpoint_s / pace
    waits = (
        f"waiting pays where the nodes are back within {worth_s / 60.0:,.0f} minutes"
        if pace < 1.0
        else (
            "the query's configuration is slower with all nodes: ask `hp-tool recommend` for a "
            "better one"
        )
    )
    return AfterLoss(
        lost_nodes=lost_nodes,
        num_gpus=devices,
        idle_gpus=left - devices,
        recommendation=best,
        query=Configuration.of(best, query=used).mapping(),
        step_s=known.time.step_s,
        pace=pace,
        checkpoint_s=goodput.checkpoint_s,
        restart_s=goodput.restart_s,
        worth_waiting_s=worth_s,
        text=f"goes on at {pace:.0%} of its pace; {waits}",
    )


def _best(
    query: Query, left: int, *, node: int, calibrations: Calibrations | None
) -> tuple[Recommendation, Query, int]:
    """The best configuration of the most whole nodes that have a feasible one."""
    fewest = max(left - MOST_SPARES * node, min(left, node))
    for num_gpus in range(left, fewest - 1, -node):
        part = query.with_num_gpus(num_gpus)
        ranking = recommend(query=part, top=1, calibrations=calibrations)
        if ranking.recommendations:
            return ranking.recommendations[0], part, num_gpus
    raise InputError(
        f"no configuration of {fewest} to {left} devices is feasible", field="cluster.num_gpus"
    )
