"""Pages / and /explorer: a query, its answer, and the effect of each setting on a configuration.

The URL contains the query (`ask_question`), for training or serving, on one machine or several.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse
from starlette.responses import Response

from hp_tool import catalog
from hp_tool.catalog.prices import lowest_offers
from hp_tool.domain.latencies import TPOT, TTFT
from hp_tool.domain.parallel import ParallelConfig, RecomputeModule, RecomputeName
from hp_tool.domain.ports import Store
from hp_tool.domain.query import Kind, Query
from hp_tool.domain.result import Estimate, Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import HpToolError, LimitError
from hp_tool.questions import schema
from hp_tool.questions.answers import RecommendAnswer, answer_estimate, answer_recommend
from hp_tool.questions.configuration import NUM_GPUS, Configuration
from hp_tool.questions.form_fields import Section, form_fields
from hp_tool.questions.registered import Find
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.problem import resolve_model, resolve_training
from hp_tool.wording.figures import STEP
from hp_tool.wording.rankings import SERVING, TRAINING, Table
from hp_tool.wording.words import serving_arithmetic
from service.api.bodies import resolve_names
from service.api.dependencies import CalibrationsDep, FindDep, StoreDep, wait_for_turn
from service.dashboard.ask_controls import Control, controls, modules
from service.dashboard.ask_question import (
    AT,
    GPU,
    NODE_TYPE,
    OF_MACHINES,
    PATH,
    Question,
    further_sections,
    layout_values,
    split_names,
)
from service.dashboard.configuration import ConfigurationView, configuration_view
from service.dashboard.figures import BarSpec, Figure, Stack, line, markers, stack
from service.dashboard.formats import count, seconds
from service.dashboard.machines import MachinesAnswer, machines_answer
from service.dashboard.new_search_form import EXTRA, FRAMEWORKS, RecipeChoice, recipe_choices
from service.dashboard.page import (
    ErrorFields,
    Page,
    address,
    configuration_href,
    csv_response,
    json_href,
    render,
    render_html,
    stream_page,
)
from service.dashboard.ranking import RankedRow, best_by_layout, ranked_row, run_href
from service.dashboard.searches import SearchRow, list_newest

TOP: dict[Kind, int] = {"training": 40, "inference": 8}
"""Number of best configurations to rank. The page lists all of them for serving, and the best one
of each layout for training.
"""
MAX_ROWS = 5
"""Maximum number of listed training layouts, each with its fastest configuration."""
VARIANTS: tuple[tuple[str, bool, RecomputeName], ...] = (
    ("Neither", False, "none"),
    ("Sequence parallel", True, "none"),
    ("core_attn recomputed", False, "selective"),
    ("Both", True, "selective"),
    ("Full recomputation", False, "full"),
)
"""Variants in figures 7 and 8 of arXiv 2205.05198: (name, sequence parallel, recompute)."""
THIS_CONFIGURATION = "This configuration"
MIN_SLOWDOWN = 0.005
"""Minimum slowdown from which the displayed configuration is compared with the best."""
RANKED_BY = {
    TTFT.quantile_key: TTFT.noun,
    TPOT.quantile_key: TPOT.noun,
    "cost": "cost",
    "min_gpus": "number of GPUs",
}
"""Serving objectives in words, except the default."""
FRONT = {"color": "--series-3", "width": 2}
LOG_FROM = 20.0
"""Ratio of the highest to the lowest latency above which the axis is logarithmic. Otherwise one
slow configuration would compress the others.
"""
router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Tab:
    """A tab with the same query for another kind or number of machines."""

    label: str
    href: str
    here: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPage(Page):
    """A query and its answer; `error` has the reason of a failure."""

    kind: Kind
    values: dict[str, str]
    """Values of the query, by path."""
    at: dict[str, str] = field(default_factory=dict)
    """Values of the displayed configuration, by path. In the URL, these paths start with `at.`."""
    several: bool
    """Whether the query compares machines. The answer is then in `machines`."""
    tabs: tuple[Tab, ...]
    models: tuple[str, ...]
    gpus: tuple[str, ...]
    priced: tuple[str, ...]
    """GPUs with a price in the price list."""
    clusters: tuple[str, ...]
    """Names of registered clusters."""
    nodes: tuple[str, ...]
    """Suggested servers and clusters."""
    frameworks: tuple[str, ...] = FRAMEWORKS
    recipes: tuple[RecipeChoice, ...]
    sections: tuple[Section, ...]
    """Form sections with further settings."""
    controls: tuple[Control, ...] = ()
    modules: tuple[RecomputeModule, ...] = ()
    """Modules that selective recomputation of this model may name; selected ones first."""
    recomputed: tuple[RecomputeModule, ...] = ()
    view: ConfigurationView | None = None
    configuration_href: str | None = None
    run_href: str | None = None
    """URL of the page with launch commands for the configuration."""
    form_href: str
    """URL of the form that starts a search for this query."""
    recent: tuple[SearchRow, ...] = ()
    """The newest searches."""
    rows: tuple[RankedRow, ...] = ()
    slower_fraction: float | None = None
    """Relative slowdown of the displayed configuration against the best; None if it is the best, or
    if nothing fits.
    """
    nothing_fits: bool = False
    """Whether `rows` lists the nearest infeasible configurations instead."""
    ranked_by: str = ""
    """Figure that orders the serving rows, in words."""
    num_gpus: int | None = None
    """Number of devices of the rows, if the objective determined it."""
    assumed: str | None = None
    """Assumption of the ranking for a setting that the query leaves open, in words."""
    legal: int = 0
    feasible: int = 0
    pruned: int = 0
    """Number of legal configurations beyond `legal` that were not costed, because they cannot be
    among the best.
    """
    tied: int = 0
    """Number of configurations tied with rank 1, including rank 1."""
    rejections: tuple[tuple[str, int], ...] = ()
    """Reasons for rejections with their numbers of candidates, most frequent first."""
    effect_memory: Stack | None = None
    """Memory with sequence parallelism and selective recomputation switched on and off."""
    effect_time: Stack | None = None
    figures: tuple[Figure, ...] = ()
    """Serving throughput against each latency, for plot.js."""
    machines: MachinesAnswer | None = None
    answered: bool = False
    error: ErrorFields | None = None

    @property
    def carried(self) -> dict[str, str]:
        """Values of the query that have no field on this tab."""
        shown = {*form_fields(self.kind), EXTRA, NODE_TYPE, *(OF_MACHINES if self.several else ())}
        shown -= {"cluster"} if self.several else set()
        return {path: text for path, text in self.values.items() if path not in shown}

    @property
    def kept(self) -> dict[str, str]:
        """Parameters of the URL that have no control."""
        shown = {control.name for control in self.controls}
        at = {f"{AT}{path}": text for path, text in self.at.items()}
        values = Question(values=self.values).asked
        return values | {name: text for name, text in at.items() if name not in shown}

    @property
    def further(self) -> tuple[str, ...]:
        """Further settings of the query in words. The page shows them collapsed."""
        known = {each.name: each.label for group in self.sections for each in group.fields}
        return tuple(f"{known[path]} {text}" for path, text in self.values.items() if path in known)

    @property
    def named(self) -> list[str]:
        """Names of machines to compare. `priced` selects all machines in the price list."""
        return split_names(self.values.get(NODE_TYPE))

    @property
    def ticked(self) -> list[str]:
        """GPUs whose machines are compared."""
        return split_names(self.values.get(GPU))

    @property
    def flash(self) -> bool:
        """Whether the training uses flash attention, which stores no scores."""
        return self.values.get("training.attention", "flash") == "flash"

    @property
    def table(self) -> Table:
        """Ranked rows with their columns."""
        if self.machines is not None:
            return self.machines.table
        return Table(columns=TRAINING if self.kind == "training" else SERVING, rows=self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A page without its answer, and the function that computes the answer."""

    page: AskPage
    question: Question
    request: Request
    find: Find
    calibrations: Calibrations | None

    def answer(self) -> AskPage:
        """Return the page with its answer."""
        page = replace(self.page, answered=True)
        try:
            if self.question.several:
                typed = schema.parse_query(self.question.mapping())
                server = str(self.request.base_url).rstrip("/")
                machines = machines_answer(
                    typed,
                    question=self.question,
                    find=self.find,
                    calibrations=self.calibrations,
                    server=server,
                )
                return replace(page, machines=machines)
            return _answered(page, self.question, find=self.find, calibrations=self.calibrations)
        except HpToolError as error:
            return replace(page, error=error.as_dict())

    async def answered(self) -> AskPage:
        """Return the page with its answer. Comparisons of machines wait for the caller's turn."""
        if not self.question.several:
            return await to_thread.run_sync(self.answer)
        try:
            async with wait_for_turn(self.request, self.request.app.state.ranking_turns):
                return await to_thread.run_sync(self.answer)
        except LimitError as error:  # The first part of the page is already sent.
            return replace(self.page, error=error.as_dict(), answered=True)


def read_question(
    request: Request, store: StoreDep, find: FindDep, calibrations: CalibrationsDep
) -> Asked:
    """Return the query in the URL, with the example's values as defaults."""
    question = Question.read(request.url.query).normal()
    kind, several = question.kind, question.several
    registered = store.registered_names(kind="model")
    clusters = tuple(store.registered_names(kind="cluster"))
    kinds: tuple[tuple[str, Kind, bool], ...] = (
        ("Training", "training", False),
        ("Serving", "inference", False),
        ("Several machines", kind, True),
    )
    page = AskPage(
        title="Ask: machines" if several else "Ask" if kind == "training" else "Ask: serving",
        json_href=json_href(question.href()),
        kind=kind,
        values=question.values,
        at=question.at,
        several=several,
        tabs=tuple(
            Tab(
                label=label,
                href=question.tab_href(to, several=many),
                here=several if many else kind == to and not several,
            )
            for label, to, many in kinds
        ),
        models=tuple(sorted({*catalog.names("models"), *registered})),
        gpus=tuple(catalog.names("gpus")),
        priced=tuple(sorted(lowest_offers())),
        clusters=clusters,
        nodes=tuple(sorted({*catalog.names("clusters"), *clusters})),
        recipes=recipe_choices(),
        sections=further_sections(kind, several=several),
        form_href=address("/searches/new", question.values),
        recent=() if several else list_newest(store),
    )
    return Asked(
        page=page, question=question, request=request, find=find, calibrations=calibrations
    )


AskedDep = Annotated[Asked, Depends(read_question)]


@router.get(f"{PATH}.json", response_model=AskPage)
async def ask_json(question: AskedDep) -> AskPage:
    """Answer the query in the address."""
    return await question.answered()


@router.get(f"{PATH}.csv", response_class=Response, include_in_schema=False)
async def ask_csv(question: AskedDep) -> Response:
    return csv_response((await question.answered()).table, name="answer")


@router.get(PATH, response_class=HTMLResponse, include_in_schema=False)
@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def ask_html(question: AskedDep) -> Response:
    if question.question.several:
        return stream_page(
            "ask.html",
            "machines_answer.html",
            page=question.page,
            whole=question.answered,
            section="Ask",
        )
    page = await question.answered()
    return await to_thread.run_sync(lambda: render("ask.html", page=page, section="Ask"))


def front_page(*, store: Store, calibrations: Calibrations) -> str:
    """Return the front page as HTML. It uses names in the catalogue only."""
    request = Request({"type": "http", "path": "/", "query_string": b"", "headers": []})
    page = read_question(
        request, store, find=lambda kind, name: None, calibrations=calibrations
    ).answer()
    return render_html("ask.html", page=page, section="Ask")


def _answered(
    page: AskPage, question: Question, *, find: Find, calibrations: Calibrations | None
) -> AskPage:
    free = schema.parse_query(question.mapping())
    answer = _ranked(free, find=find, calibrations=calibrations)
    # Links use the query as typed, with registered names.
    rows = answer.recommendations or answer.nearest_misses
    error, this = None, Configuration.from_row(rows[0], query=free) if rows else None
    if question.at:
        try:
            this = _displayed_configuration(question, find=find, calibrations=calibrations)
        except HpToolError as wrong:  # Reported in addition to the ranking, which is valid.
            error, this = wrong.as_dict(), None
    at = {} if this is None else layout_values(this) | question.at
    trained = [row for row in answer.recommendations if isinstance(row, Recommendation)]
    listed: Sequence[Recommendation | ServingRecommendation] = (
        best_by_layout(trained)[:MAX_ROWS] or rows
    )
    page = replace(
        page,
        at=at,
        rows=tuple(_row(row, free, question, at) for row in listed),
        nothing_fits=not answer.recommendations,
        ranked_by=RANKED_BY.get(free.objective or "", "output tokens/s per GPU"),
        num_gpus=next((row.set[NUM_GPUS] for row in rows if NUM_GPUS in row.set), None),
        legal=answer.space.legal,
        feasible=answer.space.feasible,
        pruned=answer.space.pruned,
        tied=answer.groups[0] if answer.groups else 0,
        rejections=tuple(sorted(answer.rejections.items(), key=lambda item: -item[1])),
        error=error,
    )
    if free.kind == "inference":
        page = _serving_page(page, free, rows)
    return (
        page
        if this is None
        else _with_configuration(page, question, this, answer, find, calibrations)
    )


def _row(
    row: Recommendation | ServingRecommendation, free: Query, question: Question, at: dict[str, str]
) -> RankedRow:
    layout = layout_values(Configuration.from_row(row, query=free))
    return ranked_row(row, query=free, chosen=layout == at, settings_href=question.href(layout))


def _serving_page(
    page: AskPage, free: Query, rows: Sequence[Recommendation | ServingRecommendation]
) -> AskPage:
    targets = free.targets
    served = [row for row in rows if isinstance(row, ServingRecommendation)]
    queues = (row.estimate.provenance.get("queue") for row in served)
    return replace(
        page,
        assumed=next((str(queue) for queue in queues if queue), None),
        figures=tuple(
            _latency_figure(name, served, None if targets is None else getattr(targets, name))
            for name in ("ttft_s", "tpot_s")
        )
        if served
        else (),
    )


def _latency_figure(
    name: str, rows: Sequence[ServingRecommendation], limit: float | None
) -> Figure:
    """Plot throughput against one latency; `limit` is the target in seconds."""
    letters = name.removesuffix("_s").upper()
    known = (
        (getattr(row.estimate, name), row.estimate.output_tokens_per_second_per_gpu, row)
        for row in rows
    )
    points = [
        (latency, rate, row)
        for latency, rate, row in known
        if latency is not None and rate is not None
    ]
    text = [
        f"{serving_arithmetic(row.parallel, replicas=row.estimate.replicas)}\n{letters} "
        f"{seconds(latency)}\n"
        f"{count(rate)} tokens/s per GPU"
        for latency, rate, row in points
    ]
    latencies = [latency for latency, _, _ in points]
    unit = (
        {"title": f"{letters}, ms", "times": 1e3}
        if min(latencies, default=1.0) < 1.0
        else {"title": f"{letters}, s"}
    )
    far = max(latencies, default=1.0) > LOG_FROM * min(latencies, default=1.0)
    scale = {"log": True} if far else {"zero": True}
    best = [
        not any(each[0] <= latency and each[1] > rate for each in points)
        for latency, rate, _ in points
    ]
    front = sorted(
        (latency, rate) for (latency, rate, _), there in zip(points, best, strict=True) if there
    )
    labels = [
        each.partition("\n")[0] if there else "" for each, there in zip(text, best, strict=True)
    ]
    marker = {"color": "--series-1", "size": 7, "labels": labels}
    shade = [{"to": limit, "color": "--good", "label": "target"}] if limit is not None else []
    drawn = (
        [
            line(
                "Pareto front",
                x=(x for x, _ in front),
                y=(y for _, y in front),
                style={"color": "--series-3", "width": 2},
            )
        ]
        if len(front) > 1
        else []
    )
    return {
        "traces": [
            markers(
                "Configurations",
                x=latencies,
                y=(each[1] for each in points),
                text=text,
                marker=marker,
            ),
            *drawn,
        ],
        "x": unit | scale,
        "y": {"title": "Output tokens/s per GPU"},
        "shapes": shade,
    }


def _displayed_configuration(
    question: Question, *, find: Find, calibrations: Calibrations | None
) -> Configuration | None:
    """Return the configuration in the URL; for serving, the best one with the values in the URL."""
    typed = schema.parse_query(question.shown_mapping())
    if typed.kind == "training":
        config = resolve_configuration(resolve_names(typed, find=find)).config
        return Configuration(query=typed, parallel=config)
    answer = _ranked(typed, find=find, calibrations=calibrations)
    best: Any = next(iter(answer.recommendations or answer.nearest_misses), None)
    return None if best is None else Configuration.from_row(best, query=typed)


def _with_configuration(
    page: AskPage,
    question: Question,
    this: Configuration,
    answer: RecommendAnswer,
    find: Find,
    calibrations: Calibrations | None,
) -> AskPage:
    """Add metrics and controls of the displayed configuration to the page."""
    query, trains = resolve_names(this.query, find=find), this.query.kind == "training"
    configuration = resolve_configuration(query) if trains else None
    view, _ = configuration_view(
        query, configuration=configuration, calibrations=calibrations if trains else None
    )
    if configuration is not None:
        model, cluster = configuration.problem.model, configuration.problem.cluster
        framework = configuration.problem.workload.framework
        named = getattr(configuration.config.recompute, "modules", None) or ()
        possible = dict.fromkeys((*named, *modules(model, framework=framework)))
        memory, time = _variant_charts(this, query, question, calibrations)
        page = replace(
            page,
            modules=tuple(possible),
            recomputed=named,
            effect_memory=memory,
            effect_time=time,
            slower_fraction=_slowdown(view, answer, this.query),
        )
    else:
        model, cluster, framework = resolve_model(query.model), catalog.cluster(query.cluster), ""
    return replace(
        page,
        json_href=json_href(question.href(page.at)),
        controls=controls(
            this.parallel, model=model, framework=framework, num_gpus=cluster.num_gpus
        ),
        view=view,
        configuration_href=configuration_href(this),
        run_href=run_href(this),
    )


def _slowdown(view: ConfigurationView, answer: RecommendAnswer, query: Query) -> float | None:
    step_s = next((metric.value for metric in view.metrics if metric.name == STEP.label), None)
    best = next(iter(answer.recommendations), None)
    if (
        not isinstance(best, Recommendation)
        or best.preferred_estimate.time is None
        or step_s is None
    ):
        return None
    slower = step_s / best.preferred_estimate.time.step_s - 1.0
    throughput = query.objective in (None, "throughput")
    return slower if throughput and slower >= MIN_SLOWDOWN else None


def _ranked(query: Query, *, find: Find, calibrations: Calibrations | None) -> RecommendAnswer:
    """Rank the configurations of a query, after resolving its registered names."""
    resolved = resolve_names(query, find=find)
    if query.kind == "inference":
        return _cached(schema.to_json(resolved), catalog.revision(), None, None)
    predictor = None if calibrations is None else calibrations(resolve_training(resolved))
    calibration_id = None if predictor is None else str(predictor.provenance.get("id"))
    return _cached(schema.to_json(resolved), catalog.revision(), calibration_id, calibrations)


@lru_cache(maxsize=64)
def _cached(
    query: str, catalogue: str, calibration_id: str | None, calibrations: Calibrations | None
) -> RecommendAnswer:
    """Return the best configurations of a query.

    Results are cached, because each move of a slider requests them again, until a catalogue file or
    the calibration changes. Calibration IDs are unique within a store, which `calibrations`
    represents.
    """
    parsed = schema.parse_query(json.loads(query))
    return answer_recommend(parsed, top=TOP[parsed.kind], calibrations=calibrations)


def _variant_charts(
    this: Configuration, query: Query, question: Question, calibrations: Calibrations | None
) -> tuple[Stack | None, Stack | None]:
    """Return charts of memory and time with sequence parallelism and recomputation on and off.

    Return None for an illegal configuration. `query` is the query of `this` with resolved names.
    """
    sizes, times, shown = [], [], this.parallel
    assert isinstance(shown, ParallelConfig)
    variants = {
        name: replace(shown, sequence_parallel=on, recompute=recompute)
        for name, on, recompute in VARIANTS
    }
    if shown not in variants.values():
        variants = {THIS_CONFIGURATION: shown} | variants
    for label, changed in variants.items():
        if changed.sequence_parallel and shown.tensor_parallel_size == 1:
            continue  # Without tensor parallelism, sequence parallelism has no effect.
        try:
            variant = Configuration.from_row(replace(this, parallel=changed, set={}), query=query)
            answer = answer_estimate(
                variant.query, with_fixes=False, with_query=False, calibrations=calibrations
            )
        except HpToolError:
            continue  # Not supported by this framework, or together with other values of the query.
        estimate = answer.preferred_estimate
        if not isinstance(estimate, Estimate) or estimate.memory is None or estimate.time is None:
            continue
        note = "shown" if changed == shown and label != THIS_CONFIGURATION else ""
        href = question.href(question.at | layout_values(replace(this, parallel=changed)))
        limit = estimate.memory.capacity_bytes
        sizes.append(
            BarSpec(
                label=label, note=note, parts=estimate.memory.parts_bytes, limit=limit, href=href
            )
        )
        times.append(BarSpec(label=label, note=note, parts=estimate.time.parts_s, href=href))
    return (stack(sizes, unit="bytes"), stack(times, unit="seconds")) if sizes else (None, None)
