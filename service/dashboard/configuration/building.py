"""From a query to what the pages of its configuration show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from hp_tool import anatomy, training
from hp_tool.anatomy import StageAnatomy
from hp_tool.answers import estimate_answer
from hp_tool.domain.hardware import ClusterQuery
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.queries import schema
from hp_tool.render.words import serving_arithmetic
from hp_tool.training.calibrated import Calibrations
from hp_tool.training.evaluate import ResolvedConfiguration, resolve_configuration
from service.dashboard import formats
from service.dashboard.configuration.contexts import ConfigurationPage, ConfigurationView
from service.dashboard.configuration.facts import facts_of
from service.dashboard.configuration.mending import mend_rows
from service.dashboard.configuration.metrics import serving_metrics, training_metrics
from service.dashboard.contexts import Tone
from service.dashboard.figures import Row, Stack, stack
from service.dashboard.links import compare_href, configuration_href, configuration_text, explorer_href

MAX_STAGES = 16
"""Drawn; of more, the fullest and others chosen evenly."""
SERVING_MEMORY = ("weights", "kv_cache", "activations", "logits", "overhead")


def configuration_page(query: Query, *, calibrations: Calibrations | None) -> ConfigurationPage:
    """The page of the one configuration that the query describes. Raises HpToolError."""
    configuration = None if query.kind == "inference" else resolve_configuration(query)
    view, found = configuration_view(query, configuration=configuration, calibrations=calibrations)
    text = configuration_text(query)
    schedule = placement = bubble = None
    if configuration is not None and isinstance(found, Estimate) and found.time is not None:
        problem, config = configuration.problem, configuration.config
        each = anatomy.stages(problem=problem, config=config)
        schedule = anatomy.schedule(problem=problem, config=config, each=each)
        bubble = found.time.parts_s["pipeline_bubble"] / found.time.step_s
        placement = anatomy.placement(config=config, cluster=problem.cluster)
    return ConfigurationPage(
        title=f"{view.heading}, {view.subject}",
        json_href=configuration_href(query).replace("/configurations?", "/configurations.json?"),
        view=view,
        schedule=schedule,
        bubble_fraction=bubble,
        placement=placement,
        explorer_href=explorer_href(query, found.parallel) if isinstance(found, Estimate) else None,
        compare_href=_with_the_best(query, found, text),
        error=None,
    )


def configuration_view(
    query: Query,
    *,
    configuration: ResolvedConfiguration | None = None,
    calibrations: Calibrations | None,
    with_fixes: bool = True,
) -> tuple[ConfigurationView, Estimate | InferenceEstimate]:
    """What is shown of a configuration wherever it is shown, and the estimate it comes from. `configuration`: the training
    query's, if it was resolved earlier.
    """
    if configuration is None and query.kind == "training":
        configuration = resolve_configuration(query)
    answer = estimate_answer(query, configuration=configuration, with_fixes=with_fixes, calibrations=calibrations)
    if isinstance(answer.estimate, InferenceEstimate):
        return _serving_view(query, answer.estimate), answer.estimate
    assert configuration is not None
    return _training_view(configuration, answer.estimate, answer.calibrated_estimate), answer.estimate


def _training_view(configuration: ResolvedConfiguration, found: Estimate, learnt: Estimate | None) -> ConfigurationView:
    assert found.parallel is not None
    query = configuration.query
    memory, shown, stages = None, 0, 0
    if found.memory is not None:
        each = anatomy.stages(problem=configuration.problem, config=found.parallel)
        memory, shown, stages = _memory(each), min(len(each), MAX_STAGES), len(each)
    verdict, tone = _verdict(found)
    return ConfigurationView(
        kind="training",
        subject=subject(query),
        heading=formats.arithmetic(found.parallel),
        details=formats.details(found.parallel),
        verdict=verdict,
        tone=tone,
        feasible=found.feasible,
        reasons=found.reasons,
        mends=mend_rows(query, found),
        metrics=training_metrics(found, learnt),
        confidence=found.intervals.confidence if found.intervals else None,
        memory=memory,
        shown_stages=shown,
        num_stages=stages,
        time=_time(found, learnt),
        provenance=facts_of(found, learnt),
        query_text=json.dumps(schema.query_mapping(query), indent=2, ensure_ascii=False),
        href=configuration_href(query),
    )


def _serving_view(query: Query, found: InferenceEstimate) -> ConfigurationView:
    assert found.parallel is not None
    memory = None
    if found.memory is not None:
        parts = {name: float(getattr(found.memory, f"{name}_bytes")) for name in SERVING_MEMORY}
        memory = stack([Row(label="Fullest GPU", parts=parts, limit=found.memory.capacity_bytes)], unit="bytes")
    verdict, tone = _verdict(found)
    limits = f"up to {found.parallel.max_num_seqs} requests at once, {found.parallel.max_num_batched_tokens:,} tokens a pass"
    return ConfigurationView(
        kind="inference",
        subject=subject(query),
        heading=serving_arithmetic(found.parallel, replicas=found.replicas),
        details=limits,
        verdict=verdict,
        tone=tone,
        feasible=found.feasible,
        reasons=found.reasons,
        mends=mend_rows(query, found),
        metrics=serving_metrics(found),
        confidence=found.intervals.confidence if found.intervals else None,
        memory=memory,
        shown_stages=1,
        num_stages=found.parallel.pipeline_parallel_size,
        time=stack([Row(label="One request", parts=found.parts_s)], unit="seconds") if found.parts_s else None,
        provenance=facts_of(found),
        query_text=json.dumps(schema.query_mapping(query), indent=2, ensure_ascii=False),
        href=configuration_href(query),
    )


def subject(query: Query) -> str:
    """Model on cluster, in the query's own words."""
    model = query.model if isinstance(query.model, str) else (_name(query.model) or "own model")
    if isinstance(query.cluster, str):
        return f"{model} on {query.cluster}"
    cluster: ClusterQuery = query.cluster
    gpu = cluster.gpu or cluster.node_type or "GPU"
    device = gpu if isinstance(gpu, str) else gpu.name
    return f"{model} on {cluster.num_gpus} x {device}" if cluster.num_gpus else f"{model} on {device}"


def _name(model: object) -> str | None:
    found = model.get("name") if isinstance(model, dict) else getattr(model, "name", None)
    return found if isinstance(found, str) else None


def _verdict(found: Estimate | InferenceEstimate) -> tuple[str, Tone]:
    if found.feasible:
        return "fits", "good"
    if found.memory is None:
        return "not possible", "bad"
    if (
        any(reason.code == "target_missed" for reason in found.reasons)
        and found.memory.total_bytes <= found.memory.capacity_bytes
    ):
        return "misses a target", "warn"
    return "does not fit", "bad"


def _memory(each: Sequence[StageAnatomy]) -> Stack:
    """Stages one below the other; of many the fullest and others chosen evenly."""
    fullest = max(each, key=lambda stage: stage.total_bytes / stage.capacity_bytes).rank
    chosen: Sequence[int] = range(len(each))
    if len(each) > MAX_STAGES:
        evenly = {round(k * (len(each) - 1) / (MAX_STAGES - 2)) for k in range(MAX_STAGES - 1)}
        chosen = sorted(evenly | {fullest})
    rows = [
        Row(
            label=f"Stage {rank}",
            note=_held(each[rank]),
            parts=each[rank].memory_bytes,
            limit=each[rank].capacity_bytes,
        )
        for rank in chosen
    ]
    return stack(rows, unit="bytes")


def _held(stage: StageAnatomy) -> str:
    ends = [name for name, held in (("embedding", stage.holds_embedding), ("output", stage.holds_output)) if held]
    number = f"{round(stage.layers, 2):g}"
    return " + ".join([f"{number} layer{'s' if number != '1' else ''}", *ends])


def _time(found: Estimate, learnt: Estimate | None) -> Stack | None:
    if found.time is None:
        return None
    rows = [Row(label="One step", parts=found.time.parts_s)]
    if learnt is not None and learnt.time is not None:
        rows = [replace(rows[0], label="Cost model"), Row(label="After calibration", parts=learnt.time.parts_s)]
    return stack(rows, unit="seconds")


def _with_the_best(query: Query, found: Estimate | InferenceEstimate, asked: str) -> str | None:
    """Beside the fastest of the same question, all axes free."""
    if isinstance(found, InferenceEstimate) or query.objective == "min_gpus":
        return None
    free = replace(query, parallel=type(query.parallel)())
    best = training.recommend(query=free, top=1).recommendations
    if not best or best[0].parallel == found.parallel:
        return None
    return compare_href(asked, configuration_text(free, parallel=best[0].parallel))
