"""What schemathesis must be told to speak with this API; schemathesis.toml names this file."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import schemathesis

LONGEST_ADDRESS = 60_000
"""Bytes. The HTTP parser takes 64 KiB, and answers what is longer itself, before there is a request
to speak of.
"""


@schemathesis.serializer("application/x-ndjson")
def ndjson(context: schemathesis.SerializationContext, value: Any) -> bytes:
    """Lines as they are."""
    return value if isinstance(value, bytes) else str(value).encode()


@schemathesis.hook
def filter_query(context: schemathesis.HookContext, query: dict[str, Any] | None) -> bool:
    """Whether the address can be sent."""
    return sum(len(quote(str(value))) for value in (query or {}).values()) < LONGEST_ADDRESS
