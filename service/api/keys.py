"""Keys and the audit log, for administrators."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, Request, status
from starlette.concurrency import run_in_threadpool

from hp_tool.domain.access import AuditRecord, KeyRecord, Scope
from hp_tool.domain.fields import Strict
from hp_tool.queries import schema
from service import keys
from service.api import examples, openapi
from service.api.bodies import read_body
from service.api.dependencies import Cursor, SystemStoreDep
from service.api.views import PageView

router = APIRouter(tags=["administration"])

ScopeName = Literal["read", "submit", "admin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewKey(Strict):
    """A key to be made."""

    owner: str
    """Whose searches it sees and submits."""
    scope: ScopeName
    lifetime_s: float | None = None
    """Left out: it never expires."""
    requests_per_second: float | None = None
    """Left out: the service's default."""
    gpu_seconds_per_day: float | None = None
    """Left out: no quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyView:
    """A key without its secret."""

    id: str
    owner: str
    scope: ScopeName
    requests_per_second: float | None
    gpu_seconds_per_day: float | None
    gpu_seconds_today: float | None
    """Used since midnight UTC or promised to searches under way; None in lists."""
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    @classmethod
    def of(cls, record: KeyRecord, *, gpu_seconds_today: float | None = None) -> KeyView:
        return cls(
            id=record.id,
            owner=record.owner,
            scope=scope_name(record.scope),
            requests_per_second=record.requests_per_second,
            gpu_seconds_per_day=record.gpu_seconds_per_day,
            gpu_seconds_today=gpu_seconds_today,
            created_at=record.created_at,
            expires_at=record.expires_at,
            revoked_at=record.revoked_at,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedKey:
    """A new key, and the only time that its secret is seen."""

    key: KeyView
    token: str
    """What its owner sends as `Authorization: Bearer TOKEN`."""


def scope_name(scope: Scope) -> ScopeName:
    """A scope as the API and the command line write it."""
    names: dict[Scope, ScopeName] = {Scope.READ: "read", Scope.SUBMIT: "submit", Scope.ADMIN: "admin"}
    return names[scope]


async def _body(request: Request) -> NewKey:
    new: NewKey = await read_body(request, partial(schema.parse, NewKey))
    return new


@router.post("/keys", status_code=status.HTTP_201_CREATED, openapi_extra=openapi.body("NewKey", example=examples.KEY))
def create_key(new: Annotated[NewKey, Depends(_body)], store: SystemStoreDep) -> IssuedKey:
    """Make a key; its secret is in this answer and nowhere else."""
    record, token = keys.issue(
        store=store,
        owner=new.owner,
        scope=Scope[new.scope.upper()],
        lifetime_s=new.lifetime_s,
        requests_per_second=new.requests_per_second,
        gpu_seconds_per_day=new.gpu_seconds_per_day,
    )
    return IssuedKey(key=KeyView.of(record), token=token)


@router.get("/keys")
def list_keys(
    store: SystemStoreDep,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Cursor = None,
) -> PageView[KeyView]:
    """Newest first, revoked and expired ones too."""
    page = store.list_keys(limit=limit, cursor=cursor)
    return PageView(items=[KeyView.of(record) for record in page.items], next_cursor=page.next_cursor)


@router.get("/keys/{key_id}")
def get_key(key_id: str, store: SystemStoreDep) -> KeyView:
    """One key, and what its searches used today."""
    record = store.get_key(key_id=key_id)
    return KeyView.of(record, gpu_seconds_today=store.gpu_seconds_today(api_key_id=key_id))


@router.delete("/keys/{key_id}")
async def revoke_key(key_id: str, request: Request, store: SystemStoreDep) -> KeyView:
    """Make it worthless for ever; other processes of the service notice within seconds. Its searches go on."""
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
    """Who changed what, or was refused it; newest first."""
    page = store.audit(owner=owner, limit=limit, cursor=cursor)
    return PageView(items=list(page.items), next_cursor=page.next_cursor)
