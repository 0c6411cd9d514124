"""Signatures after the Standard Webhooks specification, for which libraries exist in most
languages.
"""

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Mapping

from hp_tool.errors import InputError

PREFIX = "whsec_"
SHORTEST_SECRET_BYTES = 24
"""The specification's."""
TOLERANCE_S = 300.0


def secret_bytes(secret: str) -> bytes:
    """A secret as the key of the HMAC: base64 after `whsec_`, else the text itself. InputError
    where it is too short.
    """
    try:
        key = (
            base64.b64decode(secret.removeprefix(PREFIX), validate=True)
            if secret.startswith(PREFIX)
            else secret.encode()
        )
    except binascii.Error:
        raise InputError(
            f"what follows {PREFIX} is not base64", field="HP_WEBHOOK_SECRET"
        ) from None
    if len(key) < SHORTEST_SECRET_BYTES:
        fix = "whsec_$(openssl rand -base64 32) is a good one"
        raise InputError(
            f"the secret has {len(key)} bytes; it needs {SHORTEST_SECRET_BYTES}: {fix}",
            field="HP_WEBHOOK_SECRET",
        )
    return key


def signed_headers(*, key: bytes, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """The three headers of a message sent at `timestamp` (Unix seconds)."""
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": _signature(key, message_id, str(timestamp), body),
    }


def verify(
    *, secret: str, headers: Mapping[str, str], body: bytes, tolerance_s: float = TOLERANCE_S
) -> None:
    """Raise InputError unless a holder of `secret` signed `body` and these headers within
    `tolerance_s` of now.

    `body`: the bytes as received, before any JSON is parsed.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    message_id, sent_at, signatures = (
        lower.get(f"webhook-{name}", "") for name in ("id", "timestamp", "signature")
    )
    if not re.fullmatch(r"[0-9]{1,12}", sent_at) or abs(time.time() - int(sent_at)) > tolerance_s:
        raise InputError(
            "the message is from another time", field="webhook-timestamp", code="webhook_invalid"
        )
    expected = _signature(secret_bytes(secret), message_id, sent_at, body).encode()
    # Several signatures, separated by spaces, are allowed while a secret is replaced.
    if not any(hmac.compare_digest(expected, each.encode()) for each in signatures.split()):
        raise InputError(
            "no signature is that of the message", field="webhook-signature", code="webhook_invalid"
        )


def _signature(key: bytes, message_id: str, timestamp: str, body: bytes) -> str:
    """`v1,` and the base64 of HMAC-SHA256(key, id.timestamp.body), which covers the id, the time of
    sending and the body.
    """
    digest = hmac.new(key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()
