"""Peer at the coordinator's address: it proves its identity before it receives a secret."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping

from shared.errors import BadSignature, Unreachable
from shared.proofs.signing import identity_payload, verify
from shared.sentences import Sentence
from volunteer.net.tls import Address

Ask = Callable[[str], Awaitable[str]]  # sends a nonce, but no secret; returns the peer's signature


class Peer:
    """Server at the coordinator's address; verified once, and again after `forget`."""

    def __init__(self, address: Address, ask: Ask) -> None:
        self._address = address
        self._ask = ask
        self._verified = not address.public_key
        self._lock = asyncio.Lock()

    def forget(self) -> None:
        """Require a new proof before the next secret."""
        self._verified = not self._address.public_key

    async def recognise(self) -> None:
        """Verify the peer by its signature of a nonce, unless it is verified. Raises Unreachable
        for another key.
        """
        async with self._lock:
            if self._verified:
                return
            nonce, key = secrets.token_hex(16), self._address.public_key
            proof = await self._ask(nonce)
            try:
                verify(bytes.fromhex(key), identity_payload(nonce), bytes.fromhex(proof))
            except (BadSignature, ValueError) as error:
                raise Unreachable(other_coordinator(self._address)) from error
            self._verified = True

    def tracer(self) -> Callable[[str, Mapping[str, object]], Awaitable[None]]:
        """Return a request's trace function, which verifies the peer of a new connection before the
        headers are sent.
        """
        fresh = False

        async def trace(event: str, _: Mapping[str, object]) -> None:
            nonlocal fresh
            if event == "connection.connect_tcp.complete":
                fresh = True
            elif event == "http11.send_request_headers.started" and fresh:
                fresh = False
                self.forget()
                await self.recognise()

        return trace


def other_coordinator(address: Address) -> Sentence:
    """Return the sentence that another coordinator answers at the joined address."""
    return Sentence(
        "another coordinator answers at {url}; nothing is sent to it until yours answers again",
        url=address.url,
    )
