"""Health checks: liveness, readiness and metrics."""

from dataclasses import dataclass
from typing import Literal

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from hp_tool.cluster.diagnostics import Check, check_database_state
from hp_tool.errors import StoreError
from service.api.dependencies import SystemStoreDep

router = APIRouter(tags=["health"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Response of a service that works; other responses are problems."""

    status: Literal["ok"] = "ok"


@router.get("/healthz")
async def healthz() -> Health:
    """Return ok if the process responds."""
    return Health()


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness(Health):
    """Results of the readiness checks, if none failed."""

    checks: list[Check]


@router.get("/readyz")
def readyz(store: SystemStoreDep) -> Readiness:
    """Check that the database responds, has the current schema and accepts writes.

    Otherwise 503 names each failure and its fix.
    """
    checks = list(check_database_state(store.state()))
    if failed := [check for check in checks if check.status == "failed"]:
        raise StoreError(
            "; ".join(f"{check.detail}: {check.fix}" for check in failed), code="not_ready"
        )
    return Readiness(checks=checks)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"description": "Prometheus text exposition", "content": {"text/plain": {}}}},
)
def metrics(request: Request) -> Response:
    """Return requests, queue, runs, GPU-seconds and prediction error for Prometheus."""
    return Response(request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST)
