"""TLS: the coordinator's certificate, verified by the join link's pin or by authorities."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from shared.network.links import is_loopback
from shared.network.tls_pin import pinned_context


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of the coordinator, and how its certificate is verified."""

    url: str
    tls_pin: str = ""  # SHA-256 of its certificate, hex; "": the usual authorities
    public_key: str = ""  # key of the coordinator that must answer, hex; "": not joined yet

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def private(self) -> bool:
        """Return True if a secret may be sent there: encrypted, or within this machine."""
        return self.url.startswith("https://") or is_loopback(self.host)


def context_for(address: Address) -> ssl.SSLContext:
    """Return the context that verifies the coordinator's certificate by its pin, or by the usual
    authorities.
    """
    if not address.url.startswith("https://"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used, and quick to make
    if not address.tls_pin:
        return ssl.create_default_context()
    return pinned_context(address.tls_pin)
