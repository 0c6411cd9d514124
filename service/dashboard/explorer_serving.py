"""/explorer/serving: a model served on a cluster, and the effect of each setting. The address holds a query by its paths."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from fastapi import APIRouter, Request

from hp_tool import catalog
from hp_tool.answers import RecommendAnswer, recommend_answer
from hp_tool.configuration import Configuration
from hp_tool.domain.query import Query
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import HpToolError
from hp_tool.queries import schema
from hp_tool.queries.registered import Find
from hp_tool.queries.shown import Section, fields, sections
from hp_tool.render.words import serving_arithmetic
from service.api.bodies import resolve
from service.api.dependencies import FindDep, StoreDep
from service.api.views import View
from service.dashboard import formats
from service.dashboard.configuration import ConfigurationView, configuration_view
from service.dashboard.explorer_settings import MAX_SIZE, Control, numbers, powers
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

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow(View):
    """One of the best deployments, or of the nearest that miss."""

    rank: int
    arithmetic: str
    details: str
    href: str
    chosen: bool
    """The page shows this one."""
    ttft_s: float | None
    tpot_s: float | None
    output_tokens_per_second_per_gpu: float | None
    memory_total_bytes: float | None
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingExplorerPage(Page):
    """The explorer of serving. If the settings cannot be answered, `error` says why and the rest is empty."""

    values: dict[str, str]
    """The query's values by path, as the address gives them."""
    models: tuple[str, ...]
    gpus: tuple[str, ...]
    sections: tuple[Section, ...]
    controls: tuple[Control, ...] = ()
    view: ConfigurationView | None = None
    configuration_href: str | None = None
    form_href: str
    """The form of a search with this query."""
    rows: tuple[ServingRow, ...] = ()
    nothing_fits: bool = False
    """`rows` lists the nearest infeasible configurations instead."""
    legal: int = 0
    feasible: int = 0
    error: ErrorFields | None = None


@page_at(router, PATH, template="explorer_serving.html", section="Explorer")
def serving_explorer_context(request: Request, store: StoreDep, find: FindDep) -> ServingExplorerPage:
    """The explorer of serving, as shown on its page."""
    known = {"model", *fields("inference")}
    typed = {name: text for name, text in read_form(request.url.query).items() if name in known}
    values = _filled(typed)
    registered = set(store.registered_names(kind="model"))
    page = ServingExplorerPage(
        title="Explorer: serving",
        json_href=json_href(address(PATH, values)),
        values=values,
        models=tuple(sorted({*catalog.names("models"), *registered})),
        gpus=tuple(catalog.names("gpus")),
        sections=tuple(each for each in sections("inference") if each.title in ("Serving", "Goal", "Experts", "NVLink")),
        form_href=address("/searches/new", {"kind": "inference", **values}),
    )
    try:
        return _answered(page, values, find=find)
    except HpToolError as error:
        return replace(page, error=error.as_dict())


def _filled(typed: Mapping[str, str]) -> dict[str, str]:
    """Return the values of an address, with those of the example for what a question cannot do without."""
    left_out = set[str]()
    if "cluster" in typed:  # a registered one says the rest
        left_out |= {path for path in EXAMPLE if path.startswith("cluster.")}
    if "inference.trace" in typed:
        left_out |= {path for path in EXAMPLE if path.startswith("inference.")}
    elif any(path.startswith("inference.") for path in typed):  # a load that is left open is the highest within the targets
        left_out.add("inference.concurrency")
    return {path: value for path, value in EXAMPLE.items() if path not in left_out} | dict(typed)


def _answered(page: ServingExplorerPage, values: Mapping[str, str], *, find: Find) -> ServingExplorerPage:
    catalogue = catalog.revision()
    query = _query(values, find=find)
    free = _query({name: text for name, text in values.items() if name not in AXES}, find=find)
    ranking = _ranked(schema.to_json(free), catalogue)
    chosen = ranking if not AXES.keys() & values.keys() else _ranked(schema.to_json(query), catalogue)
    best = next(_served(chosen), None)
    shown = tuple(_row(row, values, chosen=best is not None and row.parallel == best.parallel) for row in _served(ranking))
    page = replace(
        page,
        rows=shown,
        nothing_fits=not ranking.recommendations,
        legal=ranking.space.legal,
        feasible=ranking.space.feasible,
        controls=_controls(query, best),
    )
    if best is None:
        return page
    this = Configuration.of(best, query=query)
    view, _ = configuration_view(this.query, calibrations=None)
    return replace(page, view=view, configuration_href=configuration_href(this))


def _query(values: Mapping[str, str], *, find: Find) -> Query:
    return resolve(schema.parse_query(to_query({"kind": "inference", **values})), find=find)


def _served(answer: RecommendAnswer) -> Iterator[ServingRecommendation]:
    """The best rows; if nothing fits, the nearest ones."""
    rows = answer.recommendations or answer.nearest_misses
    return (row for row in rows if isinstance(row, ServingRecommendation))


@lru_cache(maxsize=64)
def _ranked(query: str, catalogue: str) -> RecommendAnswer:
    """The best configurations of a query, kept until a file of the catalogue changes: a control that is moved back asks for
    the same ones again.
    """
    return recommend_answer(schema.parse_query(json.loads(query)), top=TOP)


def _row(row: ServingRecommendation, values: Mapping[str, str], *, chosen: bool) -> ServingRow:
    axes = {path: str(getattr(row.parallel, path.removeprefix("parallel."))) for path in AXES}
    estimate = row.estimate
    return ServingRow.of(
        row,
        estimate,
        arithmetic=serving_arithmetic(row.parallel, replicas=estimate.replicas),
        details=formats.serving_details(row.parallel),
        href=address(PATH, {**values, **axes}),
        chosen=chosen,
        memory_total_bytes=estimate.memory.total_bytes if estimate.memory else None,
        reasons=tuple(reason.message for reason in estimate.reasons),
    )


def _controls(query: Query, best: ServingRecommendation | None) -> tuple[Control, ...]:
    """A slider for each axis of the layout, at the value that is shown."""
    most = min(MAX_SIZE, catalog.cluster(query.cluster).num_gpus)
    each = {path: getattr(best.parallel, path.removeprefix("parallel.")) if best else 1 for path in AXES}
    return tuple(numbers(path, label, each[path], powers(most)) for path, label in AXES.items())
