"""Check the targets of webhooks, which users choose, so that no request reaches internal hosts."""

import ipaddress
from dataclasses import dataclass, field
from typing import Any

import httpx

from hp_tool.errors import InputError

MAX_URL_LENGTH = 2000
SPECIAL_NETWORKS = tuple(
    map(
        ipaddress.ip_network,
        ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20", "5f00::/16", "2001::/23"),
    )
)
"""Networks in IANA's special-purpose registries. Python's own lists depend on its release."""
ANYCAST = tuple(map(ipaddress.ip_address, ("192.0.0.9", "192.0.0.10")))
"""Globally reachable addresses within SPECIAL_NETWORKS."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
TRANSLATED_NETWORKS = tuple(
    map(
        ipaddress.ip_network,
        ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "::ffff:0:0:0/96", "::/96", "fec0::/10"),
    )
)
"""IPv6 networks that are translated to IPv4 addresses, which may be private (NAT64, 6to4, SIIT,
IPv4-compatible), and deprecated site-local addresses.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """The operator's webhook settings."""

    key: bytes = field(repr=False)
    """HMAC key."""
    networks: tuple[Network, ...] = ()
    """Private networks that are allowed as targets."""

    def check(self, url: str) -> httpx.URL:
        """Parse and validate a URL.

        The addresses of its host are checked only on connection. The URL must use https, or http to
        a loopback address in `networks`, and have no user or fragment.

        Raises:
            InputError: The URL is not allowed (`webhook_refused`).
        """
        try:
            parsed = httpx.URL(url)
            address = _literal(parsed.host)
        except (httpx.InvalidURL, UnicodeError):
            raise _url_error("it is not a valid URL") from None
        if len(url) > MAX_URL_LENGTH or not url.isprintable():
            raise _url_error(f"it is longer than {MAX_URL_LENGTH} characters, or not printable")
        if not parsed.host or parsed.userinfo or parsed.fragment:
            raise _url_error("it needs a host and must not have a user or a fragment")
        is_here = parsed.host == "localhost" or (address is not None and address.is_loopback)
        if parsed.scheme != "https" and not (
            parsed.scheme == "http"
            and is_here
            and any(network.is_loopback for network in self.networks)
        ):
            raise _url_error("it must use https")
        if address is not None and not self.admits(address, encrypted=parsed.scheme == "https"):
            raise _url_error("its address is not public")
        return parsed

    def admits(self, address: Address, *, encrypted: bool) -> bool:
        """Return True if connections to this address are allowed.

        Unencrypted connections are allowed only to loopback addresses.
        """
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        address = mapped or address
        if not encrypted and not address.is_loopback:
            return False
        if any(address in network for network in self.networks):
            return True
        if address in ANYCAST:
            return True
        return (
            address.is_global
            and not address.is_multicast
            and not any(address in network for network in (*TRANSLATED_NETWORKS, *SPECIAL_NETWORKS))
        )


def _literal(host: str) -> Any:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _url_error(problem: str) -> InputError:
    return InputError(
        f"Webhook URL not allowed: {problem}.", field="webhook", code="webhook_refused"
    )
