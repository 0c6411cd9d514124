"""Shared code of both clients. Importing it requires the extra `client`."""

from hp_tool.extras import require

require("client", by="a client of the service")

import httpx  # noqa: E402 (which the line above explains where it is missing)

__all__ = ["httpx"]
