"""Errors with a stable `code`, the path of the invalid input in `field`, and a message that says
how to fix it.
"""

from typing import Any


class HpToolError(Exception):
    """Base class of expected errors, which the CLI, the API and batches report to the user."""

    code = "internal"

    def __init__(self, message: str, *, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.details: dict[str, Any] = {}
        """Additional data, such as the settings that an import could read and those that are
        missing.
        """
        if code is not None:
            self.code = code

    def as_dict(self) -> dict[str, Any]:
        """Return the `error` object of a result: {code, message, field}."""
        return {"code": self.code, "message": self.message, "field": self.field}


class InputError(HpToolError):
    """Invalid query, file or flag, which the caller can fix. CLI exit 2, HTTP 422."""

    code = "invalid_input"


class NotFoundError(HpToolError):
    """Unknown name of a model, GPU, cluster or search. CLI exit 2, HTTP 404."""

    code = "not_found"


class UnsupportedError(InputError):
    """A requested feature is not supported. CLI exit 2, HTTP 422."""

    code = "unsupported"


class ConflictError(HpToolError):
    """The stored state does not allow the request, such as for an ended search. HTTP 409."""

    code = "conflict"


class LimitError(HpToolError):
    """A rate limit or quota is exceeded. CLI exit 2, HTTP 429 with Retry-After."""

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
        """Seconds until a retry can succeed."""


class LauncherError(HpToolError):
    """The cluster engine failed or rejected a request; affects the run, not the search."""

    code = "launcher_failed"


class EngineAwayError(LauncherError):
    """The cluster engine does not respond or asks the client to retry. The search waits."""

    code = "engine_away"


class RefusedError(LauncherError):
    """The site rejects the job for any configuration (partition, account, QOS, image)."""

    code = "refused"


class StoreError(HpToolError):
    """The database does not respond, or its schema has a different version. HTTP 503, CLI exit
    1.
    """

    code = "store_unavailable"


OLDER_EDITION = "older_edition"
"""Code of a StoreError about data written by a newer hp-tool. The worker stops until it is
updated.
"""


class MissingExtraError(HpToolError):
    """An optional dependency is missing; the message names the extra. CLI exit 2."""

    code = "missing_extra"
