"""/explorer/machines: a training or a service on several machines, ranked by money and days. The address holds the question."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from functools import partial
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request

from hp_tool import bounds, catalog
from hp_tool.answers import RecommendAnswer, recommend_answer
from hp_tool.catalog.prices import offers
from hp_tool.domain.ports import Store
from hp_tool.domain.prices import PRICED, NotRanked, Offer
from hp_tool.domain.query import Kind, Query
from hp_tool.domain.result import Recommendation
from hp_tool.domain.serving import ServingRecommendation
from hp_tool.errors import HpToolError, InputError
from hp_tool.queries import schema
from hp_tool.queries.registered import Find
from hp_tool.queries.shown import Section, sections
from hp_tool.render.figures import PER_MILLION
from hp_tool.render.words import LATENCIES, machines_heading
from hp_tool.training.calibrated import Calibrations
from service.api.bodies import resolve
from service.api.dependencies import CalibrationsDep, FindDep, StoreDep
from service.api.estimates import RECOMMENDATIONS
from service.dashboard import formats
from service.dashboard.figures import Figure, line, markers
from service.dashboard.new_search_form import FRAMEWORKS, RecipeChoice, kind_of, recipe_choices, to_query
from service.dashboard.page import ErrorFields, Page, address, json_href, page_at, read_form
from service.dashboard.ranking import RankedRow, ranked_row
from service.dashboard.run import Way, as_text

PATH = "/explorer/machines"
TOP = 40
"""Machines listed."""
MACHINES = "machines"
"""Parameter of the address: names of GPUs, servers or clusters, separated by commas; `priced` is the whole price list."""
NUM_GPUS = "cluster.num_gpus"
FAST = "h100-sxm-80gb, h200-sxm-141gb, b200-sxm-180gb"
EXAMPLE = {
    "kind": "training",
    "model": "llama-3.1-8b",
    MACHINES: FAST,
    NUM_GPUS: "32",
    "training.sequence_length": "8192",
    "training.global_batch_size": "512",
    "training.total_tokens": "1e11",
    "constraints.max_days": "21",
}
SERVING_EXAMPLE = {
    "kind": "inference",
    "model": "llama-3.1-8b",
    MACHINES: FAST,
    "inference.input_length": "1000",
    "inference.output_length": "200",
    "inference.request_rate_per_second": "8",
    "targets.ttft_s": "1",
    "targets.tpot_s": "0.05",
}
SHOWN = ("Training", "Serving", "Goal", "Cluster", "Parallelism", "Precision and kernels")
ASKED = frozenset(
    {
        *("cluster", "cluster.gpu", NUM_GPUS, "cluster.market", "training.sequence_length", "training.global_batch_size"),
        *("training.total_tokens", "inference.input_length", "inference.output_length", "inference.request_rate_per_second"),
        *("constraints.max_days", "constraints.max_cost", "targets.ttft_s", "targets.tpot_s"),
    }
)
"""Fields that the question itself has."""

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a machine costs, and who says so."""

    per_gpu_hour: float
    date: str | None = None
    """None: the question's or the catalogue's own price."""
    age_days: int | None = None
    line: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRow:
    """The best configuration of a machine, and what it costs."""

    machine: str
    num_gpus: int
    price: Price | None
    cost: float | None
    """US dollars: of the training, or of an hour of the service."""
    cost_interval: tuple[float, float] | None
    per_million_tokens: float | None
    """US dollars of a million output tokens of a service, or of trained tokens where the question has no length."""
    per_million_interval: tuple[float, float] | None
    days: float | None
    days_interval: tuple[float, float] | None
    deadline_probability: float | None
    energy: float | None
    co2_kg: float | None
    configuration: RankedRow
    on_front: bool = False
    """No other costs less and takes fewer days."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesPage(Page):
    """A question over several machines and its answer; `error` says why it cannot be answered."""

    kind: Kind
    values: dict[str, str]
    """The question by path, as the address gives it."""
    chosen: tuple[str, ...]
    """Names among `priced` that the address names."""
    others: str
    """Further names, separated by commas."""
    priced: tuple[str, ...]
    """GPUs of the price list."""
    models: tuple[str, ...]
    known: tuple[str, ...]
    """Servers and clusters to suggest."""
    sections: tuple[Section, ...]
    recipes: tuple[RecipeChoice, ...]
    frameworks: tuple[str, ...] = FRAMEWORKS
    heading: str = ""
    verdict: tuple[str, ...] = ()
    rows: tuple[MachineRow, ...] = ()
    misses: tuple[MachineRow, ...] = ()
    """Where no machine keeps the limits: the nearest."""
    not_ranked: tuple[NotRanked, ...] = ()
    figure: Figure | None = None
    """Days over dollars, for plot.js."""
    legal: int = 0
    pruned: int = 0
    commands: tuple[Way, ...] = ()
    error: ErrorFields | None = None


@page_at(router, PATH, template="machines.html", section="Ask")
async def machines_context(request: Request, store: StoreDep, find: FindDep, calibrations: CalibrationsDep) -> MachinesPage:
    """A question over several machines, as shown on its page."""
    return await to_thread.run_sync(partial(_page, request, store, find, calibrations), limiter=RECOMMENDATIONS)


def _page(request: Request, store: Store, find: Find, calibrations: Calibrations | None) -> MachinesPage:
    bounds.check()  # the reader may have left while this waited for its turn
    values = _values(read_form(request.url.query), several=request.query_params.getlist(MACHINES))
    kind = kind_of(values)
    listed = offers()
    priced = tuple(sorted({name for each in listed if (name := _gpu_of(each)) is not None}))
    names = [name.strip() for name in values.get(MACHINES, "").split(",") if name.strip()]
    page = MachinesPage(
        title="Ask: machines",
        json_href=json_href(address(PATH, values)),
        kind=kind,
        values=values,
        chosen=tuple(name for name in names if name in (PRICED, *priced)),
        others=", ".join(name for name in names if name not in (PRICED, *priced)),
        priced=priced,
        models=tuple(sorted({*catalog.names("models"), *store.registered_names(kind="model")})),
        known=tuple(sorted({*catalog.names("clusters"), *catalog.names("gpus"), *store.registered_names(kind="cluster")})),
        sections=_sections(kind),
        recipes=recipe_choices(),
    )
    try:
        query = schema.parse_query(_mapping(values, names, listed))
        answer = recommend_answer(resolve(query, find=find), top=TOP, calibrations=calibrations)
        return _answered(page, query, answer, server=str(request.base_url).rstrip("/"))
    except HpToolError as error:
        return replace(page, error=error.as_dict())


def _values(typed: Mapping[str, str], *, several: Sequence[str]) -> dict[str, str]:
    """The address's values, with those of the example where it says nothing; a form sends each machine by itself."""
    example = SERVING_EXAMPLE if kind_of(typed) == "inference" else EXAMPLE
    whole = any(name.startswith(("training.", "inference.")) for name in typed)
    values = dict(typed) if whole else {**example, **typed}
    if names := ", ".join(dict.fromkeys(name.strip() for part in several for name in part.split(",") if name.strip())):
        values[MACHINES] = names
    return {"kind": kind_of(typed), "model": example["model"], MACHINES: PRICED} | values


def _sections(kind: Kind) -> tuple[Section, ...]:
    """Further fields of the question, folded."""
    left = (
        replace(section, folded=True, fields=tuple(field for field in section.fields if field.name not in ASKED))
        for section in sections(kind)
        if section.title in SHOWN
    )
    return tuple(section for section in left if section.fields)


def _gpu_of(offer: Offer) -> str | None:
    return offer.gpu or (catalog.node_type(offer.node_type).gpu if offer.node_type else None)


def _mapping(values: Mapping[str, str], names: Sequence[str], listed: Sequence[Offer]) -> dict[str, Any]:
    """The question as a query's mapping. A GPU that has a price means every priced machine with it."""
    mapping = to_query({name: text for name, text in values.items() if name not in (MACHINES, NUM_GPUS)})
    if isinstance(mapping.get("cluster", {}), str):
        raise InputError("name machines in the question, and leave cluster out", field="cluster")
    shared = dict(mapping.get("cluster") or {})
    if text := values.get(NUM_GPUS):
        try:
            numbers = [int(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise InputError(f"expected whole numbers separated by commas, got {text[:100]!r}", field=NUM_GPUS) from None
        shared["num_gpus"] = numbers if len(numbers) > 1 else numbers[0]
    priced = {_gpu_of(offer) for offer in listed}
    chosen = [name for name in names if name in priced]
    clusters: list[Any] = [{"node_type": PRICED, **shared}] if PRICED in names else []
    if chosen:
        clusters.append({"node_type": PRICED, "gpu": chosen, **shared})
    for name in names:
        if name not in (PRICED, *chosen):
            clusters.append({("gpu" if catalog.knows("gpus", name) else "node_type"): name, **shared})
    if not clusters:
        raise InputError("name at least one machine", field=MACHINES, code="missing_field")
    return mapping | {"cluster": clusters if len(clusters) > 1 else clusters[0]}


def _answered(page: MachinesPage, query: Query, answer: RecommendAnswer, *, server: str) -> MachinesPage:
    front = {(row.cluster, row.known.provenance.get("num_gpus")) for row in answer.pareto or ()}
    by_name = {offer.name: offer for offer in offers()}
    rows = tuple(_rows(answer.recommendations, query=query, prices=by_name, front=front))
    misses = tuple(_rows(answer.nearest_misses, query=query, prices=by_name, front=set()))
    between = tuple(_rows(answer.pareto or (), query=query, prices=by_name, front=front))
    return replace(
        page,
        heading=machines_heading(query),
        verdict=tuple(_verdict(rows, between, misses, query)),
        rows=rows,
        misses=misses,
        not_ranked=answer.not_ranked,
        figure=_figure(rows, between, query),
        legal=answer.space.legal,
        pruned=answer.space.pruned,
        commands=as_text(query, server=server),
    )


def _rows(
    rows: Sequence[Recommendation] | Sequence[ServingRecommendation],
    *,
    query: Query,
    prices: Mapping[str, Offer],
    front: set[tuple[str | None, Any]],
) -> Iterator[MachineRow]:
    for row in rows:
        num_gpus = int(str(row.known.provenance["num_gpus"]))
        days = row.known.calendar_days if isinstance(row, Recommendation) else None
        yield MachineRow(
            machine=row.cluster or "",
            num_gpus=num_gpus,
            price=_price(row, prices),
            cost=row.cost,
            cost_interval=row.cost_interval,
            per_million_tokens=_per_million(row) if days is None else None,
            per_million_interval=PER_MILLION.between(row.known) if isinstance(row, ServingRecommendation) else None,
            days=days,
            days_interval=row.days_interval,
            deadline_probability=row.deadline_probability,
            energy=row.energy,
            co2_kg=row.co2_kg,
            configuration=ranked_row(row, query=query),
            on_front=(row.cluster, num_gpus) in front,
        )


def _price(row: Recommendation | ServingRecommendation, prices: Mapping[str, Offer]) -> Price | None:
    if row.price is None:
        return None
    offer = prices.get(row.cluster or "")
    if row.price_date is None or offer is None:
        return Price(per_gpu_hour=row.price)
    age = (datetime.now(UTC).date() - date.fromisoformat(row.price_date)).days
    return Price(per_gpu_hour=row.price, date=row.price_date, age_days=age, line=offer.line, source=offer.source)


def _per_million(row: Recommendation | ServingRecommendation) -> float | None:
    if isinstance(row, ServingRecommendation):
        return row.known.cost_per_million_output_tokens
    rate = row.known.tokens_per_second_per_gpu
    return None if row.price is None or not rate else row.price / 3600.0 / rate * 1e6


def _verdict(
    rows: Sequence[MachineRow], front: Sequence[MachineRow], misses: Sequence[MachineRow], query: Query
) -> Iterator[str]:
    """The cheapest and the fastest of what keeps the limits, in a sentence each."""
    limits, every = query.constraints, (*rows, *front)
    within = [] if limits.max_days is None else [f"{limits.max_days:g} days"]
    within += [formats.dollars(limits.max_cost)] if limits.max_cost is not None else []
    kept = f" within {' and '.join(within)}" if within else ""
    if not every:
        yield f"No machine does it{kept}." if kept else "No configuration is acceptable on any of these machines."
        priced = [row for row in misses if row.cost is not None and row.days is not None]
        if priced:
            nearest = min(priced, key=lambda row: row.cost or 0.0)
            yield f"Cheapest that comes near: {_named(nearest)}{_money(nearest)}."
        return
    timed = [row for row in every if row.days is not None and row.cost is not None]
    if not timed:
        yield f"{machines_heading(query).capitalize()}: {_named(rows[0])}{_money(rows[0])}{_kept(query)}."
        return
    cheapest = min(timed, key=lambda row: (row.cost or 0.0, row.days or 0.0))
    fastest = min(timed, key=lambda row: (row.days or 0.0, row.cost or 0.0))
    yield f"Cheapest{kept}: {_named(cheapest)}{_money(cheapest)}."
    same = (fastest.machine, fastest.num_gpus) == (cheapest.machine, cheapest.num_gpus)
    yield "It is the fastest, too." if same else f"Fastest{kept}: {_named(fastest)}{_money(fastest)}."


def _named(row: MachineRow) -> str:
    return f"{row.num_gpus:,} GPUs of {row.machine}" if row.num_gpus > 1 else f"1 GPU of {row.machine}"


def _money(row: MachineRow) -> str:
    if row.days is None or row.cost is None:
        if row.per_million_tokens is None:
            return ""
        dollars = _between(row.per_million_interval, formats.dollars)
        return f", {formats.dollars(row.per_million_tokens)}{dollars} per million tokens{_latencies(row.configuration)}"
    dollars = _between(row.cost_interval, formats.dollars)
    return f", {formats.dollars(row.cost)}{dollars} and {formats.days(row.days)}{_between(row.days_interval, formats.number)}"


def _latencies(row: RankedRow) -> str:
    """`, 231 ms (180 ms to 290 ms) to the first token, ...`; empty of a training."""
    known = ((row.ttft_s, row.ttft_s_interval, "ttft_s"), (row.tpot_s, row.tpot_s_interval, "tpot_s"))
    return "".join(
        f", {formats.seconds(value)}{_between(interval, formats.seconds)} {LATENCIES[name]}"
        for value, interval, name in known
        if value is not None
    )


def _kept(query: Query) -> str:
    """What a row that is ranked keeps, as only such are: `; it meets both targets`."""
    count = 0 if query.targets is None else len(list(query.targets.limits()))
    return "" if not count else f"; it meets {'its target' if count == 1 else 'both targets' if count == 2 else 'all targets'}"


def _between(ends: tuple[float, float] | None, written: Any) -> str:
    return "" if ends is None else f" ({written(ends[0])} to {written(ends[1])})"


def _figure(rows: Sequence[MachineRow], front: Sequence[MachineRow], query: Query) -> Figure | None:
    """Days over dollars with their intervals, and the front between the two as a line."""
    traces = []
    for name, shown, marker in (
        ("Machines", rows, {"color": "--series-1", "size": 7}),
        ("Nothing beats these in both", front, {"color": "--series-3", "size": 9, "symbol": "ring"}),
    ):
        known = [row for row in shown if row.days is not None and row.cost is not None and row.days_interval is not None]
        if known:
            text = (f"{_named(row)}\n{formats.dollars(row.cost or 0.0)}\n{formats.days(row.days or 0.0)}" for row in known)
            points = markers(name, x=(row.cost for row in known), y=(row.days for row in known), text=text, marker=marker)
            ends = [[(row.days_interval or (0.0, 0.0))[end] for row in known] for end in (0, 1)]
            traces.append(points | {"ends": ends})
    if not traces:
        return None
    joined = [row for row in front if row.cost is not None and row.days is not None]
    style = {"color": "--series-3", "width": 1, "plain": True}
    traces.append(line("", x=(row.cost for row in joined), y=(row.days for row in joined), style=style))
    budget = query.constraints.max_cost
    return {
        "traces": traces,
        "x": {"title": "US dollars", "zero": True},
        "y": {"title": "Days", "zero": True},
        "shapes": [] if budget is None else [{"at": budget, "color": "--bad", "label": "budget"}],
    }
