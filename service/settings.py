"""What an operator may set, read once from the environment."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hp_tool.errors import InputError

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the API process. Secrets stay out of `repr`, and so out of logs."""

    database_url: str | None = field(default=None, repr=False)
    """SQLAlchemy URL; None: the SQLite file in the user's data folder. May hold a password."""
    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs an api_key."""
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    """Every request but the health checks must carry it; None: no check, loopback only."""
    allowed_hosts: tuple[str, ...] = ()
    """Names a request's Host header may carry; empty: the loopback names on loopback, any name elsewhere."""
    max_body_bytes: int = MIB
    """Largest request body, and largest line of a batch."""
    max_batch_bytes: int = 256 * MIB
    """Largest batch as a whole; it is streamed, never held."""
    max_wait_s: float = 60.0
    """Longest that `wait_s` may hold a request open."""
    poll_s: float = 0.5
    """How often open event streams and waiting requests look at the database."""

    def __post_init__(self) -> None:
        if not self.is_loopback and not self.api_key:
            raise InputError(
                f"refusing to listen on {self.host} without a key: set HP_API_KEY, or listen on 127.0.0.1",
                field="host",
                code="api_key_required",
            )
        if not 0 <= self.port < 65536:
            raise InputError(f"port {self.port} is not between 0 and 65535", field="port")

    @property
    def is_loopback(self) -> bool:
        """Whether only programs of this very machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> tuple[str, ...]:
        """Accepted Host names. On loopback they are closed, so that a foreign name that resolves here (DNS rebinding) fails."""
        if self.allowed_hosts:
            return self.allowed_hosts
        return ("localhost", "127.0.0.1", "[::1]", self.host) if self.is_loopback else ("*",)


def from_environment(
    environment: Mapping[str, str] = os.environ,
    *,
    host: str | None = None,
    port: int | None = None,
    database_url: str | None = None,
) -> Settings:
    """Settings from HP_* variables; arguments (command-line flags) win.

    Raises:
        InputError: a value is malformed, or the host is not loopback and no key is set.
    """
    text_port = environment.get("HP_PORT", "8000")
    if port is None and not text_port.isdecimal():
        raise InputError(f"HP_PORT={text_port!r} is not a number", field="HP_PORT")
    return Settings(
        database_url=database_url or environment.get("HP_DATABASE_URL") or None,
        host=host or environment.get("HP_HOST", "127.0.0.1"),
        port=port if port is not None else int(text_port),
        api_key=environment.get("HP_API_KEY") or None,
        allowed_hosts=tuple(name.strip() for name in environment.get("HP_ALLOWED_HOSTS", "").split(",") if name.strip()),
    )
