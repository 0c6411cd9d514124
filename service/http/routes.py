"""Groups of routes, for the gate and for clients."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
BATCH_PATH = "/v1/batch"
AGENTS_PATH = "/mcp"
"""Tools call other routes with the caller's key, which check and record changes."""
EXPLANATIONS_PATH = "/v1/explanations"
EXPLAIN_PAGE = "/explain"
UPLOADS = frozenset({EXPLANATIONS_PATH, EXPLAIN_PAGE})
"""Routes that accept traces; they have their own CPU time limit."""
STREAMED = frozenset({BATCH_PATH, "/v1/measurements/bulk", *UPLOADS})
"""Routes whose bodies may have any length and are not buffered."""
COMPUTING = frozenset(
    {
        *(
            "/v1/estimates",
            "/v1/recommendations",
            BATCH_PATH,
            "/v1/exports",
            "/v1/imports",
            "/v1/sizings",
            "/v1/plans",
        ),
        "/v1/lost-nodes",
        *(AGENTS_PATH, *UPLOADS),
    }
)
"""Routes that change nothing; they use POST because a query is large."""
ADMINISTRATION = ("/v1/keys", "/v1/audit", "/keys", "/audit")
