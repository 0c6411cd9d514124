"""Kinds of routes, for the gate in front of them and for the clients."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
BATCH_PATH = "/v1/batch"
AGENTS_PATH = "/mcp"
"""Its tools ask other routes with their caller's key: what a tool changes, it changes there."""
EXPLANATIONS_PATH = "/v1/explanations"
EXPLAIN_PAGE = "/explain"
UPLOADS = frozenset({EXPLANATIONS_PATH, EXPLAIN_PAGE})
"""Routes that take traces, which have a limit of processor time of their own."""
STREAMED = frozenset({BATCH_PATH, "/v1/measurements/bulk", *UPLOADS})
"""Bodies of any length, never held as a whole."""
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
        *("/searches/new/preview", "/searches/new/preview.json"),
        *(AGENTS_PATH, *UPLOADS),
    }
)
"""Routes that change nothing; they are POST because a query is large."""
ADMINISTRATION = ("/v1/keys", "/v1/audit", "/keys", "/audit")
