"""/models, /gpus and /clusters."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import RedirectResponse, Response
from starlette.status import HTTP_303_SEE_OTHER, HTTP_422_UNPROCESSABLE_CONTENT

from hp_tool import catalog
from hp_tool.domain.access import Scope
from hp_tool.domain.ports import Store
from hp_tool.domain.records import RegistrationKind
from hp_tool.errors import HpToolError
from hp_tool.queries import schema
from service.api import catalog as api
from service.api.catalog import NewRegistration
from service.api.dependencies import PrincipalDep, StoreDep
from service.dashboard.catalogue.building import (
    CLUSTER_EXAMPLE,
    MODEL_EXAMPLE,
    clusters_page,
    entry_page,
    gpus_page,
    models_page,
)
from service.dashboard.catalogue.contexts import ClustersPage, EntryPage, GpusPage, ModelsPage, NewEntry
from service.dashboard.forms import Form
from service.dashboard.rendering import render
from service.dashboard.twins import page_at
from service.keys import Principal

EXAMPLES: dict[RegistrationKind, str] = {"model": MODEL_EXAMPLE, "cluster": CLUSTER_EXAMPLE}

router = APIRouter(tags=["dashboard"])


def empty_form(kind: RegistrationKind, principal: Principal) -> NewEntry | None:
    """For who may add something."""
    if principal.scope < Scope.SUBMIT:
        return None
    return NewEntry(name="", text="", example=EXAMPLES[kind], error=None)


@page_at(router, "/models", template="models.html", section="Models")
def models_context(store: StoreDep, principal: PrincipalDep) -> ModelsPage:
    """The models as their page shows them."""
    return _models(store, new=empty_form("model", principal))


@page_at(router, "/gpus", template="gpus.html", section="GPUs")
def gpus_context() -> GpusPage:
    """The GPUs as their page shows them."""
    return gpus_page(api.gpus().items)


@page_at(router, "/clusters", template="clusters.html", section="Clusters")
def clusters_context(store: StoreDep, principal: PrincipalDep) -> ClustersPage:
    """The clusters as their page shows them."""
    return _clusters(store, new=empty_form("cluster", principal))


@page_at(router, "/models/{name}", template="entry.html", section="Models")
def model_context(name: str, store: StoreDep, principal: PrincipalDep) -> EntryPage:
    """One model as its page shows it."""
    return entry_page(api.model(name, store), section="models", removable=_own(store, principal, kind="model", name=name))


@page_at(router, "/gpus/{name}", template="entry.html", section="GPUs")
def gpu_context(name: str) -> EntryPage:
    """One GPU as its page shows it."""
    return entry_page(catalog.gpu(name, field="name"), section="gpus", removable=False)


@page_at(router, "/clusters/{name}", template="entry.html", section="Clusters")
def cluster_context(name: str, store: StoreDep, principal: PrincipalDep) -> EntryPage:
    """One cluster as its page shows it."""
    return entry_page(api.cluster(name, store), section="clusters", removable=_own(store, principal, kind="cluster", name=name))


@router.post("/models", include_in_schema=False)
def add_model(fields: Form, store: StoreDep, principal: PrincipalDep) -> Response:
    """Register what the form holds, or show it again with what is wrong."""
    try:
        api.register_model(_new(fields), store, principal)
    except HpToolError as error:
        page = _models(store, new=_again(fields, "model", error))
        return render("models.html", page=page, section="Models", status=HTTP_422_UNPROCESSABLE_CONTENT)
    return RedirectResponse("/models", status_code=HTTP_303_SEE_OTHER)


@router.post("/clusters", include_in_schema=False)
def add_cluster(fields: Form, store: StoreDep, principal: PrincipalDep) -> Response:
    """As add_model."""
    try:
        api.register_cluster(_new(fields), store, principal)
    except HpToolError as error:
        page = _clusters(store, new=_again(fields, "cluster", error))
        return render("clusters.html", page=page, section="Clusters", status=HTTP_422_UNPROCESSABLE_CONTENT)
    return RedirectResponse("/clusters", status_code=HTTP_303_SEE_OTHER)


@router.post("/models/{name}/remove", include_in_schema=False)
def remove_model(name: str, store: StoreDep, principal: PrincipalDep) -> RedirectResponse:
    api.remove_model(name, store, principal.owner)
    return RedirectResponse("/models", status_code=HTTP_303_SEE_OTHER)


@router.post("/clusters/{name}/remove", include_in_schema=False)
def remove_cluster(name: str, store: StoreDep, principal: PrincipalDep) -> RedirectResponse:
    api.remove_cluster(name, store, principal.owner)
    return RedirectResponse("/clusters", status_code=HTTP_303_SEE_OTHER)


def _new(fields: dict[str, str]) -> NewRegistration:
    spec: dict[str, Any] = schema.parse_mapping(fields.get("spec", ""))
    return NewRegistration(name=fields.get("name", ""), spec=spec)


def _again(fields: dict[str, str], kind: RegistrationKind, error: HpToolError) -> NewEntry:
    text = fields.get("spec", "")
    return NewEntry(name=fields.get("name", ""), text=text, example=EXAMPLES[kind], error=error.as_dict())


def _models(store: Store, *, new: NewEntry | None) -> ModelsPage:
    listing = api.models(store)
    return models_page(listing.items, registered={each.name for each in listing.registered}, new=new)


def _clusters(store: Store, *, new: NewEntry | None) -> ClustersPage:
    listing = api.clusters(store)
    return clusters_page(listing.items, registered={each.name for each in listing.registered}, new=new)


def _own(store: Store, principal: Principal, *, kind: RegistrationKind, name: str) -> bool:
    records = store.list_registrations(kind=kind)
    mine = any(record.name == name.casefold() and record.owner == principal.owner for record in records)
    return mine and principal.scope >= Scope.SUBMIT
