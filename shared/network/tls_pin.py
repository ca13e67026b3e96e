"""Verification of a self-signed TLS certificate by its SHA-256, the pin in the join link."""

from __future__ import annotations

import hashlib
import hmac
import ssl

from typing_extensions import override


class WrongCertificate(ssl.SSLCertVerificationError):
    """The certificate is not the pinned one."""


def pinned_context(pin: str) -> ssl.SSLContext:
    """Return a TLS context that accepts only the certificate with this SHA-256, in hex.

    The pin is checked at the end of the handshake, before a byte of HTTP is sent, for sockets and
    for asyncio alike; a handshake with another certificate raises WrongCertificate.
    """

    def check(certificate: bytes | None) -> None:
        if not hmac.compare_digest(hashlib.sha256(certificate or b"").hexdigest(), pin):
            raise WrongCertificate("the certificate is not the one of the join link")

    class PinnedObject(ssl.SSLObject):
        @override
        def do_handshake(self) -> None:
            super().do_handshake()
            check(self.getpeercert(binary_form=True))

    class PinnedSocket(ssl.SSLSocket):
        @override
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            check(self.getpeercert(binary_form=True))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the pin is the check
    context.sslobject_class = PinnedObject
    context.sslsocket_class = PinnedSocket
    return context
