"""Stored measurements at the start of a search: as evidence, as runs, and for start-up times.

What lasts beyond a search is stored by `learning`.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any, TypeVar

from hp_tool.domain.parallel import ParallelConfig
from hp_tool.domain.ports import Store
from hp_tool.domain.records import REUSED, JsonObject
from hp_tool.domain.serving import RunConfig
from hp_tool.loop.assumptions import assumed
from hp_tool.loop.calibration import Evidence
from hp_tool.loop.search.account import measured_startup_s
from hp_tool.loop.search.problem import Question
from hp_tool.loop.tuning.searched import Searched

STARTS = 20
"""Number of runs from which the start-up time is estimated."""


def earlier_evidence(
    store: Store, problem: Searched, *, without_search: str | None = None, owner: str = ""
) -> Evidence:
    """Return evidence from trusted stored runs of the series, and from the owner's reports."""
    return problem.load_evidence(
        store, series=replace(problem.series, owner=owner), without_search=without_search
    )


def reusable_measurements(*, store: Store, problem: Question) -> dict[str, str]:
    """Return the ids of this problem's complete runs that can be reused, by configuration digest.

    The newest run is preferred.
    """
    page = store.measurements(
        cluster_key=problem.cluster_key,
        problem_digest=problem.problem_digest,
        source="profile",
        state="accepted",
        limit=assumed().learning.measurements,
    )
    reusable: dict[str, str] = {}
    for record in page.items:
        row = problem.row(record.parallel)
        alike = _arrangement(record.query, parallel=record.parallel) == _arrangement(
            problem.query, parallel=record.parallel
        )
        if (
            row is not None
            and alike
            and record.measurement.fidelity.is_whole
            and record.measurement.status in ("ok", "oom")
        ):
            reusable.setdefault(problem.digest(row), record.id)
    return reusable


def _arrangement(query: JsonObject, *, parallel: RunConfig) -> tuple[Any, ...]:
    """Return the settings that a run's digest omits: the pipeline layout and the CP exchange."""
    fixed = query.get("parallel") or {}
    layout = fixed.get("pipeline_layout")
    if not isinstance(parallel, ParallelConfig) or parallel.context_parallel_size == 1:
        return (layout,)
    levels, dynamic = (
        fixed.get("hierarchical_context_parallel_sizes"),
        bool(fixed.get("dynamic_context_parallel")),
    )
    return layout, fixed.get("context_parallel_communication") or "p2p", levels, dynamic


Asked = TypeVar("Asked", bound=Question)


def with_measured_startup(problem: Asked, *, store: Store) -> Asked:
    """Return the question with the median start-up time of this cluster's newest runs.

    Without such runs, return it unchanged.
    """
    page = store.measurements(
        cluster_key=problem.cluster_key, source="profile", status="ok", limit=STARTS
    )
    own = [record.measurement for record in page.items if REUSED not in record.predicted]
    seen = [
        each
        for one in own
        if (each := measured_startup_s(one, settings=problem.settings)) is not None
    ]
    return (
        replace(problem, assumed_startup_s=statistics.median(seen), startup_is_known=True)
        if seen
        else problem
    )
