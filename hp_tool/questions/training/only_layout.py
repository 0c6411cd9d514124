"""Estimate the layout of a query that allows only one layout, so that no ranking is needed."""

from __future__ import annotations

from dataclasses import fields

from hp_tool.domain.frameworks import DEGREES
from hp_tool.domain.parallel import QUERY_STRATEGY_FIELDS, ParallelQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.usual_settings import answer_with_usual_settings
from hp_tool.space import default_axes

LAYOUT_AXES = (*DEGREES, "micro_batch_size", "moe_token_dispatcher_type")
"""Axes, besides recomputation and sharding, that a ranking varies if the query omits them."""


def estimate_only_layout(query: Query) -> Estimate | None:
    """Return the estimate of a training query that allows a single layout and sets recomputation,
    if acceptable.

    Sharding is that of the query, by default the framework's. Returns None if several layouts must
    be ranked.

    Raises:
        HpToolError: The query cannot be answered.
    """
    parallel = query.parallel
    lists = any(
        isinstance(getattr(parallel, f.name), tuple)
        for f in fields(ParallelQuery)
        if f.name not in QUERY_STRATEGY_FIELDS
    )
    training = query.training
    if (
        lists
        or parallel.recompute is None
        or training is None
        or training.choices
        or query.objective == "min_gpus"
    ):
        return None
    if parallel.tensor_parallel_size is None or parallel.pipeline_parallel_size is None:
        return None
    one = resolve_configuration(query)
    axes = default_axes(query=one.problem.parallel, case=one.problem)
    if any(getattr(axes, name) != (getattr(one.candidate, name),) for name in LAYOUT_AXES):
        return None
    _, estimate = answer_with_usual_settings(query, resolved=one)
    return estimate if estimate.feasible else None
