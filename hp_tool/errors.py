"""One error tree: `code` is stable, `field` is the dotted path of the input at fault, the message
names the fix.
"""

from typing import Any


class HpToolError(Exception):
    """Base of everything hp_tool raises on purpose. Entry points (CLI, API, batch) catch this and
    nothing wider.
    """

    code = "internal"

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.details: dict[str, Any] = {}
        """What more an answer tells: what an import read all the same, and all that it lacks."""
        if code is not None:
            self.code = code

    def as_dict(self) -> dict[str, Any]:
        """The `error` object of a result: {code, message, field}."""
        return {"code": self.code, "message": self.message, "field": self.field}


class InputError(HpToolError):
    """The query, file or flag is wrong; the caller can fix it. CLI exit 2, HTTP 422."""

    code = "invalid_input"


class NotFoundError(HpToolError):
    """A name (model, GPU, cluster, search) that nobody registered. CLI exit 2, HTTP 404."""

    code = "not_found"


class UnsupportedError(InputError):
    """A feature that the query names and that this version does not model. Never silently ignored.
    Exit 2, HTTP 422.
    """

    code = "unsupported"


class ConflictError(HpToolError):
    """The stored state does not allow the request (a search already ended, an idempotency key
    reused). HTTP 409.
    """

    code = "conflict"


class LimitError(HpToolError):
    """A rate or quota is used up; nothing is wrong with the request itself. CLI exit 2, HTTP 429
    with Retry-After.
    """

    code = "rate_limited"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float,
        field: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, field=field, code=code)
        self.retry_after_s = retry_after_s
        """When to try again, at the earliest."""


class LauncherError(HpToolError):
    """The cluster engine refused or could not be reached; the run, not the search, is at fault."""

    code = "launcher_failed"


class EngineAwayError(LauncherError):
    """The cluster engine does not answer, or asks to try again later: nobody's fault, and waited
    for.
    """

    code = "engine_away"


class RefusedError(LauncherError):
    """The site takes no such job (partition, account, QOS, image): another configuration would fare
    no better.
    """

    code = "refused"


class StoreError(HpToolError):
    """The database does not answer, or its schema is not this version's; the message says what to
    do. HTTP 503, exit 1.
    """

    code = "store_unavailable"


OLDER_EDITION = "older_edition"
"""Code of the StoreError about what a newer hp-tool stored: whoever works here stops until that one
is installed.
"""


class MissingExtraError(HpToolError):
    """An optional dependency is not installed; the message says which extra brings it. CLI exit
    2.
    """

    code = "missing_extra"
