"""Routes for the names that queries may use: catalogue entries and users' registrations."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Generic, Self, TypeVar, cast
from urllib.parse import quote

from fastapi import Depends, Query, Response, status

from hp_tool import catalog
from hp_tool.cluster.trainers.command import RegisteredTrainer, registered_trainers
from hp_tool.domain.fields import Strict
from hp_tool.domain.hardware import GpuSpec, NodeType
from hp_tool.domain.inference import TraceSpec
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.ports import Store
from hp_tool.domain.recipe import Recipe
from hp_tool.domain.records import RegistrationKind
from hp_tool.errors import HpToolError, NotFoundError
from hp_tool.questions.registered import checked_registration, read_spec
from hp_tool.questions.training.recipes import get_recipe, list_recipes
from service.api import openapi
from service.api.bodies import json_body
from service.api.dependencies import Cursor, PrincipalDep, StoreDep, versioned_router
from service.api.views import RegistrationView

router = versioned_router(tag="catalogue")
TAKEN = "The catalogue has this name, or too many names are registered"

MODEL_EXAMPLE: dict[str, Any] = {
    "name": "gpt-tiny",
    "spec": {
        "name": "gpt-tiny",
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 1024,
    },
}
CLUSTER_EXAMPLE: dict[str, Any] = {
    "name": "lab",
    "spec": {
        "gpu": "h100-sxm-80gb",
        "gpus_per_node": 8,
        "num_gpus": 64,
        "fabric": "1 x 200 Gb/s",
        "inter_node_bandwidth_bytes_per_second": 25e9,
    },
}

TRACE_EXAMPLE: dict[str, Any] = {
    "name": "monday",
    "spec": {
        "arrival_s": [0.0, 0.4, 1.1],
        "input_tokens": [812, 1290, 77],
        "output_tokens": [120, 64, 310],
    },
}

T = TypeVar("T")
MAX_ENTRIES = 1000
"""Maximum number of entries per page. Pages of traces are shorter, because a trace can be 1 MB."""
MAX_TRACES = 20
Limit = Annotated[int, Query(ge=1, le=MAX_ENTRIES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Generic[T]):
    """A page of catalogue entries, sorted by name."""

    items: list[T]
    registered: tuple[RegistrationView, ...] = ()
    """Registered entries: the caller's own and shared ones."""
    next_cursor: str | None = None
    """Pass it as `cursor` to get the next page; null on the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRegistration(Strict):
    """A model, cluster or trace to register under a name."""

    name: str
    """Name for queries: lower-case letters, digits, dots, dashes, underscores; not a name of the
    catalogue.
    """
    spec: dict[str, Any]
    """Fields of a catalogue file; for a model, also the content of a Hugging Face config.json; for
    a trace, its columns.
    """
    shared: bool = False
    """Share with everybody; administrators only. The operator's registrations are always shared."""


NewBody = Annotated[NewRegistration, json_body(NewRegistration)]


async def _owner(
    principal: PrincipalDep,
    shared: Annotated[
        bool, Query(description="The shared entry, not your own (administrators)")
    ] = False,
    owner: Annotated[
        str | None, Query(max_length=200, description="Owner, if not you (administrators)")
    ] = None,
) -> str | None:
    return None if shared else owner or principal.owner


OwnerDep = Annotated[str | None, Depends(_owner)]


@dataclass(frozen=True, kw_only=True)
class CountedModel(ModelSpec):
    """A model with its parameter counts; also valid as input."""

    num_parameters: int
    num_active_parameters: int
    """Number of parameters without the experts that a token is not routed to."""

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Return a model with its parameter counts."""
        values: dict[str, Any] = {
            field.name: getattr(spec, field.name) for field in fields(spec)
        } | catalog.parameter_counts(spec)
        return cls(**values)


@router.get("/models")
def models(
    store: StoreDep, limit: Limit = MAX_ENTRIES, cursor: Cursor = None
) -> Listing[CountedModel]:
    """List the models that queries may name, with their architecture."""
    listing = cast(Listing[ModelSpec], _listing(store, kind="model", limit=limit, cursor=cursor))
    return replace(cast(Any, listing), items=list(map(CountedModel.of, listing.items)))


@router.get("/gpus")
def gpus(limit: Limit = MAX_ENTRIES, cursor: Cursor = None) -> Listing[GpuSpec]:
    """List the GPUs of the catalogue with their datasheet figures."""
    names, next_cursor = _page(catalog.names("gpus"), limit=limit, cursor=cursor)
    return Listing(items=list(map(catalog.gpu, names)), next_cursor=next_cursor)


@router.get("/clusters")
def clusters(
    store: StoreDep, limit: Limit = MAX_ENTRIES, cursor: Cursor = None
) -> Listing[NodeType]:
    """List servers, cloud instances and registered clusters, with fabric and price."""
    return cast(Listing[NodeType], _listing(store, kind="cluster", limit=limit, cursor=cursor))


@router.get("/recipes")
def recipes(limit: Limit = MAX_ENTRIES, cursor: Cursor = None) -> Listing[Recipe]:
    """List the recipes for training.recipe, what they set, and which trainings they apply to."""
    return _catalogue_listing(list_recipes(), limit=limit, cursor=cursor)


@router.get("/recipes/{name}")
def recipe(name: str) -> Recipe:
    """Return the recipe of this name."""
    return get_recipe(name, field="name")


@router.get("/trainers")
def trainers(limit: Limit = MAX_ENTRIES, cursor: Cursor = None) -> Listing[RegisteredTrainer]:
    """List the training commands that an administrator registered, by name for `trainer`."""
    return _catalogue_listing(registered_trainers(), limit=limit, cursor=cursor)


@router.get("/models/{name}")
def model(name: str, store: StoreDep) -> CountedModel:
    """Return the model of this name."""
    return CountedModel.of(cast(ModelSpec, _find_entry(name, store, kind="model")))


@router.get("/clusters/{name}")
def cluster(name: str, store: StoreDep) -> NodeType:
    """Return the server or cluster of this name."""
    return cast(NodeType, _find_entry(name, store, kind="cluster"))


@router.get("/traces")
def traces(
    store: StoreDep,
    limit: Annotated[int, Query(ge=1, le=MAX_TRACES)] = MAX_TRACES,
    cursor: Cursor = None,
) -> Listing[TraceSpec]:
    """List your own and shared traces, with their requests."""
    return cast(Listing[TraceSpec], _listing(store, kind="trace", limit=limit, cursor=cursor))


def _add_routes(
    kind: RegistrationKind, *, example: dict[str, Any], registers: str, removes: str
) -> None:
    def register(
        new: NewBody, response: Response, store: StoreDep, principal: PrincipalDep
    ) -> RegistrationView:
        view = registered(new, store, kind=kind, owner=None if new.shared else principal.owner)
        response.headers["Location"] = f"/v1/{kind}s/{quote(view.name, safe='')}"
        return view

    def remove(name: str, store: StoreDep, owner: OwnerDep) -> None:
        store.remove_registration(kind=kind, name=name, owner=owner)

    router.add_api_route(
        f"/{kind}s",
        register,
        methods=["POST"],
        name=f"register_{kind}",
        description=registers,
        status_code=status.HTTP_201_CREATED,
        openapi_extra=openapi.body(NewRegistration, example=example),
        responses=openapi.conflict(TAKEN),
    )
    router.add_api_route(
        f"/{kind}s/{{name}}",
        remove,
        methods=["DELETE"],
        name=f"remove_{kind}",
        description=removes,
        status_code=status.HTTP_204_NO_CONTENT,
    )


_add_routes(
    "model",
    example=MODEL_EXAMPLE,
    registers="Register a model, or replace your own of this name.\n\nSearches already submitted "
    "keep the old specification.",
    removes="Remove a registered model; catalogue models cannot be removed.",
)
_add_routes(
    "cluster",
    example=CLUSTER_EXAMPLE,
    registers="Register a server or cluster, or replace your own of this name.",
    removes="Remove a registered cluster; catalogue clusters cannot be removed.",
)
_add_routes(
    "trace",
    example=TRACE_EXAMPLE,
    registers="Register a trace of requests for inference.trace, or replace your own of this name.",
    removes="Remove a registered trace.",
)


def registered(
    new: NewRegistration, store: Store, *, kind: RegistrationKind, owner: str | None
) -> RegistrationView:
    """Validate and store a registration."""
    checked_registration(kind=kind, name=new.name, spec=new.spec)
    return RegistrationView.of(
        store.put_registration(kind=kind, name=new.name, spec=new.spec, owner=owner)
    )


def _listing(
    store: Store, *, kind: RegistrationKind, limit: int, cursor: str | None
) -> Listing[Any]:
    in_catalogue = {"model": catalog.names("models"), "cluster": catalog.names("clusters")}.get(
        kind, ()
    )
    names, next_cursor = _page(
        {*in_catalogue, *store.registered_names(kind=kind)}, limit=limit, cursor=cursor
    )
    records = {record.name: record for record in store.list_registrations(kind=kind, names=names)}
    items: list[Any] = []
    for name in names:
        if name in in_catalogue:
            items.append(catalog.model(name) if kind == "model" else catalog.node_type(name))
        elif record := records.get(name):
            # An entry that this version cannot read is still listed under `registered`.
            with suppress(HpToolError):
                items.append(read_spec(kind=kind, name=name, spec=record.spec))
    return Listing(
        items=items,
        registered=tuple(map(RegistrationView.of, records.values())),
        next_cursor=next_cursor,
    )


def _catalogue_listing(entries: Sequence[Any], *, limit: int, cursor: str | None) -> Listing[Any]:
    names, next_cursor = _page([entry.name for entry in entries], limit=limit, cursor=cursor)
    return Listing(
        items=[entry for entry in entries if entry.name in names], next_cursor=next_cursor
    )


def _page(names: Iterable[str], *, limit: int, cursor: str | None) -> tuple[list[str], str | None]:
    """Return a page of names and the next cursor. A cursor is the last name of a page."""
    following = sorted(name for name in names if cursor is None or name > cursor)
    return following[:limit], following[limit - 1] if len(following) > limit else None


def _find_entry(
    name: str, store: Store, *, kind: RegistrationKind
) -> ModelSpec | NodeType | TraceSpec:
    if catalog.has_entry("models" if kind == "model" else "clusters", name):
        return catalog.model(name) if kind == "model" else catalog.node_type(name)
    record = store.get_registration(kind=kind, name=name.casefold())
    if record is None:
        raise NotFoundError(f"No {kind} is called {name[:200]!r}.", field="name")
    return read_spec(kind=kind, name=record.name, spec=record.spec)
