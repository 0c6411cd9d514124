"""What routes are given: the store, the settings, a parsed query."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Query, Request

from hp_tool.answers import uncalibrated
from hp_tool.correction import Corrections
from hp_tool.domain.ports import Store
from service.settings import Settings


def get_settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


def get_store(request: Request) -> Store:
    store: Store = request.app.state.store
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
CorrectionsDep = Annotated[Corrections, Depends(get_corrections)]
