"""Health checks: whether the process lives, and whether it can do its work."""

from dataclasses import dataclass
from typing import Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from hp_tool.cluster.diagnostics import Check, database_state
from hp_tool.errors import StoreError
from service.api.dependencies import SystemStoreDep

router = APIRouter(tags=["health"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """The answer of a healthy service; others answer with a problem."""

    status: Literal["ok"] = "ok"


@router.get("/healthz")
async def healthz() -> Health:
    """The process answers."""
    return Health()


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness(Health):
    """The checks; answered only where none failed."""

    checks: list[Check]


@router.get("/readyz")
def readyz(store: SystemStoreDep) -> Readiness:
    """Whether the database answers, has the schema and takes writes; 503 names what failed and how
    to fix it.
    """
    checks = list(database_state(store.state()))
    if wrong := [check for check in checks if check.status == "failed"]:
        raise StoreError(
            "; ".join(f"{check.detail}: {check.fix}" for check in wrong), code="not_ready"
        )
    return Readiness(checks=checks)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus text exposition", "content": {"text/plain": {}}}},
)
def metrics(request: Request) -> Response:
    """Requests, queue, runs, GPU-seconds and prediction error, for Prometheus."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)
