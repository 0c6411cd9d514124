"""What kinds of routes there are, for the gate in front of them and for who asks them."""

from __future__ import annotations

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
BATCH_PATH = "/v1/batch"
STREAMED = frozenset({BATCH_PATH, "/v1/measurements/bulk"})
"""Of any length: never held as a whole."""
COMPUTING = frozenset(
    {
        *("/v1/estimates", "/v1/recommendations", BATCH_PATH, "/v1/exports", "/v1/imports", "/v1/sizings"),
        *("/searches/new/preview", "/searches/new/preview.json"),
    }
)
"""POST because a query is large, not because anything changes."""
ADMINISTRATION = ("/v1/keys", "/v1/audit", "/keys", "/audit")
