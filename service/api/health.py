"""Whether the process lives, and whether it can do its work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fastapi import APIRouter

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
