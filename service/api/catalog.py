"""Names that a query may use: models, GPUs, clusters, recipes and trainers of the catalogue, and
what users registered.
"""

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
from hp_tool.questions.training.recipes import recipe as one_recipe
from hp_tool.questions.training.recipes import recipes as all_recipes
from service.api import openapi
from service.api.bodies import json_body
from service.api.dependencies import Cursor, PrincipalDep, StoreDep, versioned
from service.api.views import RegistrationView

router = versioned(tag="catalogue")
TAKEN = "The catalogue has this name, or too many are registered"

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
MOST = 1000
"""Entries of an answer; of traces fewer, for one may take a megabyte."""
MOST_TRACES = 20
Limit = Annotated[int, Query(ge=1, le=MOST)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Generic[T]):
    """Entries by name."""

    items: list[T]
    registered: tuple[RegistrationView, ...] = ()
    """The entries that users registered: the caller's own, and everybody's."""
    next_cursor: str | None = None
    """Send it as `cursor` to get the next page; null on the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRegistration(Strict):
    """A model, server or trace to register under a name."""

    name: str
    """Its name in queries: small letters, digits, dots, dashes, underscores; none of the
    catalogue's names.
    """
    spec: dict[str, Any]
    """The fields of a catalogue file; for a model also a Hugging Face config.json's content; the
    columns of a trace.
    """
    shared: bool = False
    """Register it for everybody; administrators only. The operator's registrations always are."""


NewBody = Annotated[NewRegistration, json_body(NewRegistration)]


async def _owner(
    principal: PrincipalDep,
    shared: Annotated[
        bool, Query(description="Everybody's, not one's own (administrators)")
    ] = False,
    owner: Annotated[
        str | None, Query(max_length=200, description="Whose, if not one's own (administrators)")
    ] = None,
) -> str | None:
    return None if shared else owner or principal.owner


OwnerDep = Annotated[str | None, Depends(_owner)]


@dataclass(frozen=True, kw_only=True)
class CountedModel(ModelSpec):
    """A model with its parameters; valid input again."""

    num_parameters: int
    num_active_parameters: int
    """Without the experts that a token is not sent to."""

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """The model with what follows from its fields."""
        known: dict[str, Any] = {
            each.name: getattr(spec, each.name) for each in fields(spec)
        } | catalog.parameter_counts(spec)
        return cls(**known)


@router.get("/models")
def models(store: StoreDep, limit: Limit = MOST, cursor: Cursor = None) -> Listing[CountedModel]:
    """Every model that a query may name, with its shape."""
    listing = cast(Listing[ModelSpec], _listing(store, kind="model", limit=limit, cursor=cursor))
    return replace(cast(Any, listing), items=list(map(CountedModel.of, listing.items)))


@router.get("/gpus")
def gpus(limit: Limit = MOST, cursor: Cursor = None) -> Listing[GpuSpec]:
    """Every GPU of the catalogue, with its datasheet."""
    names, following = _page(catalog.names("gpus"), limit=limit, cursor=cursor)
    return Listing(items=list(map(catalog.gpu, names)), next_cursor=following)


@router.get("/clusters")
def clusters(store: StoreDep, limit: Limit = MOST, cursor: Cursor = None) -> Listing[NodeType]:
    """Servers, cloud instances and registered clusters, with fabric and price."""
    return cast(Listing[NodeType], _listing(store, kind="cluster", limit=limit, cursor=cursor))


@router.get("/recipes")
def recipes(limit: Limit = MOST, cursor: Cursor = None) -> Listing[Recipe]:
    """Every recipe that training.recipe may name, with what it sets and for which trainings."""
    return _known(all_recipes(), limit=limit, cursor=cursor)


@router.get("/recipes/{name}")
def recipe(name: str) -> Recipe:
    """The recipe of this name."""
    return one_recipe(name, field="name")


@router.get("/trainers")
def trainers(limit: Limit = MOST, cursor: Cursor = None) -> Listing[RegisteredTrainer]:
    """Every training command that an administrator registered, by the name that a search's
    `trainer` may give.
    """
    return _known(registered_trainers(), limit=limit, cursor=cursor)


@router.get("/models/{name}")
def model(name: str, store: StoreDep) -> CountedModel:
    """The model that a query means by this name."""
    return CountedModel.of(cast(ModelSpec, _one(name, store, kind="model")))


@router.get("/clusters/{name}")
def cluster(name: str, store: StoreDep) -> NodeType:
    """The server or cluster that a query means by this name."""
    return cast(NodeType, _one(name, store, kind="cluster"))


@router.post(
    "/models",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=openapi.body(NewRegistration, example=MODEL_EXAMPLE),
    responses=openapi.conflict(TAKEN),
)
def register_model(
    new: NewBody, response: Response, store: StoreDep, principal: PrincipalDep
) -> RegistrationView:
    """Register a model, or replace one's own of this name. Searches already submitted keep the
    earlier spec.
    """
    view = registered(new, store, kind="model", owner=None if new.shared else principal.owner)
    response.headers["Location"] = f"/v1/models/{quote(view.name, safe='')}"
    return view


@router.post(
    "/clusters",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=openapi.body(NewRegistration, example=CLUSTER_EXAMPLE),
    responses=openapi.conflict(TAKEN),
)
def register_cluster(
    new: NewBody, response: Response, store: StoreDep, principal: PrincipalDep
) -> RegistrationView:
    """Register a server or cluster, or replace one's own of this name."""
    view = registered(new, store, kind="cluster", owner=None if new.shared else principal.owner)
    response.headers["Location"] = f"/v1/clusters/{quote(view.name, safe='')}"
    return view


@router.post(
    "/traces",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=openapi.body(NewRegistration, example=TRACE_EXAMPLE),
    responses=openapi.conflict(TAKEN),
)
def register_trace(
    new: NewBody, response: Response, store: StoreDep, principal: PrincipalDep
) -> RegistrationView:
    """Register a trace of requests that inference.trace may name, or replace one's own of this
    name.
    """
    view = registered(new, store, kind="trace", owner=None if new.shared else principal.owner)
    response.headers["Location"] = f"/v1/traces/{quote(view.name, safe='')}"
    return view


@router.get("/traces")
def traces(
    store: StoreDep,
    limit: Annotated[int, Query(ge=1, le=MOST_TRACES)] = MOST_TRACES,
    cursor: Cursor = None,
) -> Listing[TraceSpec]:
    """Every trace that a query may name, with its requests: one's own, and everybody's."""
    return cast(Listing[TraceSpec], _listing(store, kind="trace", limit=limit, cursor=cursor))


@router.delete("/traces/{name}", status_code=status.HTTP_204_NO_CONTENT)
def remove_trace(name: str, store: StoreDep, owner: OwnerDep) -> None:
    """Remove a registered trace."""
    store.remove_registration(kind="trace", name=name, owner=owner)


@router.delete("/models/{name}", status_code=status.HTTP_204_NO_CONTENT)
def remove_model(name: str, store: StoreDep, owner: OwnerDep) -> None:
    """Remove a registered model; the catalogue's cannot be removed."""
    store.remove_registration(kind="model", name=name, owner=owner)


@router.delete("/clusters/{name}", status_code=status.HTTP_204_NO_CONTENT)
def remove_cluster(name: str, store: StoreDep, owner: OwnerDep) -> None:
    """Remove a registered cluster; the catalogue's cannot be removed."""
    store.remove_registration(kind="cluster", name=name, owner=owner)


def registered(
    new: NewRegistration, store: Store, *, kind: RegistrationKind, owner: str | None
) -> RegistrationView:
    """The registration, checked and stored. Raises HpToolError."""
    checked_registration(kind=kind, name=new.name, spec=new.spec)
    return RegistrationView.of(
        store.put_registration(kind=kind, name=new.name, spec=new.spec, owner=owner)
    )


def _listing(
    store: Store, *, kind: RegistrationKind, limit: int, cursor: str | None
) -> Listing[Any]:
    known = {"model": catalog.names("models"), "cluster": catalog.names("clusters")}.get(kind, ())
    names, following = _page(
        {*known, *store.registered_names(kind=kind)}, limit=limit, cursor=cursor
    )
    records = {record.name: record for record in store.list_registrations(kind=kind, names=names)}
    items: list[Any] = []
    for name in names:
        if name in known:
            items.append(catalog.model(name) if kind == "model" else catalog.node_type(name))
        elif record := records.get(name):
            with suppress(
                HpToolError
            ):  # what this version cannot read is still listed as registered
                items.append(read_spec(kind=kind, name=name, spec=record.spec))
    return Listing(
        items=items,
        registered=tuple(map(RegistrationView.of, records.values())),
        next_cursor=following,
    )


def _known(entries: Sequence[Any], *, limit: int, cursor: str | None) -> Listing[Any]:
    names, following = _page([entry.name for entry in entries], limit=limit, cursor=cursor)
    return Listing(items=[entry for entry in entries if entry.name in names], next_cursor=following)


def _page(names: Iterable[str], *, limit: int, cursor: str | None) -> tuple[list[str], str | None]:
    """The names that come after the cursor, which is the last one of the page before, and the
    cursor of the next page.
    """
    left = sorted(name for name in names if cursor is None or name > cursor)
    return left[:limit], left[limit - 1] if len(left) > limit else None


def _one(name: str, store: Store, *, kind: RegistrationKind) -> ModelSpec | NodeType | TraceSpec:
    if catalog.knows("models" if kind == "model" else "clusters", name):
        return catalog.model(name) if kind == "model" else catalog.node_type(name)
    record = store.get_registration(kind=kind, name=name.casefold())
    if record is None:
        raise NotFoundError(f"no {kind} is called {name[:200]!r}", field="name")
    return read_spec(kind=kind, name=record.name, spec=record.spec)
