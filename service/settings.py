"""Settings of the service, read once from the environment."""

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import TypeAdapter, ValidationError

from hp_tool.errors import InputError
from service.logs import Form
from service.webhooks.policy import WebhookSettings
from service.webhooks.signing import secret_bytes

MIB = 2**20
SHORTEST_KEY = 8
AMOUNTS = {
    "requests_per_second": "HP_REQUESTS_PER_SECOND",
    "requests_per_second_per_owner": "HP_REQUESTS_PER_SECOND_PER_OWNER",
    "wrong_keys_per_second": "HP_WRONG_KEYS_PER_SECOND",
    "max_requests_at_once": "HP_MAX_REQUESTS_AT_ONCE",
    "max_waiting_at_once": "HP_MAX_WAITING_AT_ONCE",
    "max_connections": "HP_MAX_CONNECTIONS",
    "max_connections_per_address": "HP_MAX_CONNECTIONS_PER_ADDRESS",
    "max_header_kib": "HP_MAX_HEADER_KIB",
    "max_combinations": "HP_MAX_COMBINATIONS_PER_REQUEST",
    "max_cpu_s": "HP_MAX_CPU_SECONDS_PER_REQUEST",
    "max_upload_cpu_s": "HP_MAX_CPU_SECONDS_PER_UPLOAD",
    "max_upload_memory_mib": "HP_MAX_UPLOAD_MEMORY_MIB",
    "max_queue_s": "HP_MAX_QUEUE_SECONDS",
    "max_watch_processes": "HP_MAX_WATCH_PROCESSES_PER_OWNER",
    "max_gpu_seconds_per_search": "HP_MAX_GPU_SECONDS_PER_SEARCH",
    "max_gpu_seconds_per_day": "HP_MAX_GPU_SECONDS_PER_DAY",
}
"""Settings that must be above 0, and their environment variables."""
LOGGING = {"log_form": "HP_LOG_FORMAT", "log_level": "HP_LOG_LEVEL"}
VARIABLES = {
    "database_url": "HP_DATABASE_URL",
    "host": "HP_HOST",
    "port": "HP_PORT",
    "trusted_reports": "HP_TRUSTED_REPORTS",
    **LOGGING,
    **AMOUNTS,
}
"""Environment variables of text settings."""
Level = Literal["info", "debug", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the API process. Secrets are omitted from `repr`, and therefore from logs."""

    database_url: str | None = field(default=None, repr=False)
    """SQLAlchemy URL; None for the SQLite file in the user's data folder. May contain a
    password.
    """
    host: str = "127.0.0.1"
    """Address to listen on. Addresses other than loopback require an api_key."""
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    """The operator's key, which allows everything. If set, every request except health checks must
    contain it or a stored key. If None, requests without a key are the operator's; this is allowed
    on loopback only.
    """
    allowed_hosts: tuple[str, ...] = ()
    """Host names that are accepted in the Host header. Empty: the loopback names on loopback, any
    name otherwise.
    """
    requests_per_second: float = 100.0
    """Default rate limit of a stored key, in requests per second."""
    requests_per_second_per_owner: float = 400.0
    """Rate limit of all stored keys of one owner together. Keys with a higher rate keep theirs."""
    wrong_keys_per_second: float = 5.0
    """Wrong keys per second from one address. Above the limit, keys from this address must wait,
    unless they were valid before.
    """
    max_gpu_seconds_per_search: float | None = None
    """Maximum budget of one search in GPU-seconds; None for no limit."""
    max_gpu_seconds_per_day: float | None = None
    """Maximum GPU-seconds of all searches per day (UTC); None for no limit."""
    trusted_reports: Literal["administrators", "everybody"] = "administrators"
    """Owners whose reported measurements calibrate everybody's predictions. Other owners' reports
    calibrate only their own predictions.
    """
    log_form: Form = "json"
    """Log format: json (one object per line) or text."""
    log_level: Level = "info"
    """Log level. Level debug also logs fast successful reads."""
    webhooks: WebhookSettings | None = None
    """Signing key and allowed networks of webhooks. None: no webhooks are sent."""
    max_body_bytes: int = MIB
    """Maximum bytes of a request body, and of a line of a batch."""
    max_batch_bytes: int = 256 * MIB
    """Maximum bytes of a whole batch. It is streamed and never stored."""
    max_yaml_bytes: int = 64 * 1024
    """Maximum bytes of YAML in a body, line or field. YAML takes far longer to parse than JSON."""
    max_combinations: int = 5_000_000
    """Maximum number of combinations of axis values that a request or a batch line may enumerate.
    Searches are not affected, because workers run them.
    """
    max_values: int = 128
    """Maximum length of the list of values for an axis of a query."""
    max_cpu_s: float = 5.0
    """Maximum CPU seconds per request, or per batch line."""
    max_upload_cpu_s: float = 60.0
    """Maximum CPU seconds per upload of traces. One GB (uncompressed) takes 32."""
    max_upload_memory_mib: float = 1024.0
    """Maximum memory in MiB that the process which reads an upload of traces may allocate."""
    max_queue_s: float = 5.0
    """Maximum seconds that a ranking or an estimate waits for its turn; then the answer is 503.
    Uploads wait six times as long, because they have already been sent.
    """
    max_requests_at_once: int = 16
    """Maximum number of open requests per stored key, excluding those that wait for a search."""
    max_waiting_at_once: int = 64
    """Maximum number of event streams and requests that wait for a search, per stored key."""
    max_connections: int = 1000
    """Maximum number of connections from all clients. Further connections are answered 503."""
    max_connections_per_address: int | None = None
    """Maximum number of connections per address (for IPv6, per /64). None: half of max_connections,
    so that no address can lock out the others.
    """
    max_watch_processes: int = 50_000
    """Maximum number of processes, including restarted ones, that may report to one owner's watched
    jobs. Up to 32 kB are stored per process.
    """
    max_header_kib: int = 64
    """Maximum KiB of a request's target and headers. This limit is checked before anything else."""
    max_wait_s: float = 60.0
    """Maximum seconds for which `wait_s` may keep a request open."""
    poll_s: float = 0.5
    """Seconds between database polls for open event streams and waiting requests."""

    def __post_init__(self) -> None:
        if not self.is_loopback and not self.api_key:
            raise InputError(
                f"refusing to listen on {self.host} without a key: set HP_API_KEY, or listen on "
                "127.0.0.1",
                field="host",
                code="api_key_required",
            )
        for name in AMOUNTS:
            amount = getattr(self, name)
            if amount is not None and not 0 < amount < float("inf"):
                raise InputError(f"{name} is {amount}; it must be a number above 0", field=name)
        if not 0 <= self.port < 65536:
            raise InputError(f"port {self.port} is not between 0 and 65535", field="port")

    @property
    def connections_per_address(self) -> int:
        """Maximum number of connections per address."""
        configured = self.max_connections_per_address
        return max(self.max_connections // 2, 1) if configured is None else configured

    @property
    def reserved_connections(self) -> int:
        """Number of connections reserved for addresses with few connections: one fifth of all.

        None if one address, such as a proxy, may use all connections.
        """
        return max(
            min(self.max_connections // 5, self.max_connections - self.connections_per_address), 0
        )

    @property
    def is_loopback(self) -> bool:
        """True if only programs on this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def hosts(self) -> tuple[str, ...]:
        """Accepted Host names.

        On loopback, only listed names are accepted. A foreign name that resolves to this host is
        therefore rejected (DNS rebinding).
        """
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
    """Read the settings from HP_* variables. Arguments, from command-line flags, take precedence.

    Raises:
        InputError: A value is malformed, or the host is not loopback and no key is set.
    """
    flags = {"host": host, "port": port, "database_url": database_url}
    return Settings(
        **_parse_variables(environment, VARIABLES)
        | {name: value for name, value in flags.items() if value not in (None, "")},
        api_key=_operators_key(environment),
        webhooks=webhook_settings(environment),
        allowed_hosts=tuple(
            name.strip()
            for name in environment.get("HP_ALLOWED_HOSTS", "").split(",")
            if name.strip()
        ),
    )


def log_settings(environment: Mapping[str, str] = os.environ) -> tuple[Form, Level]:
    """Return the format and level of the logs, for the API and for workers."""
    parsed = _parse_variables(environment, LOGGING)
    return parsed.get("log_form", "json"), parsed.get("log_level", "info")


def webhook_settings(environment: Mapping[str, str] = os.environ) -> WebhookSettings | None:
    """Return the signing key and networks of webhooks, for the API and for workers.

    The key is in HP_WEBHOOK_SECRET, or in the file that HP_WEBHOOK_SECRET_FILE names; the networks
    are in HP_WEBHOOK_NETWORKS. Without a secret, return None, and no webhooks are sent.

    Raises:
        InputError: A value is malformed.
    """
    secret = read_secret(environment, "HP_WEBHOOK_SECRET")
    if secret is None:
        return None
    try:
        parts = environment.get("HP_WEBHOOK_NETWORKS", "").split(",")
        networks = tuple(ipaddress.ip_network(part.strip()) for part in parts if part.strip())
    except ValueError as error:
        fix = "write networks as 10.0.0.0/8,::1/128"
        raise InputError(
            f"HP_WEBHOOK_NETWORKS: {error}; {fix}", field="HP_WEBHOOK_NETWORKS"
        ) from None
    return WebhookSettings(key=secret_bytes(secret), networks=networks)


def _operators_key(environment: Mapping[str, str]) -> str | None:
    """Return the operator's key.

    Raises:
        InputError: The key is set but empty or too short to protect the service.
    """
    key = read_secret(environment, "HP_API_KEY")
    if key is None and "HP_API_KEY" in environment:
        raise InputError(
            "HP_API_KEY is empty; set a key, or unset the variable to run without one",
            field="HP_API_KEY",
        )
    if key is not None and len(key) < SHORTEST_KEY:
        fix = "python3 -c 'import secrets; print(secrets.token_urlsafe())' creates one"
        raise InputError(
            f"HP_API_KEY has fewer than {SHORTEST_KEY} characters and is easy to guess; {fix}",
            field="HP_API_KEY",
        )
    return key


def read_secret(environment: Mapping[str, str], name: str) -> str | None:
    """Return a secret from the variable `name`, or from the file that `name`_FILE names.

    Container engines provide secrets as such files.
    """
    path = environment.get(f"{name}_FILE")
    if not path:
        return environment.get(name) or None
    try:
        secret = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{name}_FILE={path} cannot be read: {error}", field=f"{name}_FILE"
        ) from error
    if not secret:
        raise InputError(f"{name}_FILE={path} is empty", field=f"{name}_FILE")
    return secret


def _parse_variables(
    environment: Mapping[str, str], variables: Mapping[str, str]
) -> dict[str, Any]:
    """Parse the variables in `environment`; return the settings by name.

    Raises:
        InputError: A variable is malformed; the error names it.
    """
    kinds = get_type_hints(Settings)
    parsed = {}
    for name, variable in variables.items():
        if text := environment.get(variable):
            try:
                parsed[name] = TypeAdapter(kinds[name]).validate_python(
                    text.lower() if name in LOGGING else text
                )
            except ValidationError as error:
                raise InputError(
                    f"{variable}={text!r}: {error.errors()[0]['msg'].lower()}", field=variable
                ) from None
    return parsed
