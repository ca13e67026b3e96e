"""Proxy for an address, from the variables of the environment that other programs read too."""

from __future__ import annotations

import urllib.request
from urllib.parse import urlsplit

from shared.network.links import is_loopback


def proxy_of(url: str) -> str:
    """Return the address of the proxy for a server; "" if no proxy is set for it, or the server is
    on this machine.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all") or ""
    if not proxy or is_loopback(host) or urllib.request.proxy_bypass(host):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def without_credentials(proxy: str) -> str:
    """Return the address of a proxy for a message, without user name and password."""
    scheme, _, rest = proxy.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].rstrip('/')}"
