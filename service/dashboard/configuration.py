"""/configurations: one configuration in full. Its query is part of the address."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from fastapi import Query as QueryParameter

from hp_tool import anatomy, serving
from hp_tool.anatomy import Placement, Schedule, StageAnatomy
from hp_tool.catalog import cluster
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Mend, Reason
from hp_tool.domain.serving import InferenceEstimate, ServingMend
from hp_tool.errors import HpToolError
from hp_tool.queries import schema
from hp_tool.render.words import serving_arithmetic
from hp_tool.training import recommend as app
from hp_tool.training.calibrated import Corrections
from hp_tool.training.evaluate import calibrated, predicted, single
from hp_tool.training.problem import resolve_training
from service.api.dependencies import CorrectionsDep, FindDep
from service.api.queries import read_query
from service.dashboard import formats
from service.dashboard.contexts import ErrorFields, Fact, Page, Tone
from service.dashboard.explorer_settings import explorer_href
from service.dashboard.figures import BarSpec, Stack, stack
from service.dashboard.links import MAX_QUERY, address, compare_href, configuration_href, configuration_text
from service.dashboard.metrics import Metric, fix_metrics, serving_metrics, training_metrics
from service.dashboard.page_and_json import error_status, page_at

MAX_STAGES = 16
"""Pipeline stages drawn; of more, the fullest and an even choice of the others."""
SERVING_MEMORY = ("weights", "kv_cache", "activations", "logits", "overhead")
QueryText = Annotated[str, QueryParameter(max_length=MAX_QUERY, description="A query of one configuration, as JSON or YAML")]

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class FixRow:
    """A change that makes an infeasible configuration feasible, and its price."""

    change: str
    href: str
    compare_href: str
    figures: tuple[Metric, ...]
    """The same ones for every fix."""
    remaining: tuple[str, ...]
    """Targets that it still misses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationView:
    """Predictions for one configuration."""

    kind: Literal["training", "inference"]
    subject: str
    """Model on cluster."""
    heading: str
    """The arithmetic: TP 8 x PP 4 x DP 2 = 64 GPUs."""
    details: str
    verdict: str
    tone: Tone
    feasible: bool
    reasons: tuple[Reason, ...]
    mends: tuple[FixRow, ...]
    metrics: tuple[Metric, ...]
    confidence: float | None
    """Of the metrics' ranges."""
    memory: Stack | None
    """By pipeline stage."""
    shown_stages: int
    num_stages: int
    time: Stack | None
    """Of a training step or a served request."""
    provenance: tuple[Fact, ...]
    query_text: str
    href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationPage(Page):
    """One configuration in full. If the query cannot be answered, `view` is None and `error` says why."""

    view: ConfigurationView | None = None
    schedule: Schedule | None = None
    bubble_fraction: float | None = None
    """Share of the bubble in the whole step, of which the drawing may show a part."""
    placement: Placement | None = None
    explorer_href: str | None = None
    compare_href: str | None = None
    """Comparison with the fastest configuration of the same query; None if this is it or none is feasible."""
    error: ErrorFields | None = None


@page_at(router, "/configurations", template="configuration.html", section="Explorer", status=error_status)
def configuration_context(query: QueryText, corrections: CorrectionsDep, find: FindDep) -> ConfigurationPage:
    """One configuration, as shown on its page."""
    json_href = address("/configurations.json", {"query": query})
    try:
        return configuration_page(read_query(query.encode(), find=find), json_href=json_href, corrections=corrections)
    except HpToolError as error:
        return ConfigurationPage(title="A configuration", json_href=json_href, error=error.as_dict())


def configuration_page(query: Query, *, json_href: str, corrections: Corrections) -> ConfigurationPage:
    """Context of the page of the query's one configuration. Raises HpToolError."""
    view, found = configuration_view(query, corrections=corrections)
    schedule = placement = bubble = None
    if isinstance(found, Estimate) and found.parallel is not None and found.time is not None:
        problem = resolve_training(query)
        each = anatomy.stages(problem=problem, config=found.parallel)
        schedule = anatomy.schedule(problem=problem, config=found.parallel, each=each)
        bubble = found.time.parts_s["pipeline_bubble"] / found.time.step_s
        placement = anatomy.placement(config=found.parallel, cluster=problem.cluster)
    return ConfigurationPage(
        title=f"{view.heading}, {view.subject}",
        json_href=json_href,
        view=view,
        schedule=schedule,
        bubble_fraction=bubble,
        placement=placement,
        explorer_href=explorer_href(query, found.parallel) if isinstance(found, Estimate) else None,
        compare_href=_compare_with_fastest_href(query, found),
    )


def configuration_view(
    query: Query, *, corrections: Corrections, with_mends: bool = True
) -> tuple[ConfigurationView, Estimate | InferenceEstimate]:
    """Predictions for the query's one configuration, as pages show them, and the estimate behind them."""
    if query.kind == "inference":
        served = serving.estimate(query=query, with_mends=with_mends)
        return _serving_view(query, served), served
    asked = single(query)
    found = predicted(asked=asked)
    if with_mends:
        found = app.with_mends_of(asked=asked, found=found)
    learnt = calibrated(asked=asked, corrections=corrections)
    return _training_view(query, found, learnt), found


def _training_view(query: Query, estimate: Estimate, calibrated: Estimate | None) -> ConfigurationView:
    assert estimate.parallel is not None
    stages: Sequence[StageAnatomy] = ()
    if estimate.memory is not None:
        stages = anatomy.stages(problem=resolve_training(query), config=estimate.parallel)
    return _view(
        query,
        estimate,
        calibrated,
        heading=formats.arithmetic(estimate.parallel),
        details=formats.details(estimate.parallel),
        metrics=training_metrics(estimate, calibrated),
        memory=_memory(stages) if stages else None,
        shown_stages=min(len(stages), MAX_STAGES),
        num_stages=len(stages),
        time=_time(estimate, calibrated),
    )


def _serving_view(query: Query, estimate: InferenceEstimate) -> ConfigurationView:
    config = estimate.parallel
    assert config is not None
    memory = None
    if estimate.memory is not None:
        parts = {name: float(getattr(estimate.memory, f"{name}_bytes")) for name in SERVING_MEMORY}
        memory = stack([BarSpec(label="Fullest GPU", parts=parts, limit=estimate.memory.capacity_bytes)], unit="bytes")
    return _view(
        query,
        estimate,
        heading=serving_arithmetic(config, replicas=estimate.replicas),
        details=f"up to {config.max_num_seqs} concurrent requests, {config.max_num_batched_tokens:,} tokens per pass",
        metrics=serving_metrics(estimate),
        memory=memory,
        shown_stages=1,
        num_stages=config.pipeline_parallel_size,
        time=stack([BarSpec(label="One request", parts=estimate.parts_s)], unit="seconds") if estimate.parts_s else None,
    )


def _view(
    query: Query,
    estimate: Estimate | InferenceEstimate,
    calibrated: Estimate | None = None,
    *,
    heading: str,
    details: str,
    metrics: tuple[Metric, ...],
    memory: Stack | None,
    shown_stages: int,
    num_stages: int,
    time: Stack | None,
) -> ConfigurationView:
    mapping = schema.query_mapping(query)
    verdict, tone = _verdict(estimate)
    return ConfigurationView(
        kind=query.kind,
        subject=formats.subject(mapping),
        heading=heading,
        details=details,
        verdict=verdict,
        tone=tone,
        feasible=estimate.feasible,
        reasons=estimate.reasons,
        mends=tuple(_fix_row(query, fix) for fix in estimate.mends),
        metrics=metrics,
        confidence=estimate.intervals.confidence if estimate.intervals else None,
        memory=memory,
        shown_stages=shown_stages,
        num_stages=num_stages,
        time=time,
        provenance=_provenance(estimate, calibrated),
        query_text=json.dumps(mapping, indent=2, ensure_ascii=False),
        href=configuration_href(query),
    )


def _verdict(estimate: Estimate | InferenceEstimate) -> tuple[str, Tone]:
    if estimate.feasible:
        return "fits", "good"
    if estimate.memory is None:
        return "not possible", "bad"
    misses_target = any(reason.code == "target_missed" for reason in estimate.reasons)
    if misses_target and estimate.memory.total_bytes <= estimate.memory.capacity_bytes:
        return "misses a target", "warn"
    return "does not fit", "bad"


def _fix_row(query: Query, fix: Mend | ServingMend) -> FixRow:
    grown = query
    if fix.num_gpus != cluster(query.cluster).num_gpus:
        named = ClusterQuery(node_type=query.cluster) if isinstance(query.cluster, str) else query.cluster
        grown = replace(query, cluster=replace(named, num_gpus=fix.num_gpus))
    return FixRow(
        change=fix.change,
        href=configuration_href(grown, parallel=fix.parallel),
        compare_href=compare_href(configuration_text(query), configuration_text(grown, parallel=fix.parallel)),
        figures=fix_metrics(fix),
        remaining=tuple(reason.message for reason in fix.remaining),
    )


def _memory(stages: Sequence[StageAnatomy]) -> Stack:
    fullest = max(stages, key=lambda stage: stage.total_bytes / stage.capacity_bytes).rank
    chosen: Sequence[int] = range(len(stages))
    if len(stages) > MAX_STAGES:
        evenly = {round(k * (len(stages) - 1) / (MAX_STAGES - 2)) for k in range(MAX_STAGES - 1)}
        chosen = sorted(evenly | {fullest})
    rows = [
        BarSpec(
            label=f"Stage {rank}",
            note=_layers_of(stages[rank]),
            parts=stages[rank].memory_bytes,
            limit=stages[rank].capacity_bytes,
        )
        for rank in chosen
    ]
    return stack(rows, unit="bytes")


def _layers_of(stage: StageAnatomy) -> str:
    ends = [name for name, present in (("embedding", stage.holds_embedding), ("output", stage.holds_output)) if present]
    number = f"{round(stage.layers, 2):g}"
    return " + ".join([f"{number} layer{'s' if number != '1' else ''}", *ends])


def _time(estimate: Estimate, calibrated: Estimate | None) -> Stack | None:
    if estimate.time is None:
        return None
    rows = [BarSpec(label="One step", parts=estimate.time.parts_s)]
    if calibrated is not None and calibrated.time is not None:
        rows = [replace(rows[0], label="Cost model"), BarSpec(label="After calibration", parts=calibrated.time.parts_s)]
    return stack(rows, unit="seconds")


def _compare_with_fastest_href(query: Query, estimate: Estimate | InferenceEstimate) -> str | None:
    if isinstance(estimate, InferenceEstimate) or query.objective == "min_gpus":
        return None
    unrestricted = replace(query, parallel=type(query.parallel)())
    best = app.recommend(query=unrestricted, top=1).recommendations
    if not best or best[0].parallel == estimate.parallel:
        return None
    return compare_href(configuration_text(query), configuration_text(unrestricted, parallel=best[0].parallel))


def _provenance(estimate: Estimate | InferenceEstimate, calibrated: Estimate | None) -> tuple[Fact, ...]:
    """Sources of the estimate's numbers, and those that calibration adds."""
    added = calibrated.provenance if calibrated else {}
    sources = {**estimate.provenance, **{name: value for name, value in added.items() if name not in estimate.provenance}}
    if estimate.intervals is not None and estimate.intervals.source:
        sources["intervals"] = estimate.intervals.source
    texts = {name: _calibration(value) if name == "calibration" else formats.in_words(value) for name, value in sources.items()}
    return tuple(Fact(name=formats.words(name), value=text) for name, text in texts.items() if text)


def _calibration(value: Any) -> str:
    """Version of a stored calibration, its measurements, and its factors."""
    if not isinstance(value, dict):
        return formats.in_words(value)
    shown_elsewhere = ("version", "measurements", "cluster_key", "created_at", "id", "framework", "model_family")
    factors = {name: factor for name, factor in value.items() if name not in shown_elsewhere}
    version, runs, cluster_key, created_at = map(value.get, shown_elsewhere[:4])
    when = f" of {formats.moment(datetime.fromisoformat(created_at))}" if isinstance(created_at, str) else ""
    return f"version {version}{when}, from {runs} runs on {cluster_key}; {formats.in_words(factors)}"
