"""Where webhooks may go. Users give the URLs and the service requests them, so they must not reach
internal hosts.
"""

import ipaddress
from dataclasses import dataclass, field
from typing import Any

import httpx

from hp_tool.errors import InputError

LONGEST_URL = 2000
SPECIAL = tuple(
    map(
        ipaddress.ip_network,
        ("192.0.0.0/24", "192.88.99.0/24", "3fff::/20", "5f00::/16", "2001::/23"),
    )
)
"""Networks of IANA's registries of special purposes, which Python follows in part, release by
release.
"""
ANYCAST = tuple(map(ipaddress.ip_address, ("192.0.0.9", "192.0.0.10")))
"""The two among them that are global."""
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
CARRIERS = tuple(
    map(
        ipaddress.ip_network,
        ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "::ffff:0:0:0/96", "::/96", "fec0::/10"),
    )
)
"""IPv6 that is translated to IPv4 on the way (NAT64, 6to4, SIIT, IPv4-compatible), perhaps to a
private address, and old site-local addresses.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookSettings:
    """The operator's settings for webhooks."""

    key: bytes = field(repr=False)
    """The HMAC's key."""
    networks: tuple[Network, ...] = ()
    """Networks that are not public but allowed as targets."""

    def check(self, url: str) -> httpx.URL:
        """The parsed URL, if its text is acceptable; the addresses of its name are checked on
        connecting.

        https, or http to a loopback address among `networks`; neither user nor fragment. InputError
        otherwise.
        """
        try:
            parsed = httpx.URL(url)
            address = _literal(parsed.host)
        except (httpx.InvalidURL, UnicodeError):
            raise _refused("it is not a URL") from None
        if len(url) > LONGEST_URL or not url.isprintable():
            raise _refused(f"it has above {LONGEST_URL} characters, or some that do not print")
        if not parsed.host or parsed.userinfo or parsed.fragment:
            raise _refused("it must name a host, and neither a user nor a fragment")
        is_here = parsed.host == "localhost" or (address is not None and address.is_loopback)
        if parsed.scheme != "https" and not (
            parsed.scheme == "http" and is_here and any(each.is_loopback for each in self.networks)
        ):
            raise _refused("its scheme must be https")
        if address is not None and not self.admits(address, encrypted=parsed.scheme == "https"):
            raise _refused("its address is not public")
        return parsed

    def admits(self, address: Address, *, encrypted: bool) -> bool:
        """Whether a connection to this address may be made; unencrypted only to a loopback one."""
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
            and not any(address in each for each in (*CARRIERS, *SPECIAL))
        )


def _literal(host: str) -> Any:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _refused(why: str) -> InputError:
    return InputError(f"no webhook can go there: {why}", field="webhook", code="webhook_refused")
