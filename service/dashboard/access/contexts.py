"""What the pages of keys and of the audit log show."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from hp_tool.domain.access import AuditRecord
from service.api.keys import ScopeName
from service.dashboard.contexts import Tone

KeyState = Literal["valid", "expired", "revoked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
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
class KeysPage:
    """All keys, and the form that makes one."""

    title: str
    json_href: str
    rows: tuple[KeyRow, ...]
    next_href: str | None
    scopes: tuple[ScopeName, ...]
    fields: dict[str, str]
    """The form as it was last sent."""
    issued: str | None
    """The key just made: shown once."""
    error: dict[str, str | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditPage:
    """Who changed what, newest first."""

    title: str
    json_href: str
    owner: str
    rows: tuple[AuditRecord, ...]
    next_href: str | None
