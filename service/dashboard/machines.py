"""Page /explorer/machines: a training or a service on several machines, ranked by cost and days.

The address contains the question.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from anyio import to_thread
from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse
from starlette.responses import Response

from hp_tool import catalog
from hp_tool.catalog.prices import offers
from hp_tool.domain.prices import PRICED, NotRanked, Offer
from hp_tool.domain.query import Kind, Query
from hp_tool.errors import HpToolError, InputError, LimitError
from hp_tool.questions import schema
from hp_tool.questions.answers import RecommendAnswer, answer_recommend
from hp_tool.questions.form_fields import Section, form_sections
from hp_tool.questions.registered import Find
from hp_tool.questions.training.calibrated import Calibrations
from hp_tool.wording.rankings import MACHINES as COLUMNS
from hp_tool.wording.rankings import Table
from hp_tool.wording.words import machines_heading
from service.api.bodies import resolve
from service.api.dependencies import CalibrationsDep, FindDep, StoreDep, turn
from service.dashboard.figures import Figure
from service.dashboard.machine_rows import (
    MachineRow,
    days_and_dollars,
    machine_rows,
    machine_verdict,
)
from service.dashboard.new_search_form import (
    FRAMEWORKS,
    RecipeChoice,
    kind_of,
    recipe_choices,
    to_query,
)
from service.dashboard.page import (
    ErrorFields,
    Page,
    address,
    csv_response,
    json_href,
    read_form,
    streamed,
)
from service.dashboard.run import Way, as_text

PATH = "/explorer/machines"
TOP = 40
"""Machines listed."""
MACHINES = "machines"
"""Parameter of the address: names of GPUs, servers or clusters, separated by commas; `priced` is
the whole price list.
"""
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
        *(
            "cluster",
            "cluster.gpu",
            NUM_GPUS,
            "cluster.market",
            "training.sequence_length",
            "training.global_batch_size",
        ),
        *(
            "training.total_tokens",
            "inference.input_length",
            "inference.output_length",
            "inference.request_rate_per_second",
        ),
        *("constraints.max_days", "constraints.max_cost", "targets.ttft_s", "targets.tpot_s"),
    }
)
"""Fields of the question itself."""

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinesPage(Page):
    """A question over several machines and its answer; `error` has the reason of a failure."""

    kind: Kind
    values: dict[str, str]
    """The question by path, from the address."""
    chosen: tuple[str, ...]
    """Names of `priced` in the address."""
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
    """Nearest misses if no machine meets the limits."""
    not_ranked: tuple[NotRanked, ...] = ()
    figure: Figure | None = None
    """Days over dollars, for plot.js."""
    legal: int = 0
    pruned: int = 0
    commands: tuple[Way, ...] = ()
    error: ErrorFields | None = None
    answered: bool = False
    """Whether the fields from `heading` on are known."""

    @property
    def table(self) -> Table:
        """The machines with their columns."""
        return Table(columns=COLUMNS[self.kind], rows=self.rows or self.misses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The part of a question that is known immediately, and its answer."""

    page: MachinesPage
    query: Query | None
    """As typed; None if it cannot be read, which the page reports."""
    request: Request
    find: Find
    calibrations: Calibrations | None

    async def answered(self) -> MachinesPage:
        """Return the whole page: rankings of many machines take seconds."""
        try:
            async with turn(self.request, self.request.app.state.ranking_turns):
                return await to_thread.run_sync(self._answered)
        except LimitError as error:  # the page is half sent
            return replace(self.page, error=error.as_dict(), answered=True)

    def _answered(self) -> MachinesPage:
        if self.query is None:
            return self.page
        try:
            answer = answer_recommend(
                resolve(self.query, find=self.find), top=TOP, calibrations=self.calibrations
            )
            return _answered(
                self.page, self.query, answer, server=str(self.request.base_url).rstrip("/")
            )
        except HpToolError as error:
            return replace(self.page, error=error.as_dict(), answered=True)


def asked(request: Request, store: StoreDep, find: FindDep, calibrations: CalibrationsDep) -> Asked:
    """Return the question of the address, with the example's values by default."""
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
        known=tuple(
            sorted(
                {
                    *catalog.names("clusters"),
                    *catalog.names("gpus"),
                    *store.registered_names(kind="cluster"),
                }
            )
        ),
        sections=_sections(kind),
        recipes=recipe_choices(),
    )
    query = None
    try:
        query = schema.parse_query(_mapping(values, names, listed))
    except HpToolError as error:
        page = replace(page, error=error.as_dict(), answered=True)
    return Asked(page=page, query=query, request=request, find=find, calibrations=calibrations)


AskedDep = Annotated[Asked, Depends(asked)]


@router.get(f"{PATH}.json", response_model=MachinesPage)
async def machines_json(question: AskedDep) -> MachinesPage:
    """Return a question over several machines for its page."""
    return await question.answered()


@router.get(f"{PATH}.csv", response_class=Response, include_in_schema=False)
async def machines_csv(question: AskedDep) -> Response:
    return csv_response((await question.answered()).table, name="machines")


@router.get(PATH, response_class=HTMLResponse, include_in_schema=False)
async def machines_html(question: AskedDep) -> Response:
    return streamed(
        "machines.html",
        "machines_answer.html",
        page=question.page,
        whole=question.answered,
        section="Ask",
    )


def _values(typed: Mapping[str, str], *, several: Sequence[str]) -> dict[str, str]:
    """Return the address's values, with those of the example by default; a form sends each machine
    separately.
    """
    example = SERVING_EXAMPLE if kind_of(typed) == "inference" else EXAMPLE
    whole = any(name.startswith(("training.", "inference.")) for name in typed)
    values = dict(typed) if whole else {**example, **typed}
    if names := ", ".join(
        dict.fromkeys(name.strip() for part in several for name in part.split(",") if name.strip())
    ):
        values[MACHINES] = names
    return {"kind": kind_of(typed), "model": example["model"], MACHINES: PRICED} | values


def _sections(kind: Kind) -> tuple[Section, ...]:
    """Return further fields of the question, collapsed."""
    left = (
        replace(
            section,
            folded=True,
            fields=tuple(field for field in section.fields if field.name not in ASKED),
        )
        for section in form_sections(kind)
        if section.title in SHOWN
    )
    return tuple(section for section in left if section.fields)


def _gpu_of(offer: Offer) -> str | None:
    return offer.gpu or (catalog.node_type(offer.node_type).gpu if offer.node_type else None)


def _mapping(
    values: Mapping[str, str], names: Sequence[str], listed: Sequence[Offer]
) -> dict[str, Any]:
    """Return the question as a query's mapping. A GPU with a price means every priced machine with
    it.
    """
    mapping = to_query(
        {name: text for name, text in values.items() if name not in (MACHINES, NUM_GPUS)}
    )
    if isinstance(mapping.get("cluster", {}), str):
        raise InputError("name machines in the question, and leave cluster out", field="cluster")
    shared = dict(mapping.get("cluster") or {})
    if text := values.get(NUM_GPUS):
        try:
            numbers = [int(part) for part in text.split(",") if part.strip()]
        except ValueError:
            raise InputError(
                f"expected whole numbers separated by commas, got {text[:100]!r}", field=NUM_GPUS
            ) from None
        shared["num_gpus"] = numbers if len(numbers) > 1 else numbers[0]
    priced = {_gpu_of(offer) for offer in listed}
    chosen = [name for name in names if name in priced]
    clusters: list[Any] = [{"node_type": PRICED, **shared}] if PRICED in names else []
    if chosen:
        clusters.append({"node_type": PRICED, "gpu": chosen, **shared})
    for name in names:
        if name not in (PRICED, *chosen):
            clusters.append(
                {("gpu" if catalog.has_entry("gpus", name) else "node_type"): name, **shared}
            )
    if not clusters:
        raise InputError("name at least one machine", field=MACHINES, code="missing_field")
    return mapping | {"cluster": clusters if len(clusters) > 1 else clusters[0]}


def _answered(
    page: MachinesPage, query: Query, answer: RecommendAnswer, *, server: str
) -> MachinesPage:
    front = {
        (row.cluster, row.preferred_estimate.provenance.get("num_gpus"))
        for row in answer.pareto or ()
    }
    by_name = {offer.name: offer for offer in offers()}
    rows = tuple(machine_rows(answer.recommendations, query=query, prices=by_name, front=front))
    misses = tuple(machine_rows(answer.nearest_misses, query=query, prices=by_name, front=set()))
    between = tuple(machine_rows(answer.pareto or (), query=query, prices=by_name, front=front))
    return replace(
        page,
        heading=machines_heading(query),
        verdict=tuple(machine_verdict(rows, between, misses, query)),
        rows=rows,
        misses=misses,
        not_ranked=answer.not_ranked,
        figure=days_and_dollars(rows, between, query),
        legal=answer.space.legal,
        pruned=answer.space.pruned,
        commands=as_text(query, server=server),
        answered=True,
    )
