"""Page /explorer/serving: a model served on a cluster, and the effect of each setting.

The address contains a query by its paths.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from fastapi import APIRouter, Request

from hp_tool import catalog
from hp_tool.domain.latencies import TPOT, TTFT
from hp_tool.domain.query import Query
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import HpToolError
from hp_tool.questions import schema
from hp_tool.questions.answers import RecommendAnswer, answer_recommend
from hp_tool.questions.configuration import NUM_GPUS, Configuration
from hp_tool.questions.form_fields import Section, form_fields, form_sections
from hp_tool.questions.registered import Find
from hp_tool.wording.rankings import SERVING, Table
from service.api.bodies import resolve
from service.api.dependencies import FindDep, StoreDep
from service.dashboard.configuration import ConfigurationView, configuration_view
from service.dashboard.explorer_settings import MAX_SIZE, Control, numbers, powers
from service.dashboard.figures import Figure
from service.dashboard.new_search import latency_figure
from service.dashboard.new_search_form import to_query
from service.dashboard.page import (
    ErrorFields,
    Page,
    address,
    configuration_href,
    json_href,
    page_at,
    read_form,
)
from service.dashboard.ranking import RankedRow, ranked_row, run_href
from service.dashboard.searches import SearchRow, newest

PATH = "/explorer/serving"
TOP = 8
"""Configurations listed."""
EXAMPLE = {
    "model": "llama-3-70b",
    "cluster.gpu": "h100-sxm-80gb",
    "cluster.num_gpus": "8",
    "inference.input_length": "4000",
    "inference.output_length": "1000",
    "inference.concurrency": "64",
}
AXES = {
    "parallel.tensor_parallel_size": "Tensor parallel (TP)",
    "parallel.pipeline_parallel_size": "Pipeline parallel (PP)",
    "parallel.expert_parallel_size": "Expert parallel (EP)",
    "parallel.attention_data_parallel_size": "Attention data parallel",
}
"""Controls of the layout; one that is not set is the best for the others."""
RANKED_BY = {
    TTFT.quantile_key: TTFT.noun,
    TPOT.quantile_key: TPOT.noun,
    "cost": "cost",
    "min_gpus": "number of GPUs",
}
"""Objectives of serving except the default, in words."""

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingExplorerPage(Page):
    """The explorer of serving. If the settings fail, `error` has the reason and the rest is
    empty.
    """

    values: dict[str, str]
    """The query's values by path, from the address."""
    models: tuple[str, ...]
    gpus: tuple[str, ...]
    sections: tuple[Section, ...]
    controls: tuple[Control, ...] = ()
    view: ConfigurationView | None = None
    configuration_href: str | None = None
    run_href: str | None = None
    """Page to run the configuration in each tool."""
    form_href: str
    """The form of a search with this query."""
    changed: bool = False
    """Whether the address sets part of the layout, so that the controls are open."""
    recent: tuple[SearchRow, ...] = ()
    """The newest searches."""
    figures: tuple[Figure, ...] = ()
    """Throughput against each latency, for plot.js."""
    rows: tuple[RankedRow, ...] = ()
    nothing_fits: bool = False
    """Whether `rows` lists the nearest infeasible configurations instead."""
    ranked_by: str = ""
    """The figure that orders `rows`, in words."""
    num_gpus: int | None = None
    """Devices of the rows, if the objective chose the number."""
    assumed: str | None = None
    """The rule of the ranking that the query does not state, in words."""
    legal: int = 0
    feasible: int = 0
    error: ErrorFields | None = None

    @property
    def table(self) -> Table:
        """The ranked rows with their columns."""
        return Table(columns=SERVING, rows=self.rows)


@page_at(router, PATH, template="explorer_serving.html", section="Ask", csv=True)
def serving_explorer_context(
    request: Request, store: StoreDep, find: FindDep
) -> ServingExplorerPage:
    """Return the explorer of serving for its page."""
    known = {"model", *form_fields("inference")}
    typed = {name: text for name, text in read_form(request.url.query).items() if name in known}
    values = _filled(typed)
    registered = set(store.registered_names(kind="model"))
    page = ServingExplorerPage(
        title="Ask: serving",
        json_href=json_href(address(PATH, values)),
        values=values,
        models=tuple(sorted({*catalog.names("models"), *registered})),
        gpus=tuple(catalog.names("gpus")),
        sections=tuple(
            each
            for each in form_sections("inference")
            if each.title in ("Serving", "Goal", "Experts", "NVLink")
        ),
        form_href=address("/searches/new", {"kind": "inference", **values}),
        changed=bool(AXES.keys() & values.keys()),
        recent=newest(store),
    )
    try:
        return _answered(page, values, find=find)
    except HpToolError as error:
        return replace(page, error=error.as_dict())


def _filled(typed: Mapping[str, str]) -> dict[str, str]:
    """Return the values of an address, with those of the example for required values."""
    left_out = set[str]()
    if "cluster" in typed:  # a registered one contains the rest
        left_out |= {path for path in EXAMPLE if path.startswith("cluster.")}
    if "inference.trace" in typed:
        left_out |= {path for path in EXAMPLE if path.startswith("inference.")}
    elif any(
        path.startswith("inference.") for path in typed
    ):  # an open load is the highest within the targets
        left_out.add("inference.concurrency")
    return {path: value for path, value in EXAMPLE.items() if path not in left_out} | dict(typed)


def _answered(
    page: ServingExplorerPage, values: Mapping[str, str], *, find: Find
) -> ServingExplorerPage:
    catalogue = catalog.revision()
    query = _query(values, find=find)
    free = _query(_free(values), find=find)
    ranking = _ranked(schema.to_json(free), catalogue)
    chosen = (
        ranking if not AXES.keys() & values.keys() else _ranked(schema.to_json(query), catalogue)
    )
    best = next(_served(chosen), None)
    typed = schema.parse_query(
        to_query(
            {
                "kind": "inference",
                **{path: text for path, text in values.items() if path not in AXES},
            }
        )
    )
    rows = tuple(_served(ranking))
    shown = tuple(
        ranked_row(
            row,
            query=typed,
            chosen=best is not None and row.parallel == best.parallel,
            settings_href=address(
                PATH,
                {
                    **values,
                    **{
                        path: getattr(row.parallel, path.removeprefix("parallel.")) for path in AXES
                    },
                },
            ),
        )
        for row in rows
    )
    page = replace(
        page,
        rows=shown,
        figures=tuple(
            latency_figure(name, rows, _target(query, name)) for name in ("ttft_s", "tpot_s")
        )
        if rows
        else (),
        nothing_fits=not ranking.recommendations,
        ranked_by=RANKED_BY.get(query.objective or "", "output tokens/s per GPU"),
        num_gpus=next((row.set[NUM_GPUS] for row in rows if NUM_GPUS in row.set), None),
        assumed=next(
            (
                str(row.estimate.provenance["queue"])
                for row in rows
                if "queue" in row.estimate.provenance
            ),
            None,
        ),
        legal=ranking.space.legal,
        feasible=ranking.space.feasible,
        controls=_controls(query, best),
    )
    if best is None:
        return page
    this = Configuration.of(best, query=query)
    view, _ = configuration_view(this.query, calibrations=None)
    return replace(
        page, view=view, configuration_href=configuration_href(this), run_href=run_href(this)
    )


def _free(values: Mapping[str, str]) -> dict[str, str]:
    """Return the values without those of the layout."""
    return {path: text for path, text in values.items() if path not in AXES}


def _axes(row: ServingRecommendation) -> dict[str, int]:
    """Return the layout of a row by the controls' paths."""
    return {path: getattr(row.parallel, path.removeprefix("parallel.")) for path in AXES}


def _target(query: Query, name: str) -> float | None:
    return None if query.targets is None else getattr(query.targets, name)


def _query(values: Mapping[str, str], *, find: Find) -> Query:
    return resolve(schema.parse_query(to_query({"kind": "inference", **values})), find=find)


def _served(answer: RecommendAnswer) -> Iterator[ServingRecommendation]:
    """Return the best rows; if nothing fits, the nearest ones."""
    rows = answer.recommendations or answer.nearest_misses
    return (row for row in rows if isinstance(row, ServingRecommendation))


@lru_cache(maxsize=64)
def _ranked(query: str, catalogue: str) -> RecommendAnswer:
    """Return the best configurations of a query, cached until a catalogue file changes.

    A control that is moved back requests the same ones again.
    """
    return answer_recommend(schema.parse_query(json.loads(query)), top=TOP)


def _controls(query: Query, best: ServingRecommendation | None) -> tuple[Control, ...]:
    """Return a slider for each axis of the layout, at the shown value."""
    most = min(MAX_SIZE, catalog.cluster(query.cluster).num_gpus)
    each = {
        path: getattr(best.parallel, path.removeprefix("parallel.")) if best else 1 for path in AXES
    }
    return tuple(numbers(path, label, each[path], powers(most)) for path, label in AXES.items())
