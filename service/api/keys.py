"""Routes for API keys and the audit log, for administrators."""

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal, cast

from fastapi import Query, Request, Response, status
from starlette.concurrency import run_in_threadpool

from hp_tool.domain.access import AuditRecord, KeyRecord, Scope
from hp_tool.domain.fields import Strict
from service import keys
from service.api import openapi
from service.api.bodies import json_body
from service.api.dependencies import Cursor, SystemStoreDep, versioned_router
from service.api.views import PageView, View

router = versioned_router(tag="administration")

ScopeName = Literal["read", "submit", "admin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey(Strict):
    """A key to create."""

    owner: str
    """Owner of the searches that it submits and may see."""
    scope: ScopeName
    lifetime_s: float | None = None
    """Seconds until it expires; default: never."""
    requests_per_second: float | None = None
    """Rate limit; default: the service's."""
    gpu_seconds_per_day: float | None = None
    """Daily quota of GPU-seconds; default: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyView(View):
    """A key, without its secret."""

    id: str
    owner: str
    scope: ScopeName
    requests_per_second: float | None
    gpu_seconds_per_day: float | None
    gpu_seconds_today: float | None
    """GPU-seconds used since midnight UTC or reserved by unfinished searches; null in lists."""
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    @staticmethod
    def computed(record: KeyRecord) -> dict[str, Any]:
        return {"scope": scope_name(record.scope), "gpu_seconds_today": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedKey:
    """A new key with its secret, which is returned only once."""

    key: KeyView
    token: str
    """Token for `Authorization: Bearer TOKEN`."""


def scope_name(scope: Scope) -> ScopeName:
    """Return a scope's name, as in the API and on the command line."""
    return cast(ScopeName, scope.name.lower())


EXAMPLE = {
    "owner": "ada",
    "scope": "submit",
    "lifetime_s": 7_776_000.0,
    "gpu_seconds_per_day": 36_000.0,
}


@router.post(
    "/keys",
    status_code=status.HTTP_201_CREATED,
    openapi_extra=openapi.body(NewKey, example=EXAMPLE),
)
def create_key(
    new: Annotated[NewKey, json_body(NewKey)], response: Response, store: SystemStoreDep
) -> IssuedKey:
    """Create a key. Only this response contains its secret."""
    record, token = keys.issue(
        store=store,
        owner=new.owner,
        scope=Scope[new.scope.upper()],
        lifetime_s=new.lifetime_s,
        requests_per_second=new.requests_per_second,
        gpu_seconds_per_day=new.gpu_seconds_per_day,
    )
    response.headers["Location"] = f"/v1/keys/{record.id}"
    return IssuedKey(key=KeyView.of(record), token=token)


@router.get("/keys")
def list_keys(
    store: SystemStoreDep,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Cursor = None,
) -> PageView[KeyView]:
    """List keys, newest first, including revoked and expired ones."""
    page = store.list_keys(limit=limit, cursor=cursor)
    return PageView.of(page, KeyView.of)


@router.get("/keys/{key_id}")
def get_key(key_id: str, store: SystemStoreDep) -> KeyView:
    """Return a key with the GPU-seconds its searches used today."""
    record = store.get_key(key_id=key_id)
    return KeyView.of(record, gpu_seconds_today=store.gpu_seconds_today(api_key_id=key_id))


@router.delete("/keys/{key_id}")
async def revoke_key(key_id: str, request: Request, store: SystemStoreDep) -> KeyView:
    """Revoke a key permanently; other processes of the service follow within seconds.

    Its searches continue.
    """
    record = await run_in_threadpool(store.revoke_key, key_id=key_id)
    request.app.state.keyring.forget(key_id)
    return KeyView.of(record)


@router.get("/audit")
def list_audit(
    store: SystemStoreDep,
    owner: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Cursor = None,
) -> PageView[AuditRecord]:
    """List changes and rejected requests, newest first."""
    page = store.audit(owner=owner, limit=limit, cursor=cursor)
    return PageView(items=list(page.items), next_cursor=page.next_cursor)
