"""Calibrations of each cluster, in versions: the list, and making new ones from stored measurements."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, status

from hp_tool.domain.access import AccessStore
from hp_tool.learning import MadeCalibration, calibrate
from service.api.dependencies import Cursor, StoreDep, SystemStoreDep, refuse_body
from service.api.views import CalibrationView, PageView

router = APIRouter(prefix="/calibrations", tags=["calibrations"])

Gpu = Annotated[str | None, Query(max_length=100, description="Catalogue name of the device")]
Framework = Annotated[str | None, Query(max_length=100)]


def learn(
    request: Request, store: AccessStore, *, gpu: str | None = None, framework: str | None = None
) -> tuple[MadeCalibration, ...]:
    """Fit the stored measurements; this process takes up what is new at once."""
    made = calibrate(store=store, gpu=gpu, framework=framework)
    request.app.state.calibrations.forget()
    request.app.state.answers.doubt()
    return made


@router.post("", status_code=status.HTTP_201_CREATED, dependencies=[Depends(refuse_body)])
def make(request: Request, store: SystemStoreDep, gpu: Gpu = None, framework: Framework = None) -> PageView[CalibrationView]:
    """Fit the stored measurements, or those of one GPU or framework, and answer the newest version of every series.

    This needs scope submit: it learns from everybody's measurements and shows none of them. A series without new measurements
    keeps its version. Estimates use a new version at once in this process, and within seconds in others.
    """
    made = learn(request, store, gpu=gpu, framework=framework)
    return PageView(items=[CalibrationView.of(each.record) for each in made], next_cursor=None)


@router.get("")
def list_calibrations(
    store: StoreDep,
    cluster_key: Annotated[str | None, Query(max_length=200)] = None,
    framework: Framework = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
    cursor: Cursor = None,
) -> PageView[CalibrationView]:
    """Calibrations that match all filters, newest first."""
    page = store.list_calibrations(cluster_key=cluster_key, framework=framework, limit=limit, cursor=cursor)
    return PageView.of(page, CalibrationView.of)
