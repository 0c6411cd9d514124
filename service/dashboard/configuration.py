"""Page /configurations: one configuration in full. Its query is part of the URL."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from fastapi import APIRouter
from fastapi import Query as QueryParameter

from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Reason
from hp_tool.domain.serving import InferenceEstimate
from hp_tool.errors import HpToolError
from hp_tool.questions import anatomy, schema
from hp_tool.questions.anatomy import Placement, Schedule, StageAnatomy
from hp_tool.questions.answers import EstimateAnswer, answer_estimate
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.problem import problem_of
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.evaluate import ResolvedConfiguration
from hp_tool.wording.columns import unmeasured_features
from hp_tool.wording.familiarity import familiarity_words
from hp_tool.wording.fit import (
    cuda_graphs_words,
    memory_range_words,
    narrower_range_words,
    out_of_memory_words,
    recipe_words,
    stall_words,
)
from hp_tool.wording.words import cache_words, serving_arithmetic
from service.api.bodies import read_query
from service.api.dependencies import CalibrationsDep, FindDep, StoreDep
from service.api.views import View
from service.dashboard import formats
from service.dashboard.ask_question import question_of
from service.dashboard.evidence import (
    SearchId,
    calibration_words,
    estimate_of_search,
    list_sources,
    search_evidence_words,
)
from service.dashboard.figures import BarSpec, Stack, stack
from service.dashboard.fixes import FixRow, fix_row
from service.dashboard.live import Running
from service.dashboard.metrics import ComparedRun, Metric, serving_metrics, training_metrics
from service.dashboard.new_search_form import to_values
from service.dashboard.page import (
    MAX_QUERY,
    ErrorFields,
    Fact,
    Page,
    Tone,
    address,
    compare_href,
    configuration_href,
    error_status,
    page_at,
)
from service.dashboard.verdict import Agreement, Before

MAX_STAGES = 16
"""Maximum number of stages to draw: the fullest one and an even sample of the others."""
TONE_OF_FIT: dict[str, Tone] = {
    "fits": "good",
    "tight": "warn",
    "too little headroom": "warn",
    "unlikely to fit": "bad",
}
OF_THE_WHOLE = ("days", "hours", "dollars", "joules")
"""Units of totals for a whole training or service. They are omitted if the configuration does not
fit.
"""
QueryText = Annotated[
    str,
    QueryParameter(
        max_length=MAX_QUERY, description="A query of one configuration, as JSON or YAML"
    ),
]
router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationView(View):
    """Predictions for one configuration."""

    kind: Literal["training", "inference"]
    subject: str
    """Model and cluster."""
    workload: str
    """Work per step or request."""
    device: str
    """Name for one device: GPU, or device for a CPU process."""
    heading: str
    """Parallel sizes, such as TP 8 x PP 4 x DP 2 = 64 GPUs."""
    details: str
    familiarity: str
    """Sentence on how similar the nearest measured runs are."""
    unmeasured: tuple[str, ...]
    """Features that no published run has. They widen the intervals."""
    verdict: str
    verdict_note: str
    """Probability of running out of memory, and its interval; empty if it fits."""
    answer: str
    """The main metrics in a sentence; empty if there are none."""
    chance: str
    """Probability of running out of memory, in words; empty for serving."""
    tone: Tone
    feasible: bool
    reasons: tuple[Reason, ...]
    fixes: tuple[FixRow, ...]
    metrics: tuple[Metric, ...]
    confidence: float | None
    """Confidence level of the metrics' intervals."""
    wide: str
    """Why the step time may be much longer; empty if no slow steps are expected."""
    narrower: str
    """How to narrow the step-time interval; empty if there is no way."""
    left_open: tuple[str, ...]
    """Step times for values of open settings, such as CUDA graphs or the current recipe."""
    evidence: str
    """Description of the measurements that its predictions are based on."""
    evidence_href: str | None
    """URL of the page with these measurements; None if the predictions are uncalibrated."""
    memory: Stack | None
    """Memory by pipeline stage."""
    shown_stages: int
    num_stages: int
    time: Stack | None
    """Parts of a training step or a served request."""
    provenance: tuple[Fact, ...]
    query_text: str
    href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationPage(Page):
    """One configuration in full. If the query fails, `view` is None and `error` has the reason."""

    view: ConfigurationView | None = None
    schedule: Schedule | None = None
    bubble_fraction: float | None = None
    """Bubble's fraction of the whole step. The chart may show only a part of the step."""
    placement: Placement | None = None
    form_href: str | None = None
    """URL of the form that starts a search with this query."""
    explorer_href: str | None = None
    compare_href: str | None = None
    """URL of the comparison with the recommended configuration of the query; None if the query lets
    hp_tool choose the number of GPUs.
    """
    run: ComparedRun | None = None
    """The run, on the page of a search's run."""
    measured: Agreement | None = None
    """The run's measurement compared with its prediction before the run."""
    before: Before | None = None
    """Prediction before the run started."""
    steps: Stack | None = None
    """Step time predicted before the run, measured, and predicted now, on one axis."""
    why: str = ""
    """Why the search chose this run."""
    running: Running | None = None
    """Progress of the run, until it has ended."""
    log: str = ""
    """End of the run's log, so far or final."""
    search_href: str | None = None
    search_name: str = ""
    error: ErrorFields | None = None


@page_at(
    router, "/configurations", template="configuration.html", section="Ask", status=error_status
)
def configuration_context(
    query: QueryText,
    calibrations: CalibrationsDep,
    find: FindDep,
    store: StoreDep,
    search: SearchId = None,
) -> ConfigurationPage:
    """Return the predictions for one configuration.

    `search` is a search with its evidence; without one the newest calibration is used.
    """
    json_href = address("/configurations.json", {"query": query, "search": search})
    record = store.get_search(search_id=search) if search else None
    try:
        configured = read_query(query.encode(), find=find)
        known = None if record is None else estimate_of_search(record, query=configured)
        page = configuration_page(
            configured, json_href=json_href, calibrations=calibrations, known=known
        )
        if known is not None and record is not None and page.view is not None:
            page = replace(
                page,
                view=replace(
                    page.view,
                    evidence=search_evidence_words(record),
                    evidence_href=f"/searches/{record.id}",
                ),
            )
        return page
    except HpToolError as error:
        return ConfigurationPage(
            title="A configuration", json_href=json_href, error=error.as_dict()
        )


def configuration_page(
    query: Query,
    *,
    json_href: str,
    calibrations: Calibrations | None,
    known: Estimate | InferenceEstimate | None = None,
) -> ConfigurationPage:
    """Return the page of the query's configuration; `known` is a search's estimate of it.

    Raises:
        HpToolError: The query is invalid.
    """
    configuration = problem_of(query).configuration
    view, estimate = configuration_view(
        query, configuration=configuration, calibrations=calibrations, known=known
    )
    form_href = address("/searches/new", to_values(schema.query_mapping(query)))
    page = ConfigurationPage(
        title=f"{view.heading}, {view.subject}", json_href=json_href, view=view, form_href=form_href
    )
    if configuration is None or not isinstance(estimate, Estimate):
        return page
    problem, config = configuration.problem, configuration.config
    this = Configuration(query=query, parallel=config)
    # Drop a default layout, because the explorer may change the number of stages.
    free = replace(
        query, parallel=replace(query.parallel, pipeline_layout=problem.parallel.pipeline_layout)
    )
    asked = question_of(replace(this, query=free))
    page = replace(
        page,
        explorer_href=None if asked is None else asked.href(),
        compare_href=None
        if query.objective == "min_gpus"
        else compare_href(this),  # This comparison takes longer.
    )
    if estimate.time is None:
        return page
    return replace(
        page,
        schedule=anatomy.execute_schedule(
            problem=problem,
            config=config,
            each=anatomy.stage_anatomies(problem=problem, config=config),
        ),
        bubble_fraction=estimate.time.parts_s["pipeline_bubble"] / estimate.time.step_s,
        placement=anatomy.place_ranks(config=config, cluster=problem.cluster),
    )


def configuration_view(
    query: Query,
    *,
    configuration: ResolvedConfiguration | None = None,
    calibrations: Calibrations | None,
    with_fixes: bool = True,
    known: Estimate | InferenceEstimate | None = None,
) -> tuple[ConfigurationView, Estimate | InferenceEstimate]:
    """Return the view of the query's configuration, and its estimate.

    Args:
        configuration: The training query's configuration, if already resolved.
        known: A search's estimate, used instead of the newest calibration's estimate.
    """
    configuration = configuration or problem_of(query).configuration
    answer = answer_estimate(
        query, configuration=configuration, with_fixes=with_fixes, calibrations=calibrations
    )
    if isinstance(known, InferenceEstimate):
        answer = replace(answer, estimate=known)
    elif known is not None:
        answer = replace(answer, calibrated_estimate=known)
    stages = (
        configuration
        and answer.estimate.memory
        and anatomy.stage_anatomies(problem=configuration.problem, config=configuration.config)
    )
    return _view(query, answer, stages or (), calibrations), answer.estimate


def _view(
    query: Query,
    answer: EstimateAnswer,
    stages: Sequence[StageAnatomy],
    calibrations: Calibrations | None,
) -> ConfigurationView:
    """Return the view. `stages` are the pipeline stages of a legal training configuration."""
    estimate, calibrated = answer.estimate, answer.calibrated_estimate
    mapping = schema.query_mapping(query)
    memory, device = None, formats.device_of(mapping)
    assert estimate.parallel is not None
    if isinstance(estimate, InferenceEstimate):
        config = estimate.parallel
        heading = serving_arithmetic(config, replicas=estimate.replicas)
        metrics = serving_metrics(estimate, device)
        if estimate.memory is not None:
            memory = stack(
                [
                    BarSpec(
                        label=f"Fullest {device}",
                        parts=estimate.memory.parts_bytes,
                        limit=estimate.memory.capacity_bytes,
                    )
                ],
                unit="bytes",
            )
        time = (
            stack([BarSpec(label="One request", parts=estimate.parts_s)], unit="seconds")
            if estimate.parts_s
            else None
        )
        num_stages, shown_stages = config.pipeline_parallel_size, 1
    else:
        heading = formats.arithmetic(estimate.parallel, device)
        metrics = training_metrics(estimate, calibrated, device)
        memory = _memory(stages, estimate, calibrated or estimate) if stages else None
        time = _time(estimate, calibrated)
        num_stages, shown_stages = len(stages), min(len(stages), MAX_STAGES)
    this = Configuration(query=query, parallel=estimate.parallel)
    known = calibrated or estimate
    verdict, tone, verdict_note = _verdict(estimate, calibrated)
    return ConfigurationView.of(
        estimate,
        kind=query.kind,
        subject=formats.subject(mapping),
        workload=formats.workload(mapping),
        device=device,
        heading=heading,
        details=formats.configuration_details(this),
        verdict=verdict,
        verdict_note=verdict_note,
        chance=out_of_memory_words(known) if isinstance(known, Estimate) else "",
        answer=" ".join(
            (
                _answer(metrics, memory, time, known=known, device=device),
                *_cache(known),
                *_missed(known),
            )
        ),
        familiarity=""
        if known.familiarity is None
        else familiarity_words(known.familiarity, serves=query.kind == "inference"),
        unmeasured=tuple(unmeasured_features(known)),
        tone=tone,
        feasible=known.feasible,
        reasons=known.reasons,
        fixes=()
        if known.feasible
        else tuple(
            fix_row(fix, of=this, before=estimate, calibrated=calibrated, calibrations=calibrations)
            for fix in estimate.fixes
        ),
        metrics=tuple(
            row
            for row in metrics
            if known.memory is None or _fits(known) or row.unit not in OF_THE_WHOLE
        ),
        confidence=estimate.intervals.confidence if estimate.intervals else None,
        wide="" if isinstance(known, InferenceEstimate) else stall_words(known),
        narrower="" if isinstance(known, InferenceEstimate) else narrower_range_words(known),
        left_open=()
        if isinstance(known, InferenceEstimate)
        else tuple(filter(None, (cuda_graphs_words(known), recipe_words(known)))),
        evidence=calibration_words(calibrated),
        evidence_href="/calibration" if calibrated is not None else None,
        memory=memory,
        shown_stages=shown_stages,
        num_stages=num_stages,
        time=time,
        provenance=list_sources(estimate, calibrated),
        query_text=json.dumps(mapping, indent=2, ensure_ascii=False),
        href=configuration_href(this),
    )


def _answer(
    metrics: Sequence[Metric],
    memory: Stack | None,
    time: Stack | None,
    *,
    known: Estimate | InferenceEstimate,
    device: str,
) -> str:
    """Return the main metrics in a sentence.

    For example: Needs 60.7 GiB of 75.1 GiB on the fullest GPU; a step takes 21.8 s (20.1 s to 23.5
    s), 71% of it compute.
    """
    figures = {metric.name: metric for metric in metrics}
    takes = "takes" if known.feasible else "would take"
    parts = []
    if memory is not None and memory.limit is not None and (needed := figures.get("Memory")):
        parts.append(
            f"Needs {formats.measured(needed.value, 'bytes')} of {formats.gib(memory.limit)} on "
            f"the fullest {device}"
        )
    if time is not None and (step := figures.get("Step time")):
        bar = time.bars[0]
        most = max(bar.values, key=bar.values.__getitem__)
        share = formats.share(bar.values[most] / bar.total)
        parts.append(
            f"a step {takes} {formats.seconds(step.value)}{_between(step)}, {share} of it "
            f"{formats.words(most)}"
        )
    if (ttft := figures.get("Time to first token")) and (
        tpot := figures.get("Time per output token")
    ):
        first, each = (formats.seconds(metric.value) + _between(metric) for metric in (ttft, tpot))
        parts.append(f"{first} to the first token, {each} per token after it")
    return "; ".join(parts) + "." if parts else ""


def _missed(known: Estimate | InferenceEstimate) -> list[str]:
    """Return a sentence per missed target."""
    return [
        formats.sentence(reason.message.partition(": ")[0])
        for reason in known.reasons
        if reason.code == "target_missed"
    ]


def _between(metric: Metric) -> str:
    return (
        f" ({formats.seconds(metric.low)} to {formats.seconds(metric.high)})"
        if metric.low is not None
        else ""
    )


def _verdict(
    estimate: Estimate | InferenceEstimate, calibrated: Estimate | None
) -> tuple[str, Tone, str]:
    """Return the fit as a word, its tone, and a note with probability and interval if in doubt."""
    known = calibrated or estimate
    fits = _fits(known)
    word = known.fit or ("fits" if fits else "does not fit")
    note = (
        f"{out_of_memory_words(known)}; {memory_range_words(known)}"
        if isinstance(known, Estimate) and word != "fits"
        else ""
    )
    if known.feasible or not fits:
        return word, TONE_OF_FIT.get(word, "bad"), note
    if known.memory is None:
        return "not possible", "bad", ""
    missed = any(reason.code == "target_missed" for reason in known.reasons)
    return ("misses a target", "warn", note) if missed else ("not acceptable", "bad", note)


def _cache(known: Estimate | InferenceEstimate) -> list[str]:
    cache = known.kv_cache if isinstance(known, InferenceEstimate) else None
    return [] if cache is None else [f"{cache_words(cache)}."]


def _fits(known: Estimate | InferenceEstimate) -> bool:
    return known.memory is None or known.memory.total_bytes <= known.memory.capacity_bytes


def _memory(stages: Sequence[StageAnatomy], estimate: Estimate, known: Estimate) -> Stack:
    """Return the memory by stage, with the interval of the fullest stage.

    If `known` is calibrated, the calibration applies to every stage.
    """
    assert estimate.memory is not None and known.memory is not None
    before, after = estimate.memory.parts_bytes, known.memory.parts_bytes
    factors = {name: after[name] / size for name, size in before.items() if size}
    added = {name: size for name, size in after.items() if not before.get(name)}
    fullest = max(stages, key=lambda stage: stage.total_bytes / stage.capacity_bytes).rank
    chosen: Sequence[int] = range(len(stages))
    if len(stages) > MAX_STAGES:
        others = [rank for rank in chosen if rank != fullest]
        evenly = {
            others[round(k * (len(others) - 1) / (MAX_STAGES - 2))] for k in range(MAX_STAGES - 1)
        }
        chosen = sorted(evenly | {fullest})
    interval = known.intervals.memory_total_bytes if known.intervals else None
    rows = [
        BarSpec(
            label=f"Stage {stage.rank}",
            note=_layers_of(stage),
            parts={
                name: size * factors.get(name, 1.0) + added.get(name, 0.0)
                for name, size in stage.memory_bytes.items()
            },
            limit=stage.capacity_bytes,
            interval=interval if stage.rank == fullest else None,
        )
        for stage in map(stages.__getitem__, chosen)
    ]
    return stack(rows, unit="bytes")


def _layers_of(stage: StageAnatomy) -> str:
    ends = [
        name
        for name, present in (("embedding", stage.holds_embedding), ("output", stage.holds_output))
        if present
    ]
    number = f"{round(stage.layers, 2):g}"
    return " + ".join([f"{number} layer{'s' if number != '1' else ''}", *ends])


def _time(estimate: Estimate, calibrated: Estimate | None) -> Stack | None:
    if estimate.time is None:
        return None
    rows = [_step("One step", estimate)]
    if calibrated is not None and calibrated.time is not None:
        rows = [_step("After calibration", calibrated), replace(rows[0], label="Cost model")]
    return stack(rows, unit="seconds")


def _step(label: str, estimate: Estimate) -> BarSpec:
    assert estimate.time is not None
    interval = estimate.intervals.step_s if estimate.intervals else None
    return BarSpec(label=label, parts=estimate.time.parts_s, interval=interval)
