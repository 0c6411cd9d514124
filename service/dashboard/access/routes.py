"""/keys and /audit. The gate lets administrators through, and nobody else."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from starlette.concurrency import run_in_threadpool
from starlette.status import HTTP_303_SEE_OTHER, HTTP_422_UNPROCESSABLE_CONTENT

from hp_tool.domain.access import KeyRecord, Scope
from hp_tool.domain.access_store import AccessStore
from hp_tool.errors import HpToolError, InputError
from hp_tool.units import SECONDS_PER_DAY
from service import keys
from service.api.dependencies import Cursor, SystemStoreDep
from service.api.keys import ScopeName, scope_name
from service.dashboard.access.contexts import AuditPage, KeyRow, KeysPage, KeyState
from service.dashboard.contexts import Tone
from service.dashboard.forms import Form
from service.dashboard.rendering import render
from service.dashboard.twins import page_at

ROWS_A_PAGE = 100
SCOPES: tuple[ScopeName, ...] = get_args(ScopeName)
TONES: dict[KeyState, Tone] = {"valid": "good", "expired": "", "revoked": "bad"}

router = APIRouter(tags=["dashboard"])


@page_at(router, "/keys", template="keys.html", section="Keys")
def keys_context(store: SystemStoreDep, cursor: Cursor = None) -> KeysPage:
    """The keys as their page shows them."""
    return _keys(store, cursor=cursor)


@page_at(router, "/audit", template="audit.html", section="Keys")
def audit_context(store: SystemStoreDep, owner: Annotated[str, Query(max_length=200)] = "", cursor: Cursor = None) -> AuditPage:
    """The audit log as its page shows it."""
    page = store.audit(owner=owner or None, limit=ROWS_A_PAGE, cursor=cursor)
    kept = {"owner": owner} if owner else {}
    return AuditPage(
        title="Audit",
        json_href=f"/audit.json?{urlencode(kept)}",
        owner=owner,
        rows=tuple(page.items),
        next_href=f"/audit?{urlencode({**kept, 'cursor': page.next_cursor})}" if page.next_cursor else None,
    )


@router.post("/keys", include_in_schema=False)
def make_key(fields: Form, store: SystemStoreDep) -> Response:
    """Make the key that the form describes. Its secret is in this answer and nowhere else."""
    try:
        days, scope = _number(fields, "lifetime_days"), fields.get("scope", "")
        if scope not in SCOPES:
            raise InputError(f"{scope!r} is no scope; use one of {', '.join(SCOPES)}", field="scope")
        _, token = keys.issue(
            store=store,
            owner=fields.get("owner", ""),
            scope=Scope[scope.upper()],
            lifetime_s=days * SECONDS_PER_DAY if days is not None else None,
            requests_per_second=_number(fields, "requests_per_second"),
            gpu_seconds_per_day=_number(fields, "gpu_seconds_per_day"),
        )
    except HpToolError as error:
        page = _keys(store, fields=fields, error=error)
        return render("keys.html", page=page, section="Keys", status=HTTP_422_UNPROCESSABLE_CONTENT)
    return render("keys.html", page=_keys(store, issued=token), section="Keys")


@router.post("/keys/{key_id}/revoke", include_in_schema=False)
async def revoke_key(key_id: str, request: Request, store: SystemStoreDep) -> RedirectResponse:
    await run_in_threadpool(store.revoke_key, key_id=key_id)
    request.app.state.keyring.forget(key_id)
    return RedirectResponse("/keys", status_code=HTTP_303_SEE_OTHER)


def _keys(
    store: AccessStore,
    *,
    cursor: str | None = None,
    fields: dict[str, str] | None = None,
    issued: str | None = None,
    error: HpToolError | None = None,
) -> KeysPage:
    page = store.list_keys(limit=ROWS_A_PAGE, cursor=cursor)
    return KeysPage(
        title="Keys",
        json_href="/keys.json",
        rows=tuple(_row(record) for record in page.items),
        next_href=f"/keys?{urlencode({'cursor': page.next_cursor})}" if page.next_cursor else None,
        scopes=SCOPES,
        fields=fields or {},
        issued=issued,
        error=error.as_dict() if error else None,
    )


def _row(record: KeyRecord) -> KeyRow:
    state: KeyState = "valid"
    if record.expires_at is not None and record.expires_at <= datetime.now(UTC):
        state = "expired"
    if record.revoked_at is not None:
        state = "revoked"
    return KeyRow(
        id=record.id,
        owner=record.owner,
        scope=scope_name(record.scope),
        state=state,
        tone=TONES[state],
        requests_per_second=record.requests_per_second,
        gpu_seconds_per_day=record.gpu_seconds_per_day,
        created_at=record.created_at,
        expires_at=record.expires_at,
        revoke_href=f"/keys/{record.id}/revoke" if state == "valid" else None,
    )


def _number(fields: dict[str, str], name: str) -> float | None:
    text = fields.get(name, "").strip()
    try:
        return float(text) if text else None
    except ValueError:
        raise InputError(f"{name.replace('_', ' ')} must be a number, got {text[:40]!r}", field=name) from None
