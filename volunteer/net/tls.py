"""TLS: verifies the coordinator's certificate by a pin in the join link, or by the usual
authorities.
"""

from __future__ import annotations

import hashlib
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from shared.links import is_loopback


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of the coordinator, and how its certificate is verified."""

    url: str
    tls_pin: str = ""  # SHA-256 of its certificate, hex; empty: the usual authorities

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    @property
    def private(self) -> bool:
        """Return True if a secret may travel there: encrypted, or never leaving this machine."""
        return self.url.startswith("https://") or is_loopback(self.host)


class WrongCertificate(ssl.SSLCertVerificationError):
    """The certificate is not the pinned one."""


def context_for(address: Address) -> ssl.SSLContext:
    """A context that accepts the pinned certificate and no other, before a byte of HTTP is sent."""
    if not address.url.startswith("https://"):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # never used, and quick to make
    if not address.tls_pin:
        return ssl.create_default_context()

    class Pinned(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            shown = self.getpeercert(binary_form=True) or b""
            if hashlib.sha256(shown).hexdigest() != address.tls_pin:
                raise WrongCertificate("the certificate is not the one of the join link")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the pin is the check
    context.sslobject_class = Pinned
    return context
