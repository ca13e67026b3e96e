"""Proxy that the environment names for an address, read as other programs do."""

from __future__ import annotations

import urllib.request
from urllib.parse import urlsplit

from shared.network.links import is_loopback


def proxy_of(url: str) -> str:
    """Return the address of the proxy before a server; "" without a proxy, or for a server on this
    machine.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all") or ""
    if not proxy or is_loopback(host) or urllib.request.proxy_bypass(host):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def named(proxy: str) -> str:
    """Return a proxy as it may be shown: without name and password."""
    scheme, _, rest = proxy.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].rstrip('/')}"
