"""Organiser's commands against a running server: plain HTTP(S) with the organiser's token.

The token is only sent to loopback or over TLS; a server with a certificate of its own is known by
the pin of its join link.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import shutil
import ssl
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import msgspec

from shared.decoding import MALFORMED, decode
from shared.errors import (
    BadRequest,
    Configuration,
    Internal,
    Unauthorized,
    Unreachable,
    VolunteerError,
    from_wire,
    why,
)
from shared.files.text_file import read_text
from shared.network.links import JoinLink, parse_link
from shared.network.proxy import named, proxy_of
from shared.network.tls_pin import WrongCertificate, pinned_context
from shared.protocol.base import ErrorBody
from shared.protocol.limits import API
from shared.sentences import english
from shared.text import escaped
from shared.workloads.data.skipped import walk

TIMEOUT_S = 600.0  # enough to build a dataset
CONNECT_S = 10.0
REPLY_BYTES_MAX = 256 << 20
COPY_BYTES = 1 << 20


class RemoteServer:
    """One running server, as its organiser's client."""

    def __init__(self, link: JoinLink, token: str, timeout_s: float = TIMEOUT_S) -> None:
        self._link = link
        self._token = token
        self._timeout_s = timeout_s
        self._proxy = proxy_of(link.url)
        if self._proxy and not self._proxy.startswith("http://"):
            raise Configuration(
                f"the proxy {named(self._proxy)} cannot be used here: only one of http:// can"
            )

    @classmethod
    def of(cls, server: str, token_file: Path | None) -> RemoteServer:
        """Return the server that `--server` (an address or a whole join link) and `--token-file`
        name.

        Raises Configuration.
        """
        try:
            link = parse_link(server)
        except BadRequest as error:
            raise BadRequest(
                f'"{escaped(server)}" names no server: --server takes https://HOST:PORT, '
                "http://127.0.0.1:PORT on its own machine, or a whole join link"
            ) from error
        if token_file is None:
            raise Configuration(
                "--server needs --token-file: the file admin.token of the server's data directory"
            )
        try:
            token = read_text(token_file.expanduser()).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Configuration(
                f"the token file {token_file} cannot be read: {why(error)}"
            ) from error
        if not token:
            raise Configuration(f"the token file {token_file} is empty")
        return cls(link, token)

    def within(self, timeout_s: float) -> RemoteServer:
        """Return the same server with this timeout."""
        return RemoteServer(self._link, self._token, timeout_s)

    def call(self, command: str, request: msgspec.Struct, reply: Any) -> Any:
        """Run a command on the server. Raises the server's errors."""
        body = msgspec.json.encode(request, enc_hook=english)
        response, data = self._send("POST", f"/admin/{command}", body, len(body))
        return decode(_good(response, data), reply)

    def put(self, box: str, name: str, path: Path) -> None:
        """Send one file to a box."""
        with path.open("rb") as file:
            size = path.stat().st_size
            response, data = self._send("PUT", f"/admin/files/{box}/{name}", file, size)
        _good(response, data)

    def get(self, box: str, name: str, path: Path) -> None:
        """Fetch one file from a box."""
        with self._reply("GET", f"/admin/files/{box}/{name}") as response:
            if response.status != 200:
                _good(response, response.read(REPLY_BYTES_MAX))
            with path.open("xb") as file:
                shutil.copyfileobj(response, file, COPY_BYTES)

    def blob(self, sha256: str, path: Path) -> None:
        """Fetch a blob into a file, resuming a partial one. Raises the server's errors, and
        Internal for bytes of another hash, which are deleted.
        """
        offset = path.stat().st_size if path.exists() else 0
        part = {"Range": f"bytes={offset}-"} if offset else {}
        with self._reply("GET", f"/admin/blobs/{sha256}", **part) as response:
            if response.status == 416:  # the whole file was here already
                response.read(REPLY_BYTES_MAX)
            elif response.status not in (200, 206):
                _good(response, response.read(REPLY_BYTES_MAX))
            else:
                with path.open("ab" if response.status == 206 else "wb") as file:
                    shutil.copyfileobj(response, file, COPY_BYTES)
                if response.length:
                    raise ConnectionError("the connection ended in the middle of a file")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            path.unlink()
            raise Internal(f"the server sent other bytes than those of {sha256[:12]}...")

    def _send(
        self, method: str, path: str, body: object, size: int
    ) -> tuple[http.client.HTTPResponse, bytes]:
        with self._reply(method, path, body, **{"Content-Length": str(size)}) as response:
            data = response.read(REPLY_BYTES_MAX + 1)
        if len(data) > REPLY_BYTES_MAX:
            raise Internal("the server's reply is too large")
        return response, data

    @contextmanager
    def _reply(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request; yield its reply, readable until the block ends. Raises Unreachable."""
        connection = self._connect()
        try:
            connection.request(method, API + path, body=body, headers=self._headers() | headers)
            yield connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        finally:
            connection.close()

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer admin.{self._token}", "Accept-Encoding": "identity"}

    def _connect(self) -> http.client.HTTPConnection:
        """Connect to the server and verify it. Raises Unreachable, Unauthorized, Configuration."""
        parts = urlsplit(self._link.url)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "http":
            plain = http.client.HTTPConnection(host, port or 80, timeout=self._timeout_s)
            self._open(plain)
            return plain
        pin = self._link.tls_pin  # a pin replaces the certificate authority
        context = pinned_context(pin) if pin else ssl.create_default_context()
        before = urlsplit(self._proxy)
        where = (before.hostname or "", before.port or 3128) if self._proxy else (host, port or 443)
        secure = http.client.HTTPSConnection(*where, timeout=self._timeout_s, context=context)
        if self._proxy:
            secure.set_tunnel(host, port or 443, headers=_authorization(before))
        self._open(secure)
        return secure

    def _open(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.timeout = min(CONNECT_S, self._timeout_s)
            connection.connect()
            connection.sock.settimeout(self._timeout_s)
        except OSError as error:
            connection.close()
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> VolunteerError:
        if isinstance(error, WrongCertificate):
            return Unauthorized(
                f"{self._link.url} presents another certificate than the link names"
            )
        if isinstance(error, ssl.SSLCertVerificationError):
            return Configuration(
                f"the certificate of {self._link.url} is not trusted: give the whole join link "
                "to --server"
            )
        through = f" through the proxy {named(self._proxy)}" if self._proxy else ""
        return Unreachable(f"{self._link.url} cannot be reached{through}: {why(error)}")


def _authorization(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    credentials = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
    return {"Proxy-Authorization": f"Basic {base64.b64encode(credentials).decode()}"}


def _good(response: http.client.HTTPResponse, data: bytes) -> bytes:
    if response.status < 300:
        return data
    try:
        body = decode(data, ErrorBody)
    except MALFORMED:
        raise Internal(f"the server answered with HTTP status {response.status}") from None
    raise from_wire(body.code, body.message, body.retry_after_s)


def flat_names(paths: Iterable[Path]) -> list[tuple[str, Path]]:
    """Return each file, folders walked (hidden files and links skipped), with a name that is unique
    in a box and keeps its suffix.

    The second number of a name identifies the file's folder by its name: 0 for a file that is
    itself in `paths`, or lies directly in a folder of `paths`. Images of one folder are one class.
    """
    names: list[tuple[str, Path]] = []
    folders = {"": 0}
    for path in paths:
        files = sorted(walk(path)) if path.is_dir() else [path]
        for file in files:
            inside = file.relative_to(path).parent.name if path.is_dir() else ""
            folder = folders.setdefault(inside, len(folders))
            ending = "".join(c for c in file.suffix if c.isalnum())
            stem = "".join(
                c if c.isascii() and (c.isalnum() or c in "_-") else "_" for c in file.stem
            )
            name = f"{len(names):06d}-{folder:04d}-{stem[:100]}" + (f".{ending}" if ending else "")
            names.append((name, file))
    return names
