"""Whether the process lives, and whether it can do its work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from service.api.dependencies import SystemStoreDep
from service.api.problems import RESPONSES

router = APIRouter(tags=["health"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Said only by a healthy service; the others answer with a problem."""

    status: Literal["ok"] = "ok"


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health()


@router.get("/readyz", responses=RESPONSES)
def readyz(store: SystemStoreDep) -> Health:
    """The database answers too; 503 where it does not."""
    store.ping()
    return Health()


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus text exposition", "content": {"text/plain": {}}}, **RESPONSES},
)
def metrics(request: Request) -> Response:
    """Requests, queue, runs, GPU-seconds and prediction error, for Prometheus."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)
