"""API keys: issue and recognize them, and determine the caller of a request.

A key is `hp_ID_SECRET`. The ID identifies the row, which stores the SHA-256 digest of the 256-bit
secret. Slow hashes are for passwords that people choose. A random secret of this size cannot be
guessed from its digest, and the digest is computed for every request.
"""

import base64
import binascii
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers

from hp_tool.domain.access import AccessStore, KeyRecord, NewKey, Scope
from hp_tool.errors import HpToolError, NotFoundError

FORM = re.compile(r"hp_([0-9a-f]{16})_([A-Za-z0-9_-]{43})")
REMEMBERED_S = 5.0
"""Seconds for which a key is valid without a database lookup. In other processes, a revoked key may
keep working for this long.
"""
MOST_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The caller of a request and its rights."""

    owner: str | None
    """Owner of the data; None for the operator."""
    scope: Scope
    key: KeyRecord | None = None
    """The stored key; None if the request has no stored key."""

    @property
    def key_id(self) -> str | None:
        """Public part of the key; None for the operator."""
        return None if self.key is None else self.key.id


OPERATOR = Principal(owner=None, scope=Scope.ADMIN)
"""The operator: a caller with HP_API_KEY, or any caller on this machine if no key is set.
"""


def issue(
    *,
    store: AccessStore,
    owner: str,
    scope: Scope,
    lifetime_s: float | None = None,
    requests_per_second: float | None = None,
    gpu_seconds_per_day: float | None = None,
) -> tuple[KeyRecord, str]:
    """Create a key; return its record, and the token, which cannot be retrieved later."""
    key_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    key = NewKey(
        id=key_id,
        owner=owner,
        scope=scope,
        secret_sha256=_digest(secret),
        requests_per_second=requests_per_second,
        gpu_seconds_per_day=gpu_seconds_per_day,
    )
    return store.add_key(key=key, lifetime_s=lifetime_s), f"hp_{key_id}_{secret}"


class ForbiddenKeyError(HpToolError):
    """The key belongs to this service but is no longer valid. `key` is its record."""

    def __init__(self, key: KeyRecord, message: str, *, code: str) -> None:
        super().__init__(message, code=code)
        self.key = key


class Keyring:
    """Recognizes keys. Each process has one instance, which is used on its event loop only."""

    def __init__(self, *, find: Callable[[str], KeyRecord], api_key: str | None) -> None:
        """Create the keyring.

        Args:
            find: Returns a stored key by its ID; raises NotFoundError.
            api_key: The operator's key. If None, requests without a key are the operator's.
        """
        self._find = find
        self._api_key = api_key
        self._remembered: dict[str, tuple[KeyRecord, float]] = {}

    async def principal(self, headers: Headers) -> Principal:
        """Return the caller whose key is in these headers.

        Raises:
            HpToolError: `unauthorized` (no such key), `key_expired` or `key_revoked`.
        """
        token = token_of(headers)
        if token is None and self._api_key is None:
            return OPERATOR
        token = token or ""
        # Compare in constant time, so that the duration does not reveal how much of the key
        # matches.
        if self._api_key is not None and hmac.compare_digest(
            token.encode(), self._api_key.encode()
        ):
            return OPERATOR
        key = await self._stored(token)
        if key.revoked_at is not None:
            raise ForbiddenKeyError(
                key,
                f"key {key.id} was revoked at {key.revoked_at:%Y-%m-%d %H:%M} UTC",
                code="key_revoked",
            )
        if key.expires_at is not None and key.expires_at <= datetime.now(UTC):
            raise ForbiddenKeyError(
                key,
                f"key {key.id} expired at {key.expires_at:%Y-%m-%d %H:%M} UTC",
                code="key_expired",
            )
        return Principal(owner=key.owner, scope=key.scope, key=key)

    def recognises(self, headers: Headers) -> bool:
        """Return True if these headers contain a stored key that was valid recently."""
        form = FORM.fullmatch(token_of(headers) or "")
        if form is None:
            return False
        remembered = self._remembered.get(_digest(form[2]))
        return remembered is not None and remembered[0].id == form[1]

    def forget(self, key_id: str) -> None:
        """Remove a key from the cache, because this process revoked it."""
        self._remembered = {
            digest: known for digest, known in self._remembered.items() if known[0].id != key_id
        }

    async def _stored(self, token: str) -> KeyRecord:
        form = FORM.fullmatch(token)
        if form is None:
            raise _unauthorized()
        key_id, digest = form[1], _digest(form[2])
        key, asked_at = self._remembered.get(digest, (None, 0.0))
        if key is not None and key.id == key_id and time.monotonic() - asked_at < REMEMBERED_S:
            return key
        try:
            key = await run_in_threadpool(self._find, key_id)
        except NotFoundError:
            raise _unauthorized() from None
        if not hmac.compare_digest(digest, key.secret_sha256):
            raise _unauthorized()
        if len(self._remembered) >= MOST_REMEMBERED:
            self._remembered.clear()
        self._remembered[digest] = key, time.monotonic()
        return key


def token_of(headers: Headers) -> str | None:
    """Return the key in the Authorization header; None without one.

    The header is `Bearer KEY`, or Basic with the key as password.
    """
    authorization = headers.get("authorization")
    if authorization is None:
        return None
    kind, _, value = authorization.partition(" ")
    if kind.lower() == "bearer":
        return value.strip()
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return ""


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _unauthorized() -> HpToolError:
    return HpToolError("send a valid key as 'Authorization: Bearer KEY'", code="unauthorized")
