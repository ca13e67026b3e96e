"""Networks: addresses that one person can get in bulk count as one.

A home or a rented machine gets a whole IPv6 /64 and often a /48, and neighbours in an IPv4 /24 are
cheap to rent together. Rate limits count addresses (IPv6: a /64), shares of a merge count networks.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

KEYS_KEPT = 4096  # keys of addresses that are cached
UNKNOWN = ""  # network of a loopback, private or missing address, which does not distinguish people


@lru_cache(maxsize=KEYS_KEPT)
def address_key(address: str) -> str:
    """Return the key by which an address is rate-limited: an IPv4 address, or an IPv6 /64."""
    ip = _parsed(address)
    if isinstance(ip, IPv6Address):
        return str(ip_network((ip, 64), strict=False))
    return address[:64] if ip is None else str(ip)


def network(address: str) -> str:
    """Return the network of a public address, an IPv4 /24 or an IPv6 /48; `UNKNOWN` if it is not
    public.

    Private addresses have no network, since machines behind one router may have different owners.
    """
    ip = _parsed(address)
    if ip is None or not ip.is_global:
        return UNKNOWN
    return str(ip_network((ip, 24 if ip.version == 4 else 48), strict=False))


def _parsed(address: str) -> IPv4Address | IPv6Address | None:
    try:
        ip = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return mapped or ip
