"""What routes are given: the store, the settings, a parsed query."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Query, Request

from hp_tool.answers import uncalibrated
from hp_tool.correction import Corrections
from hp_tool.domain.access_store import AccessStore
from hp_tool.domain.ports import Store
from service.keys import Principal
from service.ownership import PrincipalStore
from service.settings import Settings


def get_settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def get_principal(request: Request) -> Principal:
    """Who asks, as the gate found out."""
    principal: Principal = request.state.principal
    return principal


def get_store(request: Request) -> Store:
    """The store as far as the one who asks may use it."""
    state = request.app.state
    return cast(Store, PrincipalStore(store=state.store, principal=get_principal(request), settings=state.settings))


def get_system_store(request: Request) -> AccessStore:
    """All of it, for routes that only administrators reach, or that speak of nobody in particular."""
    store: AccessStore = request.app.state.store
    return store


def get_corrections(
    request: Request,
    calibration: Annotated[bool, Query(description="Correct predictions by what is known of the cluster")] = True,
) -> Corrections:
    """The newest stored calibrations, unless the request wants the cost model alone."""
    stored: Corrections = request.app.state.calibrations
    return stored if calibration else uncalibrated


SettingsDep = Annotated[Settings, Depends(get_settings)]
StoreDep = Annotated[Store, Depends(get_store)]
SystemStoreDep = Annotated[AccessStore, Depends(get_system_store)]
CorrectionsDep = Annotated[Corrections, Depends(get_corrections)]
