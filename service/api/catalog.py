"""What a query may name: models, GPUs, and clusters; the catalogue's, and what users registered."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Generic, TypeVar, cast

from fastapi import APIRouter, Depends, Query, Request, Response, status

from hp_tool import catalog
from hp_tool.domain.fields import Strict
from hp_tool.domain.hardware import GpuSpec, NodeType
from hp_tool.domain.model import ModelSpec
from hp_tool.domain.ports import Store
from hp_tool.domain.records import RegistrationKind
from hp_tool.errors import HpToolError, NotFoundError
from hp_tool.queries import schema
from hp_tool.queries.registered import checked_registration, read_spec
from service.api import examples, openapi
from service.api.bodies import read_body
from service.api.dependencies import PrincipalDep, StoreDep
from service.api.views import RegistrationView

router = APIRouter(tags=["catalogue"])
TAKEN = "The catalogue has this name, or too many are registered"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing(Generic[T]):
    """Entries by name."""

    items: list[T]
    registered: tuple[RegistrationView, ...] = ()
    """Which of them users added: the caller's own, and everybody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRegistration(Strict):
    """A model or server to be known by a name."""

    name: str
    """What queries will call it: small letters, digits, dots, dashes, underscores; none of the catalogue's names."""
    spec: dict[str, Any]
    """The fields of a catalogue file; for a model also a Hugging Face config.json's content."""
    shared: bool = False
    """For everybody; administrators only. The operator's always are."""


async def _body(request: Request) -> NewRegistration:
    new: NewRegistration = await read_body(request, partial(schema.parse, NewRegistration))
    return new


NewBody = Annotated[NewRegistration, Depends(_body)]
Shared = Annotated[bool, Query(description="Everybody's, not one's own (administrators)")]
Owner = Annotated[str | None, Query(max_length=200, description="Whose, if not one's own (administrators)")]


@router.get("/models")
def models(store: StoreDep) -> Listing[ModelSpec]:
    """Every model that a query may name, with its shape."""
    known = [catalog.model(name) for name in catalog.models()]
    return cast(Listing[ModelSpec], _listing(known, store, kind="model"))


@router.get("/gpus")
def gpus() -> Listing[GpuSpec]:
    """Every GPU of the catalogue, with its datasheet."""
    return Listing(items=[catalog.gpu(name) for name in catalog.gpus()])


@router.get("/clusters")
def clusters(store: StoreDep) -> Listing[NodeType]:
    """Servers, cloud instances and registered clusters, with fabric and price."""
    known = [catalog.node_type(name) for name in catalog.node_types()]
    return cast(Listing[NodeType], _listing(known, store, kind="cluster"))


@router.get("/models/{name}")
def model(name: str, store: StoreDep) -> ModelSpec:
    """The model that a query means by this name."""
    return cast(ModelSpec, _one(name, store, kind="model"))


@router.get("/clusters/{name}")
def cluster(name: str, store: StoreDep) -> NodeType:
    """The server or cluster that a query means by this name."""
    return cast(NodeType, _one(name, store, kind="cluster"))


@router.post(
    "/models",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=openapi.body("NewRegistration", example=examples.MODEL),
    responses=openapi.conflict(TAKEN),
)
def register_model(new: NewBody, store: StoreDep, principal: PrincipalDep) -> RegistrationView:
    """Make a model known by a name, or replace one's own of this name. Searches already submitted keep what they named."""
    return _registered(new, store, kind="model", owner=None if new.shared else principal.owner)


@router.post(
    "/clusters",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=openapi.body("NewRegistration", example=examples.CLUSTER),
    responses=openapi.conflict(TAKEN),
)
def register_cluster(new: NewBody, store: StoreDep, principal: PrincipalDep) -> RegistrationView:
    """Make a server or cluster known by a name, or replace one's own of this name."""
    return _registered(new, store, kind="cluster", owner=None if new.shared else principal.owner)


@router.delete("/models/{name}", status_code=status.HTTP_204_NO_CONTENT)
def remove_model(name: str, store: StoreDep, principal: PrincipalDep, shared: Shared = False, owner: Owner = None) -> Response:
    """Forget a registered model; the catalogue's stay."""
    store.remove_registration(kind="model", name=name, owner=None if shared else owner or principal.owner)
    return Response(status_code=status.HTTP_204_NO_CONTENT)


@router.delete("/clusters/{name}", status_code=status.HTTP_204_NO_CONTENT)
def remove_cluster(
    name: str, store: StoreDep, principal: PrincipalDep, shared: Shared = False, owner: Owner = None
) -> Response:
    """Forget a registered cluster; the catalogue's stay."""
    store.remove_registration(kind="cluster", name=name, owner=None if shared else owner or principal.owner)
    return Response(status_code=status.HTTP_204_NO_CONTENT)


def _registered(new: NewRegistration, store: Store, *, kind: RegistrationKind, owner: str | None) -> RegistrationView:
    checked_registration(kind=kind, name=new.name, spec=new.spec)
    return RegistrationView.of(store.put_registration(kind=kind, name=new.name, spec=new.spec, owner=owner))


def _listing(known: list[Any], store: Store, *, kind: RegistrationKind) -> Listing[Any]:
    records = store.list_registrations(kind=kind)
    items = {entry.name: entry for entry in known}
    for record in records:
        with suppress(HpToolError):  # what this version cannot read is still listed as registered
            items.setdefault(record.name, read_spec(kind=kind, name=record.name, spec=record.spec))
    return Listing(items=[items[name] for name in sorted(items)], registered=tuple(map(RegistrationView.of, records)))


def _one(name: str, store: Store, *, kind: RegistrationKind) -> ModelSpec | NodeType:
    if catalog.knows("models" if kind == "model" else "clusters", name):
        return catalog.model(name) if kind == "model" else catalog.node_type(name)
    record = store.get_registration(kind=kind, name=name.casefold())
    if record is None:
        raise NotFoundError(f"no {kind} is called {name[:200]!r}", field="name")
    return read_spec(kind=kind, name=record.name, spec=record.spec)
