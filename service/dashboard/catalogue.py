"""Pages /models, /gpus and /clusters: names for queries, and forms to add models and clusters."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

from fastapi import APIRouter
from fastapi import Query as QueryParameter
from fastapi.responses import RedirectResponse, Response
from starlette.status import HTTP_422_UNPROCESSABLE_CONTENT

from hp_tool import catalog
from hp_tool.catalog import library
from hp_tool.catalog.prices import lowest_offers
from hp_tool.cost.parameters import active_parameters, total_parameters
from hp_tool.domain.access import Scope
from hp_tool.domain.hardware import GpuSpec, NodeType, Precision
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.ports import Store
from hp_tool.domain.records import RegistrationKind
from hp_tool.errors import HpToolError
from hp_tool.questions import schema
from service.api import catalog as api
from service.api.catalog import CountedModel, Listing, NewRegistration
from service.api.dependencies import PrincipalDep, StoreDep
from service.api.views import View
from service.dashboard import formats
from service.dashboard.gpu_facts import gpu_facts
from service.dashboard.page import ErrorFields, Fact, Form, Page, address, done, page_at, render
from service.keys import Principal

Named = TypeVar("Named", CountedModel, NodeType)
Entry = TypeVar("Entry", CountedModel, GpuSpec, NodeType)
Section = Literal["models", "gpus", "clusters"]
LEARNED_POSITIONS = 2048
"""Number of positions assumed for learned position embeddings without a stated length."""
EXAMPLES: dict[RegistrationKind, str] = {
    "model": """num_hidden_layers: 32
hidden_size: 4096
num_attention_heads: 32
num_key_value_heads: 8
intermediate_size: 14336
vocab_size: 128256
gated_mlp: true
normalization: rmsnorm
tie_word_embeddings: false""",
    "cluster": """gpu: h100-sxm-80gb
gpus_per_node: 8
num_gpus: 64
inter_node_bandwidth_bytes_per_second: 50.0e+9
fabric: 8 x 400 Gb/s InfiniBand
price_per_gpu_hour: 2.5""",
}
UNITS: dict[str, Callable[[float], str]] = {
    "_bytes_per_second": formats.per_second,
    "_flops_per_second": formats.tflops,
    "_bytes": formats.gib,
    "_w": lambda value: f"{formats.count(value)} W",
}
"""Number formats by suffix of the field name."""

LABELS = {
    "inter_node_bandwidth": "network per GPU",
    "nvlink_bandwidth": "scale-up link per GPU",
    "nvlink_domain_size": "GPUs per scale-up domain",
}
"""Labels for fields whose name would be ambiguous or would name one vendor's link."""
HALVES: tuple[Precision, ...] = ("bf16", "fp16")
PER_PAGE = 50

ALWAYS = ("architecture", "normalization", "gated_mlp", "tie_word_embeddings")
"""Model fields that are always shown."""
Words = Annotated[str, QueryParameter(max_length=100, description="A part of the names to list")]
PageNumber = Annotated[int, QueryParameter(ge=1, le=10_000)]

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow(View):
    """A model's shape."""

    name: str
    href: str
    parameters: float
    active_parameters: float | None
    """Parameters active per token; None for a dense model."""
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    num_experts: int | None
    registered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow(View):
    """Main values of a GPU's datasheet."""

    name: str
    href: str
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    half_flops_per_second: float | None
    """The higher of the bf16 and fp16 rates. Older GPUs support only fp16."""
    fp8_flops_per_second: float | None
    nvlink_bandwidth_bytes_per_second: float | None
    network_bandwidth_bytes_per_second: float
    power_w: float
    price_per_hour: float | None
    """Typical on-demand price."""
    lowest_price_per_hour: float | None
    """Lowest on-demand price in the price list."""
    predict_only: bool
    """Whether searches cannot run on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRow(View):
    """A server or cluster."""

    name: str
    href: str
    gpu: str
    gpus_per_node: int
    num_gpus: int | None
    network_bandwidth_bytes_per_second: float
    fabric: str
    price_per_gpu_hour: float | None
    registered: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """The form that adds an entry; after an error, with the submitted values."""

    name: str = ""
    text: str = ""
    example: str
    error: ErrorFields | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NamesPage(Page):
    """A page of a list to which users can add; their entries come first."""

    words: str
    total: int
    """Number of entries on all pages."""
    next_href: str | None
    """URL of the next page; None on the last page."""
    new: NewEntry | None
    """Form for a new entry; None if the caller may not add entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsPage(NamesPage):
    """A page of the list of models."""

    rows: tuple[ModelRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusPage(Page):
    """The list of GPUs."""

    words: str
    rows: tuple[GpuRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClustersPage(NamesPage):
    """A page of the list of servers and clusters."""

    rows: tuple[ClusterRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPage(Page):
    """One model, GPU or cluster with all its known fields."""

    section: Section
    facts: tuple[Fact, ...]
    source: str
    explorer_href: str
    gpu_href: str | None
    """URL of the page of a cluster's GPU; None for other entries, and if the GPU is not in the
    catalogue.
    """
    remove_href: str | None
    """URL to remove the entry; None if the caller may not remove it."""


@page_at(router, "/models", template="models.html", section="Models")
def models_context(
    store: StoreDep, principal: PrincipalDep, words: Words = "", page: PageNumber = 1
) -> ModelsPage:
    """List models whose names contain `words`."""
    listing = api.models(store)
    registered = {entry.name for entry in listing.registered}
    part, of = _entries_page(listing, "model", principal, words=words, page=page)
    rows = tuple(
        ModelRow.of(
            spec,
            href=_href("models", spec.name),
            parameters=total_parameters(spec, sequence_length=LEARNED_POSITIONS),
            active_parameters=active_parameters(spec, sequence_length=LEARNED_POSITIONS)
            if spec.num_experts
            else None,
            num_key_value_heads=spec.num_key_value_heads or spec.num_attention_heads,
            registered=spec.name in registered,
        )
        for spec in part
    )
    return ModelsPage(title="Models", rows=rows, **of)


@page_at(router, "/gpus", template="gpus.html", section="GPUs")
def gpus_context(words: Words = "") -> GpusPage:
    """List GPUs whose names contain `words`."""
    lowest = lowest_offers()
    rows = tuple(
        GpuRow.of(
            spec,
            lowest_price_per_hour=lowest[spec.name].on_demand if spec.name in lowest else None,
            href=_href("gpus", spec.name),
            half_flops_per_second=max(
                map(spec.peak_flops_per_second.get, HALVES), key=lambda flops: flops or 0.0
            ),
            fp8_flops_per_second=spec.peak_flops_per_second.get("fp8"),
            network_bandwidth_bytes_per_second=spec.inter_node_bandwidth_bytes_per_second,
        )
        for spec in _entries_named(api.gpus().items, words)
    )
    return GpusPage(
        title="GPUs", json_href=address("/gpus.json", {"words": words}), words=words, rows=rows
    )


@page_at(router, "/clusters", template="clusters.html", section="Clusters")
def clusters_context(
    store: StoreDep, principal: PrincipalDep, words: Words = "", page: PageNumber = 1
) -> ClustersPage:
    """List clusters whose names contain `words`."""
    listing = api.clusters(store)
    registered = {entry.name for entry in listing.registered}
    part, of = _entries_page(listing, "cluster", principal, words=words, page=page)
    rows = tuple(
        ClusterRow.of(
            node,
            href=_href("clusters", node.name),
            network_bandwidth_bytes_per_second=node.inter_node_bandwidth_bytes_per_second,
            registered=node.name in registered,
        )
        for node in part
    )
    return ClustersPage(title="Clusters", rows=rows, **of)


@page_at(router, "/models/{name}", template="entry.html", section="Models")
def model_context(name: str, store: StoreDep, principal: PrincipalDep) -> EntryPage:
    """Return the fields of one model."""
    return _entry_page(
        api.model(name, store),
        section="models",
        removable=_owns(store, principal, kind="model", name=name),
    )


@page_at(router, "/gpus/{name}", template="entry.html", section="GPUs")
def gpu_context(name: str) -> EntryPage:
    """Return the fields of one GPU."""
    return _entry_page(catalog.gpu(name, field="name"), section="gpus", removable=False)


@page_at(router, "/clusters/{name}", template="entry.html", section="Clusters")
def cluster_context(name: str, store: StoreDep, principal: PrincipalDep) -> EntryPage:
    """Return the fields of one cluster."""
    removable = _owns(store, principal, kind="cluster", name=name)
    return _entry_page(api.cluster(name, store), section="clusters", removable=removable)


def _entries_page(
    listing: Listing[Named], kind: RegistrationKind, principal: Principal, *, words: str, page: int
) -> tuple[list[Named], dict[str, Any]]:
    """Return the entries on one page of a list, and the page's fields except rows and title."""
    added = {entry.name for entry in listing.registered}
    chosen = sorted(_entries_named(listing.items, words), key=lambda entry: entry.name not in added)
    last = page * PER_PAGE
    return chosen[last - PER_PAGE : last], {
        "words": words,
        "total": len(chosen),
        "json_href": address(
            f"/{kind}s.json", {"words": words, "page": page if page > 1 else None}
        ),
        "next_href": address(f"/{kind}s", {"words": words, "page": page + 1})
        if last < len(chosen)
        else None,
        "new": NewEntry(example=EXAMPLES[kind]) if principal.scope >= Scope.SUBMIT else None,
    }


def _entries_named(entries: Iterable[Entry], words: str) -> list[Entry]:
    return [entry for entry in entries if words.strip().casefold() in entry.name.casefold()]


def _add_routes(
    kind: RegistrationKind, page_of: Callable[[Store, Principal], ModelsPage | ClustersPage]
) -> None:
    """Add the form routes that register and remove entries of this kind."""

    def add(fields: Form, store: StoreDep, principal: PrincipalDep) -> Response:
        form = NewEntry(
            name=fields.get("name", ""), text=fields.get("spec", ""), example=EXAMPLES[kind]
        )
        try:
            new = NewRegistration(name=form.name, spec=dict(schema.parse_mapping(form.text)))
            api.registered(new, store, kind=kind, owner=principal.owner)
        except HpToolError as error:
            page = replace(page_of(store, principal), new=replace(form, error=error.as_dict()))
            return render(
                f"{kind}s.html",
                page=page,
                section=page.title,
                status=HTTP_422_UNPROCESSABLE_CONTENT,
            )
        return done(f"/{kind}s", "added")

    def remove(name: str, store: StoreDep, principal: PrincipalDep) -> RedirectResponse:
        store.remove_registration(kind=kind, name=name, owner=principal.owner)
        return done(f"/{kind}s", "removed")

    router.add_api_route(f"/{kind}s", add, methods=["POST"], include_in_schema=False)
    router.add_api_route(
        f"/{kind}s/{{name}}/remove", remove, methods=["POST"], include_in_schema=False
    )


_add_routes("model", models_context)
_add_routes("cluster", clusters_context)


ASKED_AT: dict[Section, tuple[str, str]] = {
    "models": ("/explorer", "model"),
    "gpus": ("/explorer", "cluster.gpu"),
    "clusters": ("/explorer", "cluster"),
}
"""Page with a query about an entry, and the query path that it sets."""


def _entry_page(
    spec: ModelSpec | GpuSpec | NodeType, *, section: Section, removable: bool
) -> EntryPage:
    values: dict[str, Any] = schema.to_dict(spec)
    source = str(values.pop("source", "") or "")
    del values["name"]
    if isinstance(spec, ModelSpec):
        for counted in ("num_parameters", "num_active_parameters"):
            values.pop(counted, None)
        counts = {"parameters": total_parameters(spec, sequence_length=LEARNED_POSITIONS)}
        if spec.num_experts:
            counts["active_parameters"] = active_parameters(spec, sequence_length=LEARNED_POSITIONS)
        values = {
            name: formats.billions(number) for name, number in counts.items()
        } | _family_fields(values)
        if spec.blocks is not None:
            values["blocks"] = "; ".join(map(str, spec.blocks))
    if isinstance(spec, GpuSpec):
        values = gpu_facts(spec, values)
    facts = [_fact(name, value) for name, value in values.items() if value is not None]
    known_gpu = (
        catalog.gpu(spec.gpu)
        if isinstance(spec, NodeType) and library.has_entry("gpus", spec.gpu)
        else None
    )
    if isinstance(spec, NodeType) and known_gpu is not None:
        facts += _gpu_facts(spec, known_gpu)
    page, control = ASKED_AT[section]
    href = _href(section, spec.name)
    return EntryPage(
        title=spec.name,
        json_href=f"{href}.json",
        section=section,
        facts=tuple(facts),
        source=source,
        explorer_href=address(page, {control: spec.name}),
        gpu_href=_href("gpus", known_gpu.name) if known_gpu is not None else None,
        remove_href=f"{href}/remove" if removable else None,
    )


def _family_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that differ from their defaults, and those that are always shown."""
    defaults = {field.name: field.default for field in dataclasses.fields(ModelSpec)}
    return {
        name: value
        for name, value in values.items()
        if name in ALWAYS or value != defaults.get(name)
    }


def _gpu_facts(node: NodeType, gpu: GpuSpec) -> Iterator[Fact]:
    """Yield properties of the cluster's GPU: link, memory and price."""
    link, link_rate = "scale-up link", gpu.nvlink_bandwidth_bytes_per_second
    if link_rate is None:
        link, link_rate = "PCIe", gpu.pcie_bandwidth_bytes_per_second
    yield Fact(name=f"{link} per GPU", value=formats.per_second(link_rate))
    if node.nvlink_domain_size is None and gpu.nvlink_bandwidth_bytes_per_second is not None:
        yield Fact(name=LABELS["nvlink_domain_size"], value=formats.count(node.gpus_per_node))
    yield Fact(name="memory per GPU", value=formats.gib(gpu.memory_bytes))
    yield Fact(name="memory per node", value=formats.gib(gpu.memory_bytes * node.gpus_per_node))
    if node.price_per_gpu_hour is None and gpu.price_per_hour is not None:
        yield Fact(
            name="$ per GPU-hour",
            value=f"no list price; {formats.dollars(gpu.price_per_hour)} is typical for this GPU",
        )


def _href(section: Section, name: str) -> str:
    return f"/{section}/{quote(name, safe='')}"


def _fact(field: str, value: Any) -> Fact:
    """Return a field of a specification, with the unit next to the value instead of in the name."""
    unit = next((unit for unit in UNITS if field.endswith(unit)), "")
    name = field.removesuffix(unit)
    return Fact(
        name=LABELS.get(name) or formats.words(name),
        value=formats.in_words(value, number=UNITS.get(unit, formats.count)),
    )


def _owns(store: Store, principal: Principal, *, kind: RegistrationKind, name: str) -> bool:
    record = store.get_registration(kind=kind, name=name.casefold())
    own = record is not None and record.owner == principal.owner
    return own and principal.scope >= Scope.SUBMIT
