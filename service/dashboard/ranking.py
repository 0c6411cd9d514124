"""Rows of rankings on all pages: answers, planned searches, and nearest misses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hp_tool.domain.fit import Fit
from hp_tool.domain.query import Query
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import (
    InferenceEstimate,
    RunConfig,
    ServingConfig,
    ServingRecommendation,
)
from hp_tool.questions import schema
from hp_tool.questions.configuration import Configuration
from hp_tool.wording.columns import unmeasured_features
from hp_tool.wording.fit import stall_words
from hp_tool.wording.rankings import SERVING_FIGURES, TRAINING_FIGURES, page_values
from hp_tool.wording.words import serving_arithmetic
from service.api.views import View
from service.dashboard import formats
from service.dashboard.page import address

LAYOUT = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
)
"""Axes that distinguish the layouts in a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRow(View):
    """A configuration with its predictions: step time for training, latencies for serving."""

    rank: int
    arithmetic: str
    details: str
    unmeasured: tuple[str, ...] = ()
    """Features that no published run has. They widen the interval."""
    why_wide: str = ""
    """Why slow steps widen the interval, in words."""
    parallel: RunConfig
    href: str
    """URL of the configuration's page, with the configuration as text in `query`."""
    run_href: str
    """URL of the page with launch commands for each tool."""
    settings_href: str | None = None
    """URL of the explorer page with its controls set to this configuration."""
    chosen: bool = False
    """Whether the page displays this configuration."""
    step_s: float | None = None
    step_s_interval: tuple[float, float] | None = None
    tokens_per_second_per_gpu: float | None = None
    """For serving, output tokens only."""
    mfu: float | None = None
    ttft_s: float | None = None
    ttft_s_interval: tuple[float, float] | None = None
    tpot_s: float | None = None
    tpot_s_interval: tuple[float, float] | None = None
    waiting: str = ""
    """Why requests wait, in words."""
    users: int | None = None
    """Number of users that generate the load, each with one request at a time."""
    memory_bytes: float | None = None
    capacity_bytes: float | None = None
    group: int | None = None
    """Group of tied rows. Group 1 contains the best row."""
    out_of_memory_probability: float | None = None
    fit: Fit | None = None
    """Whether it fits, as a word; None for serving."""
    reasons: tuple[str, ...] = ()
    """Why it is infeasible."""


def ranked_row(
    row: Recommendation | ServingRecommendation,
    *,
    query: Query,
    chosen: bool = False,
    settings_href: str | None = None,
) -> RankedRow:
    """Return the row for a recommendation. `query` is as typed, with registered names."""
    this, known, mapping = (
        Configuration.from_row(row, query=query),
        row.preferred_estimate,
        schema.query_mapping(query),
    )
    text, memory = this.text(), known.memory
    if isinstance(row, ServingRecommendation):
        columns = SERVING_FIGURES
        heading = serving_arithmetic(row.parallel, replicas=row.preferred_estimate.replicas)
        wide, waits = "", _waiting(row.preferred_estimate, row.parallel)
    else:
        columns = TRAINING_FIGURES
        heading = formats.arithmetic(row.parallel, formats.device_of(mapping))
        wide, waits = stall_words(row.preferred_estimate), ""
    return RankedRow.of(
        row,
        arithmetic=heading,
        details=formats.configuration_details(this),
        unmeasured=tuple(unmeasured_features(known)),
        why_wide=wide,
        waiting=waits,
        href=address("/configurations", {"query": text}),
        run_href=address("/run", {"query": text}),
        settings_href=settings_href,
        chosen=chosen,
        **page_values(columns, row),
        capacity_bytes=memory.capacity_bytes if memory else None,
        out_of_memory_probability=known.out_of_memory_probability,
        reasons=tuple(reason.message for reason in known.reasons),
    )


def best_by_layout(rows: Iterable[Recommendation]) -> list[Recommendation]:
    """Return the first row of each layout.

    Among the first rows, settings other than the layout hardly change the throughput.
    """
    first: dict[tuple[int, ...], Recommendation] = {}
    for row in rows:
        first.setdefault(tuple(getattr(row.parallel, name) for name in LAYOUT), row)
    return list(first.values())


def _waiting(estimate: InferenceEstimate, config: ServingConfig) -> str:
    """Return `40 of 64 requests fit in the KV cache; the others wait`; empty if none waits."""
    if not estimate.some_wait:
        return ""
    running, flying = estimate.running_requests, estimate.concurrency
    room = (
        "fit in the KV cache"
        if estimate.kv_cache_limited
        else f"run under the engine limit {config.max_num_seqs:,}"
    )
    return f"{running:,.0f} of {flying:,.0f} requests {room}; the others wait"


def run_href(configuration: Configuration) -> str:
    """Return the URL of the page with the configuration's launch commands."""
    return address("/run", {"query": configuration.text()})
