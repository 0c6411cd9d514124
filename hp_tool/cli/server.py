"""Client for --server. Other modules of the command line do not import the package `service`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hp_tool.extras import require

if TYPE_CHECKING:
    from service.client import Client


def connect(server: str) -> Client:
    """Return a client for the service at URL `server`, as a context manager.

    Raises:
        InputError: The URL is not http or https.
        MissingExtraError: The extra `client` is not installed.
    """
    require("client", by="--server")
    from service.client import Client

    return Client(server=server)
