"""A small SMTP server (RFC 5321) with STARTTLS and AUTH PLAIN, which keeps the mails it gets."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class MailServer:
    """Mails that came, and who signed in. With a certificate a client has to encrypt and sign in
    before it may send.
    """

    certificate: Path | None = None
    user: str = "forest"
    password: str = "hunter2"
    port: int = 0
    mails: list[str] = field(default_factory=list)
    signed_in: list[str] = field(default_factory=list)
    in_the_clear: list[str] = field(default_factory=list)  # lines that came unencrypted


class _Session:
    """One connection: commands in, replies out."""

    def __init__(
        self, server: MailServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server = server
        self._reader = reader
        self._writer = writer
        self._encrypted = self._known = False

    async def serve(self) -> None:
        self._say("220 here")
        while line := (await self._reader.readline()).decode().strip():
            if not self._encrypted:
                self._server.in_the_clear.append(line)
            if not await self._obey(line, line.upper()):
                break
            await self._writer.drain()
        self._writer.close()

    async def _obey(self, line: str, command: str) -> bool:
        """Answer one command; False ends the session."""
        needs = self._server.certificate is not None and not self._known
        if command.startswith("EHLO"):
            self._say(*self._extensions())
        elif command == "STARTTLS" and self._server.certificate is not None:
            self._say("220 go on")
            await self._writer.drain()
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self._server.certificate)
            try:
                await self._writer.start_tls(context)
            except (OSError, ssl.SSLError):  # a client that does not trust the certificate
                return False
            self._encrypted = True
        elif command.startswith("AUTH PLAIN"):
            self._say(self._sign_in(line.split()[2]))
        elif command.startswith("MAIL") and needs:
            self._say("530 5.7.0 authentication required")
        elif command == "DATA":
            self._say("354 go on")
            self._server.mails.append((await self._reader.readuntil(b"\r\n.\r\n")).decode())
            self._say("250 well")
        else:
            self._say("250 well")
        return command != "QUIT"

    def _extensions(self) -> tuple[str, ...]:
        if self._server.certificate is None:
            return ("250 here",)
        return "250-here", "250 AUTH PLAIN" if self._encrypted else "250 STARTTLS"

    def _sign_in(self, given: str) -> str:
        _, user, password = base64.b64decode(given).decode().split("\0")
        self._known = (user, password) == (self._server.user, self._server.password)
        self._server.signed_in += [user] if self._known else []
        return "235 2.7.0 welcome" if self._known else "535 5.7.8 these credentials are wrong"

    def _say(self, *lines: str) -> None:
        self._writer.write("".join(f"{line}\r\n" for line in lines).encode())


@asynccontextmanager
async def mail_server(certificate: Path | None = None) -> AsyncIterator[MailServer]:
    """A mail server on a port of its own."""
    made = MailServer(certificate)
    server = await asyncio.start_server(lambda r, w: _Session(made, r, w).serve(), "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made
