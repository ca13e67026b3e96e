"""Networks: addresses that one person can get in bulk count as one.

A home or a rented machine is given a whole IPv6 /64 and often a /48, and neighbours in an IPv4 /24
are cheap to rent together. Rates count an address (IPv6: its /64), shares of a merge count its
network.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

KEYS_KEPT = 4096  # keys of addresses that are cached
UNKNOWN = ""  # loopback, private, or no address: does not tell people apart


@lru_cache(maxsize=KEYS_KEPT)
def address_key(address: str) -> str:
    """Return the key under which an address is rate-limited: an IPv4 address, or an IPv6 /64."""
    found = _parsed(address)
    if isinstance(found, IPv6Address):
        return str(ip_network((found, 64), strict=False))
    return address[:64] if found is None else str(found)


def network(address: str) -> str:
    """Return the network of a public address, an IPv4 /24 or an IPv6 /48; `UNKNOWN` for any other.

    Machines behind one router share a private address space without sharing an owner, so those are
    not told apart by it.
    """
    found = _parsed(address)
    if found is None or not found.is_global:
        return UNKNOWN
    return str(ip_network((found, 24 if found.version == 4 else 48), strict=False))


def _parsed(address: str) -> IPv4Address | IPv6Address | None:
    try:
        found = ip_address(address.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found
