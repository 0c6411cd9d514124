"""Page /explorer: a model on a cluster, and the effect of each setting on memory and time.

The controls are part of the address.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi import Query as QueryParameter
from starlette.status import HTTP_307_TEMPORARY_REDIRECT

from hp_tool import catalog
from hp_tool.domain.parallel import ParallelConfig, RecomputeModule, RecomputeName
from hp_tool.domain.ports import Store
from hp_tool.domain.query import Query
from hp_tool.domain.result import Estimate, Ranking, Recommendation
from hp_tool.errors import HpToolError
from hp_tool.questions import schema, training
from hp_tool.questions.answers import answer_estimate
from hp_tool.questions.configuration import Configuration
from hp_tool.questions.form_fields import RECIPE, Field, Section
from hp_tool.questions.registered import Find
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.questions.training.evaluate import resolve_configuration
from hp_tool.questions.training.problem import resolve_training
from hp_tool.wording.figures import STEP
from hp_tool.wording.rankings import TRAINING, Table
from service.api.bodies import resolve
from service.api.dependencies import CalibrationsDep, FindDep, StoreDep
from service.dashboard.configuration import ConfigurationView, configuration_view
from service.dashboard.explorer_settings import (
    Control,
    Settings,
    controls,
    detail_fields,
    groups,
    modules,
)
from service.dashboard.figures import BarSpec, Stack, stack
from service.dashboard.new_search_form import FRAMEWORKS, RecipeChoice, recipe_choices, to_values
from service.dashboard.page import (
    ErrorFields,
    Page,
    address,
    configuration_href,
    json_href,
    page_at,
    rendered,
)
from service.dashboard.ranking import RankedRow, best_by_layout, ranked_row, run_href
from service.dashboard.searches import SearchRow, newest

OF_THE_LIST = {"state", "kind", "words", "owner", "since", "cursor"}
"""Filters of the list of searches."""
MAX_ROWS = 5
"""Number of listed layouts, each with its fastest configuration."""
TOP = 40
"""Number of best configurations among which the page finds layouts."""
Listed = Annotated[
    bool,
    QueryParameter(
        description="Also list what to run, which takes a ranking of all configurations"
    ),
]
EFFECTS: tuple[tuple[str, bool, RecomputeName], ...] = (
    ("Neither", False, "none"),
    ("Sequence parallel", True, "none"),
    ("core_attn recomputed", False, "selective"),
    ("Both", True, "selective"),
    ("Full recomputation", False, "full"),
)
"""Variants of arXiv 2205.05198's figures 7 and 8: (name, sequence parallel, recompute)."""
THIS = "This configuration"
LEAST_SLOWER = 0.005
"""Minimum relative difference at which the shown configuration is compared with the best."""
router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplorerPage(Page):
    """A training question and its answer, with a control for each setting; `error` has the reason
    of a failure.
    """

    settings: Settings
    models: tuple[str, ...]
    gpus: tuple[str, ...]
    precisions: tuple[str, ...]
    frameworks: tuple[str, ...] = FRAMEWORKS
    recipes: tuple[RecipeChoice, ...]
    recipe: Field
    groups: tuple[Section, ...]
    """Further fields of the query; their values are `settings.details`."""
    controls: tuple[Control, ...] = ()
    modules: tuple[RecomputeModule, ...] = ()
    """Modules that selective recomputation may name in this model, named ones first."""
    view: ConfigurationView | None = None
    configuration_href: str | None = None
    run_href: str | None = None
    """Page to run the configuration in each tool."""
    form_href: str | None = None
    """The form of a search for this workload."""
    changed: bool = False
    """Whether the address sets part of the configuration, so that the controls are open."""
    recent: tuple[SearchRow, ...] = ()
    """The newest searches."""
    fastest: tuple[RankedRow, ...] = ()
    slower_fraction: float | None = None
    """Relative excess of the shown step over the best; None if that is shown, or if nothing
    fits.
    """
    nothing_fits: bool = False
    """Whether `fastest` lists the nearest infeasible configurations instead."""
    legal: int = 0
    feasible: int = 0
    pruned: int = 0
    """Legal configurations that were not costed, in addition to `legal`, because they cannot be
    among the best.
    """
    effect_memory: Stack | None = None
    """Memory with sequence parallelism and selective recomputation switched on and off."""
    effect_time: Stack | None = None
    error: ErrorFields | None = None

    @property
    def table(self) -> Table:
        """The ranked rows with their columns."""
        return Table(columns=TRAINING, rows=self.fastest)


@page_at(router, "/explorer", template="explorer.html", section="Ask", home=True, csv=True)
def explorer_context(
    request: Request,
    settings: Annotated[Settings, Depends()],
    store: StoreDep,
    find: FindDep,
    calibrations: CalibrationsDep,
    listed: Listed = True,
) -> ExplorerPage:
    """Return a training question and its answer for its page."""
    if (
        request.url.path == "/" and OF_THE_LIST & request.query_params.keys()
    ):  # which stood here once
        raise HTTPException(
            HTTP_307_TEMPORARY_REDIRECT, headers={"Location": f"/searches?{request.url.query}"}
        )
    registered = set(store.registered_names(kind="model"))
    page = ExplorerPage(
        title="Ask",
        json_href=json_href(settings.href),
        settings=settings,
        models=tuple(sorted({*catalog.names("models"), *registered})),
        gpus=tuple(catalog.names("gpus")),
        precisions=_precisions(settings.gpu),
        recipes=recipe_choices(),
        recipe=detail_fields()[RECIPE],
        groups=groups(),
        changed=bool(settings.details)
        or any(value is not None for value in (settings.tp, settings.pp, settings.mbs)),
        recent=newest(store) if listed else (),
    )
    try:
        return _answered(page, settings, find=find, calibrations=calibrations, listed=listed)
    except HpToolError as error:
        return replace(page, error=error.as_dict())


def front_page(*, store: Store, calibrations: Calibrations) -> str:
    """Return the front page as HTML, with only the catalogue's names."""
    request = Request({"type": "http", "path": "/", "query_string": b"", "headers": []})
    context = explorer_context(
        request, Settings(), store, find=lambda kind, name: None, calibrations=calibrations
    )
    return rendered("explorer.html", page=context, section="Ask")


def _answered(
    page: ExplorerPage,
    settings: Settings,
    *,
    find: Find,
    calibrations: Calibrations | None,
    listed: bool,
) -> ExplorerPage:
    catalogue = catalog.revision()
    workload = settings.workload()
    free = schema.parse_query(workload)
    unrestricted = resolve(free, find=find)
    predictor = None if calibrations is None else calibrations(resolve_training(unrestricted))
    calibration_id = str(predictor.provenance.get("id")) if predictor is not None else None
    parallel = settings.parallel()
    # A ranking takes ten times as long as a configuration's figures, which a page may show first.
    ranking: Ranking[Recommendation] = Ranking()
    if listed or not parallel:
        ranking = _ranking(schema.to_json(unrestricted), catalogue, calibration_id, calibrations)
    # Links use the query as typed, with registered names.
    as_typed = schema.parse_query(workload | {"parallel": workload.get("parallel", {}) | parallel})
    best = () if parallel else ranking.recommendations or ranking.nearest_misses
    chosen = Configuration.of(best[0], query=free) if best else None
    query = resolve(as_typed if chosen is None else chosen.query, find=find)
    configuration = resolve_configuration(query)
    this = chosen or Configuration(query=as_typed, parallel=configuration.config)
    config, model, framework = (
        configuration.config,
        configuration.problem.model,
        configuration.problem.workload.framework,
    )
    view, _ = configuration_view(query, configuration=configuration, calibrations=calibrations)
    memory, time = _effects(this, query, settings, calibrations)
    rows = best_by_layout(ranking.recommendations)[:MAX_ROWS] or ranking.nearest_misses
    shown = settings.at(this)
    step_s = next((metric.value for metric in view.metrics if metric.name == STEP.label), None)
    fastest_s = (
        ranking.recommendations[0].preferred_estimate.time if ranking.recommendations else None
    )
    slower = None if step_s is None or fastest_s is None else step_s / fastest_s.step_s - 1.0
    return replace(
        page,
        json_href=json_href(shown.href),
        settings=shown,
        controls=controls(shown, model=model, framework=framework, config=config),
        modules=tuple(dict.fromkeys((*modules(model, framework=framework), *shown.modules))),
        view=view,
        configuration_href=configuration_href(this),
        run_href=run_href(this),
        form_href=address("/searches/new", to_values(workload)),
        fastest=tuple(
            ranked_row(
                row,
                query=free,
                chosen=(row.parallel, row.set) == (this.parallel, this.set),
                settings_href=settings.at(Configuration.of(row, query=free)).href,
            )
            for row in rows
        ),
        slower_fraction=slower if slower is not None and slower >= LEAST_SLOWER else None,
        nothing_fits=bool(ranking.nearest_misses),
        legal=ranking.space.legal,
        feasible=ranking.space.feasible,
        pruned=ranking.space.pruned,
        effect_memory=memory,
        effect_time=time,
    )


@lru_cache(maxsize=64)
def _ranking(
    query: str, catalogue: str, calibration_id: str | None, calibrations: Calibrations | None
) -> Ranking[Recommendation]:
    """Return the best configurations of a query, cached until a catalogue file or the calibration
    changes.

    Each move of a slider requests them again. Ids belong to their own store, which `calibrations`
    represents.
    """
    return training.recommend(query=schema.parse_query(query), top=TOP, calibrations=calibrations)


def _effects(
    this: Configuration, query: Query, settings: Settings, calibrations: Calibrations | None
) -> tuple[Stack | None, Stack | None]:
    """Return memory and time with sequence parallelism and recomputation switched on and off.

    None for an illegal configuration. `query` is that of `this` with resolved registered names.
    """
    sizes, times, shown = [], [], this.parallel
    assert isinstance(shown, ParallelConfig)
    variants = {
        name: replace(shown, sequence_parallel=on, recompute=recompute)
        for name, on, recompute in EFFECTS
    }
    if shown not in variants.values():
        variants = {THIS: shown} | variants
    for label, changed in variants.items():
        if changed.sequence_parallel and shown.tensor_parallel_size == 1:
            continue  # sequence parallelism divides work among tensor parallel ranks
        try:
            variant = Configuration.of(replace(this, parallel=changed, set={}), query=query)
            answer = answer_estimate(
                variant.query, with_fixes=False, with_query=False, calibrations=calibrations
            )
        except HpToolError:
            continue  # not supported by this framework, or not with other values of the query
        estimate = answer.preferred_estimate
        if not isinstance(estimate, Estimate) or estimate.memory is None or estimate.time is None:
            continue
        note = "shown" if changed == shown and label != THIS else ""
        href = settings.at(replace(this, parallel=changed)).href
        limit = estimate.memory.capacity_bytes
        sizes.append(
            BarSpec(
                label=label, note=note, parts=estimate.memory.parts_bytes, limit=limit, href=href
            )
        )
        times.append(BarSpec(label=label, note=note, parts=estimate.time.parts_s, href=href))
    return (stack(sizes, unit="bytes"), stack(times, unit="seconds")) if sizes else (None, None)


def _precisions(gpu: str) -> tuple[str, ...]:
    try:
        return tuple(catalog.gpu(gpu).peak_flops_per_second)
    except HpToolError:
        return ("bf16",)
