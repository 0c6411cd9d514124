"""Groups of routes that the gate and the clients treat alike."""

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
OPEN_PATHS = frozenset({"/healthz", "/readyz"})
BATCH_PATH = "/v1/batch"
AGENTS_PATH = "/mcp"
"""Route of the tools for agents. They call other routes with the caller's key; those routes check
and record changes.
"""
EXPLANATIONS_PATH = "/v1/explanations"
EXPLAIN_PAGE = "/explain"
UPLOADS = frozenset({EXPLANATIONS_PATH, EXPLAIN_PAGE})
"""Routes that accept traces. They have their own CPU time limit."""
STREAMED = frozenset({BATCH_PATH, "/v1/measurements/bulk", *UPLOADS})
"""Routes whose bodies may have any length and are not stored."""
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
"""Routes that only compute. They use POST because queries are large."""
ADMINISTRATION = ("/v1/keys", "/v1/audit", "/keys", "/audit")
