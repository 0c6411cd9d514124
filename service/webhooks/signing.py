"""Sign messages by the Standard Webhooks specification, which has many implementations."""

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Mapping

from hp_tool.errors import InputError

PREFIX = "whsec_"
MIN_SECRET_BYTES = 24
"""Minimum number of bytes of a secret, according to the specification."""
TOLERANCE_S = 300.0


def secret_bytes(secret: str) -> bytes:
    """Return the HMAC key in a secret: base64 after `whsec_`, else the text itself.

    Raises:
        InputError: The secret is too short or not base64.
    """
    try:
        key = (
            base64.b64decode(secret.removeprefix(PREFIX), validate=True)
            if secret.startswith(PREFIX)
            else secret.encode()
        )
    except binascii.Error:
        raise InputError(
            f"The text after {PREFIX} is not base64.", field="HP_WEBHOOK_SECRET"
        ) from None
    if len(key) < MIN_SECRET_BYTES:
        fix = "Create one with whsec_$(openssl rand -base64 32)."
        raise InputError(
            f"The secret has {len(key)} bytes; at least {MIN_SECRET_BYTES} are needed. {fix}",
            field="HP_WEBHOOK_SECRET",
        )
    return key


def signed_headers(*, key: bytes, message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the three signature headers for a message sent at `timestamp`, in Unix seconds."""
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": _signature(key, message_id, str(timestamp), body),
    }


def verify(
    *, secret: str, headers: Mapping[str, str], body: bytes, tolerance_s: float = TOLERANCE_S
) -> None:
    """Verify that a message was signed with `secret` within `tolerance_s` of now.

    Args:
        secret: The shared secret.
        headers: Headers of the message.
        body: Body as received, before parsing the JSON.
        tolerance_s: Maximum age in seconds.

    Raises:
        InputError: The signature or the timestamp is invalid (`webhook_invalid`).
    """
    lower = {name.lower(): value for name, value in headers.items()}
    message_id, sent_at, signatures = (
        lower.get(f"webhook-{name}", "") for name in ("id", "timestamp", "signature")
    )
    if not re.fullmatch(r"[0-9]{1,12}", sent_at) or abs(time.time() - int(sent_at)) > tolerance_s:
        raise InputError(
            "The message is too old, or its timestamp is invalid.",
            field="webhook-timestamp",
            code="webhook_invalid",
        )
    expected = _signature(secret_bytes(secret), message_id, sent_at, body).encode()
    # While a secret is rotated, there may be several signatures, separated by spaces.
    if not any(hmac.compare_digest(expected, item.encode()) for item in signatures.split()):
        raise InputError(
            "No signature matches the message.", field="webhook-signature", code="webhook_invalid"
        )


def _signature(key: bytes, message_id: str, timestamp: str, body: bytes) -> str:
    digest = hmac.new(key, f"{message_id}.{timestamp}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()
