"""Client of a running server for the organiser's commands: HTTP or HTTPS with the organiser's
token.

The token is sent only to a loopback address or over TLS. The certificate that a server made itself
is verified by the pin of its join link.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import httpx
import msgspec

from coordinator.admin.command import OrganiserCommand, Q, R
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
from shared.files.deletions import delete_file
from shared.files.text_file import read_text
from shared.network.links import JoinLink, parse_link
from shared.network.proxy import proxy_of, without_credentials
from shared.network.tls_pin import WrongCertificate, pinned_context
from shared.protocol.base import ErrorBody
from shared.protocol.limits import API
from shared.sentences import encode_english
from shared.text import escaped
from shared.workloads.data.skipped_files import walk

TIMEOUT_S = 600.0  # enough to build a dataset
CONNECT_S = 10.0
REPLY_BYTES_MAX = 256 << 20
COPY_BYTES = 1 << 20
# errors of a request that the server may have received whole
_AFTER_SENDING = (httpx.ReadError, httpx.ReadTimeout, httpx.RemoteProtocolError)
_TOKEN = re.compile(r"[\x21-\x7e]+")  # one word, which fits a header


class ReplyLost(Unreachable):
    """The server's reply was lost: a repeated command may take effect twice."""

    exit_code = 1  # not 75, for which scripts try again


class RemoteServer:
    """Client of one running server, with the organiser's token."""

    def __init__(self, link: JoinLink, token: str, timeout_s: float = TIMEOUT_S) -> None:
        self._link = link
        self._token = token
        self._proxy = proxy_of(link.url)
        pin = link.tls_pin  # a pin replaces the certificate authority
        try:
            self._http = httpx.Client(
                base_url=link.url + API,
                verify=pinned_context(pin) if pin else ssl.create_default_context(),
                proxy=self._proxy or None,
                trust_env=False,
                headers={"Authorization": f"Bearer admin.{token}", "Accept-Encoding": "identity"},
                timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
                limits=httpx.Limits(max_keepalive_connections=0),  # nothing stays open
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise Configuration(
                f"the proxy {without_credentials(self._proxy)} cannot be used: {error}"
            ) from error

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
        if not _TOKEN.fullmatch(token):
            raise Configuration(
                f"the file {token_file} holds no token: name the file admin.token of the server's "
                "data directory"
            )
        return cls(link, token)

    def within(self, timeout_s: float) -> RemoteServer:
        """Return the same server with this timeout."""
        return RemoteServer(self._link, self._token, timeout_s)

    def call(self, command: OrganiserCommand[Q, R], ask: Q) -> R:
        """Run a command on the server. Raises the server's errors, and ReplyLost."""
        body = msgspec.json.encode(ask, enc_hook=encode_english)
        with self._reply("POST", f"/admin/{command.name}", body) as response:
            return decode(_good(response), command.reply)

    def put(self, box: str, name: str, path: Path) -> None:
        """Send one file to a box."""
        with (
            path.open("rb") as file,
            self._reply("PUT", f"/admin/files/{box}/{name}", file) as response,
        ):
            _good(response)

    def get(self, box: str, name: str, path: Path) -> None:
        """Fetch one file from a box."""
        with self._reply("GET", f"/admin/files/{box}/{name}") as response:
            if response.status_code != 200:
                _good(response)
            with path.open("xb") as file:
                _copy(response, file)

    def blob(self, sha256: str, path: Path) -> None:
        """Fetch a blob into a file, resuming a partial one. Raises the server's errors, and
        Internal for bytes of another hash, which are deleted.
        """
        offset = path.stat().st_size if path.exists() else 0
        part = {"Range": f"bytes={offset}-"} if offset else {}
        with self._reply("GET", f"/admin/blobs/{sha256}", headers=part) as response:
            if response.status_code in (200, 206):
                with path.open("ab" if response.status_code == 206 else "wb") as file:
                    _copy(response, file)
            elif response.status_code != 416:  # the whole file was here already
                _good(response)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            delete_file(path, "copy")
            raise Internal(f"the server sent other bytes than those of {sha256[:12]}...")

    @contextmanager
    def _reply(
        self,
        method: str,
        path: str,
        body: bytes | BinaryIO | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Iterator[httpx.Response]:
        """Send a request; yield its reply, readable until the block ends. Raises Unreachable,
        Unauthorized or Configuration.
        """
        try:
            with self._http.stream(method, path, content=body, headers=headers) as response:
                yield response
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: httpx.HTTPError) -> VolunteerError:
        causes = tuple(_causes(error))
        if any(isinstance(cause, WrongCertificate) for cause in causes):
            return Unauthorized(
                f"{self._link.url} presents another certificate than the link names"
            )
        if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in causes):
            return Configuration(
                f"the certificate of {self._link.url} is not trusted: give the whole join link "
                "to --server"
            )
        if any(isinstance(c, ssl.SSLError) and c.reason == "WRONG_VERSION_NUMBER" for c in causes):
            return Configuration(
                f"{self._link.url} answers without TLS: an address of it begins with http://"
            )
        cause = next((cause for cause in causes if isinstance(cause, OSError)), error)
        through = f" through the proxy {without_credentials(self._proxy)}" if self._proxy else ""
        if isinstance(error, _AFTER_SENDING) and error.request.method == "POST":
            return ReplyLost(
                f"the reply of {self._link.url} was lost{through}: {why(cause)}; the command may "
                "have taken effect: look before you repeat it"
            )
        return Unreachable(f"{self._link.url} cannot be reached{through}: {why(cause)}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes; the system's own error is two causes below that of httpx."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _copy(response: httpx.Response, file: BinaryIO) -> None:
    for piece in response.iter_raw(COPY_BYTES):
        file.write(piece)


def _good(response: httpx.Response) -> bytes:
    """Return the body of a reply with a good status. Raises the server's error for any other
    status, and Internal for a reply that cannot be read.
    """
    data = bytearray()
    for piece in response.iter_raw(COPY_BYTES):
        data += piece
        if len(data) > REPLY_BYTES_MAX:
            raise Internal("the server's reply is too large")
    if response.status_code < 300:
        return bytes(data)
    try:
        body = decode(bytes(data), ErrorBody)
    except MALFORMED:
        raise Internal(f"the server answered with HTTP status {response.status_code}") from None
    raise from_wire(body.code, body.message, body.retry_after_s)


def flat_names(paths: Iterable[Path]) -> list[tuple[str, Path]]:
    """Return each file of `paths` and of their folders, but no hidden file or link, with a name
    that is unique in a box and keeps its suffix.

    The second number of a name stands for the name of the file's folder, since images of one folder
    are one class. It is 0 for a file that is itself in `paths`, or directly in a folder of `paths`.
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
