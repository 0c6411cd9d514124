"""Pages /keys and /audit, for administrators only."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Literal
from urllib.parse import quote, unquote

from fastapi import APIRouter, Query, Request
from fastapi.responses import RedirectResponse, Response
from starlette.status import HTTP_201_CREATED, HTTP_400_BAD_REQUEST, HTTP_422_UNPROCESSABLE_CONTENT

from hp_tool.domain.access import AuditRecord, KeyRecord, Scope
from hp_tool.domain.units import SECONDS_PER_DAY
from hp_tool.errors import HpToolError, InputError
from service import keys
from service.api import keys as api
from service.api.dependencies import Cursor, SystemStoreDep
from service.api.keys import ScopeName, scope_name
from service.api.views import View
from service.dashboard.page import (
    ErrorFields,
    Form,
    Page,
    Tone,
    address,
    done,
    next_href,
    page_at,
    render,
)

KeyState = Literal["valid", "expired", "revoked"]

MAX_ROWS = 100
SCOPES: dict[ScopeName, str] = {
    "read": "predict, and read the owner's searches and measurements",
    "submit": "also submit and control searches, and report measurements",
    "admin": "everything of all owners; keys and the audit log",
}
TONES: dict[KeyState, Tone] = {"valid": "good", "expired": "", "revoked": "bad"}

NOUNS = {
    "searches": "search",
    "watches": "watch",
    "measurements": "measurement",
    "models": "model",
    "clusters": "cluster",
    "traces": "trace",
    "keys": "key",
    "calibrations": "calibration",
    "calibration": "calibration",
}
"""Nouns for resources, by the first part of their routes."""
PAGES = frozenset({"searches", "watches", "models", "clusters"})
"""First path segments of resources that have pages."""
VERBS = {"POST": "create", "PATCH": "change", "PUT": "change", "DELETE": "delete", "GET": "read"}
DEEDS = {
    "label": "label",
    "steps": "report steps to",
    "budget": "change budget of",
    "longer": "allow longer runs of",
}
"""Verbs by the last part of a route, for routes whose last part is not clear by itself."""

router = APIRouter(tags=["dashboard"])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow(View):
    """A key without its secret."""

    id: str
    owner: str
    scope: ScopeName
    state: KeyState
    tone: Tone
    requests_per_second: float | None
    gpu_seconds_per_day: float | None
    created_at: datetime
    expires_at: datetime | None
    revoke_href: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysPage(Page):
    """All keys, and the form that creates one."""

    rows: tuple[KeyRow, ...]
    next_href: str | None
    scopes: tuple[ScopeName, ...]
    allowed: dict[ScopeName, str]
    """Description of each scope."""
    fields: dict[str, str]
    """Values of the submitted form, if it had an error."""
    issued: str | None
    """Token of the key just created; shown once."""
    error: ErrorFields | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow(View):
    """An audit record in words."""

    id: str
    created_at: datetime
    owner: str | None
    api_key_id: str | None
    action: str
    resource: str
    outcome: str
    request_id: str | None
    deed: str
    """Action and type of resource in words, such as `create search`; otherwise the route."""
    object: str
    """ID, name or path of the resource."""
    href: str | None
    """URL of the resource's page; None without one."""
    result: str
    """`done`, or the HTTP error in words."""
    tone: Tone


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage(Page):
    """Audit log, newest entry first."""

    owner: str
    rows: tuple[AuditRow, ...]
    next_href: str | None


@page_at(router, "/keys", template="keys.html", section="Keys")
def keys_context(store: SystemStoreDep, cursor: Cursor = None) -> KeysPage:
    """List API keys."""
    page = store.list_keys(limit=MAX_ROWS, cursor=cursor)
    return KeysPage(
        title="Keys",
        json_href="/keys.json",
        rows=tuple(_row(record) for record in page.items),
        next_href=next_href("/keys", page),
        scopes=tuple(SCOPES),
        allowed=SCOPES,
        fields={},
        issued=None,
        error=None,
    )


@page_at(router, "/audit", template="audit.html", section="Keys")
def audit_context(
    store: SystemStoreDep, owner: Annotated[str, Query(max_length=200)] = "", cursor: Cursor = None
) -> AuditPage:
    """List entries of the audit log, newest first."""
    page = store.audit(owner=owner or None, limit=MAX_ROWS, cursor=cursor)
    return AuditPage(
        title="Audit",
        json_href=address("/audit.json", {"owner": owner}),
        owner=owner,
        rows=tuple(map(_audit_row, page.items)),
        next_href=next_href("/audit", page, {"owner": owner}),
    )


@router.post("/keys", include_in_schema=False)
def create_key(fields: Form, store: SystemStoreDep) -> Response:
    """Create the key in the form. Only this response contains its secret."""
    try:
        days, scope = _number(fields, "lifetime_days"), fields.get("scope", "")
        if scope not in SCOPES:
            raise InputError(
                f"Unknown scope {scope[:40]!r}; use {', '.join(SCOPES)}.", field="scope"
            )
        record, token = keys.issue(
            store=store,
            owner=fields.get("owner", ""),
            scope=Scope[scope.upper()],
            lifetime_s=days * SECONDS_PER_DAY if days is not None else None,
            requests_per_second=_number(fields, "requests_per_second"),
            gpu_seconds_per_day=_number(fields, "gpu_seconds_per_day"),
        )
    except HpToolError as error:
        page = replace(keys_context(store), fields=fields, error=error.as_dict())
        return render("keys.html", page=page, section="Keys", status=HTTP_422_UNPROCESSABLE_CONTENT)
    page = replace(keys_context(store), issued=token)
    answer = render("keys.html", page=page, section="Keys", status=HTTP_201_CREATED)
    answer.headers["Location"] = f"/keys/{record.id}"  # The audit log records this header.
    return answer


@router.post("/keys/{key_id}/revoke", include_in_schema=False)
async def revoke_key(key_id: str, request: Request, store: SystemStoreDep) -> RedirectResponse:
    await api.revoke_key(key_id, request, store)
    return done("/keys", "revoked")


def _row(record: KeyRecord) -> KeyRow:
    state: KeyState = "valid"
    if record.expires_at is not None and record.expires_at <= datetime.now(UTC):
        state = "expired"
    if record.revoked_at is not None:
        state = "revoked"
    return KeyRow.of(
        record,
        scope=scope_name(record.scope),
        state=state,
        tone=TONES[state],
        revoke_href=f"/keys/{record.id}/revoke" if state == "valid" else None,
    )


def _audit_row(record: AuditRecord) -> AuditRow:
    method, _, route = record.action.partition(" /")
    kind, *steps = route.removeprefix("v1/").split("/")
    name = unquote(next(iter(record.resource.removeprefix("/v1").strip("/").split("/")[1:]), ""))
    if kind not in NOUNS:
        deed, name = (method, record.resource) if route else (record.action, record.resource)
    elif len(steps) > 1:
        deed = f"{DEEDS.get(steps[-1], steps[-1])} {NOUNS[kind]}"
    elif method == "POST" and steps and steps[0].startswith("{"):
        deed = f"change {NOUNS[kind]}"
    else:
        deed = f"{VERBS.get(method, method)} {NOUNS[kind]}"
    refused = record.outcome.isdecimal() and int(record.outcome) >= HTTP_400_BAD_REQUEST
    shown = (
        kind in PAGES
        and name not in ("", "new")
        and not refused
        and deed.split()[0] not in ("delete", "remove")
    )
    return AuditRow.of(
        record,
        deed=deed,
        object=name if name not in ("new", "bulk") else "",
        href=f"/{kind}/{quote(name, safe='')}" if shown else None,
        result=HTTPStatus(int(record.outcome)).phrase.lower() if refused else "done",
        tone="bad" if refused else "good",
    )


def _number(fields: dict[str, str], name: str) -> float | None:
    try:
        return float(fields[name]) if name in fields else None
    except ValueError:
        raise InputError(
            f"`{name}` must be a number, got {fields[name][:40]!r}.", field=name
        ) from None
