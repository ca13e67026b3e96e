"""Replies of the public pages: documents with tag and gzip, files, and the headers of all."""

from __future__ import annotations

import gzip
import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from coordinator.request_body import Scope, Send, byte_range, raw_header

if TYPE_CHECKING:
    from coordinator.storage.blobs import BlobStore

Headers = list[tuple[bytes, bytes]]

HTML = "text/html; charset=utf-8"
JSON = "application/json"
ZIPPED_BYTES_MIN = 600
ZIPPED = ("text/", "image/svg", "application/json")

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SAFE: Headers = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
]


class FinishedPage(msgspec.Struct, frozen=True, kw_only=True):
    """Finished document, made once and sent to many readers."""

    kind: str
    body: bytes
    zipped: bytes  # b"" where gzip saves nothing
    tag: bytes
    status: int = 200
    keep: str = "no-cache"  # browsers check with the tag at each use
    varies: str = "accept-encoding"  # request headers that the document depends on
    anywhere: bool = False  # True if scripts of other sites may read it


def finish(kind: str, content: str | bytes, **fields: Any) -> FinishedPage:
    """Finish a document: compute its bytes, their gzip and their tag."""
    body = content.encode() if isinstance(content, str) else content
    small = len(body) < ZIPPED_BYTES_MIN or not kind.startswith(ZIPPED)
    return FinishedPage(
        kind=kind,
        body=body,
        zipped=b"" if small else gzip.compress(body, 6, mtime=0),
        tag=b'"' + hashlib.sha256(body).hexdigest()[:24].encode() + b'"',
        **fields,
    )


def head(scope: Scope, kind: str, keep: str) -> Headers:
    """Return the headers that every reply of the pages has."""
    return [
        (b"content-type", kind.encode()),
        (b"cache-control", keep.encode()),
        (b"content-security-policy", _POLICY.encode()),
        *_SAFE,
        (b"x-request-id", str(scope.get("request_id", "")).encode()),
    ]


async def send_file(scope: Scope, send: Send, blobs: BlobStore, sha256: str) -> None:
    """Send a blob, or a range of its bytes, as a download; or redirect to the store's
    address.

    Raises NotFound.
    """
    kind = "application/octet-stream"
    if address := await blobs.url(sha256):
        headers = head(scope, kind, "no-store")  # the signature is valid for minutes
        headers.append((b"location", address.encode()))
        scope["status"] = 302
        await send({"type": "http.response.start", "status": 302, "headers": headers})
        await send({"type": "http.response.body", "body": b""})
        return
    size, tag = await blobs.size(sha256), f'"{sha256}"'.encode()
    headers = [
        *head(scope, kind, "public, max-age=86400, no-transform"),
        (b"accept-ranges", b"bytes"),
        (b"content-disposition", b"attachment"),
        (b"etag", tag),
    ]
    status, start, stop = 200, 0, size
    if raw_header(scope, b"if-range") in (b"", tag):
        try:
            span = byte_range(raw_header(scope, b"range").decode("latin-1"), size)
        except ValueError:
            status, span = 416, (0, 0)
            headers.append((b"content-range", f"bytes */{size}".encode()))
        if span and status == 200:
            status = 206
            headers.append((b"content-range", f"bytes {span[0]}-{span[1] - 1}/{size}".encode()))
        start, stop = span or (0, size)
    headers.append((b"content-length", str(stop - start).encode()))
    pieces = await blobs.open_range(sha256, start, stop)
    scope["status"], scope["sent"] = status, 0
    try:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if scope["method"] != "HEAD":
            async for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                scope["sent"] += len(piece)
        await send({"type": "http.response.body", "body": b""})
    finally:
        await pieces.aclose()


async def reply(scope: Scope, send: Send, document: FinishedPage) -> None:
    """Send a document, or 304 to a client that has the document."""
    headers = head(scope, document.kind, document.keep)
    headers.append((b"vary", document.varies.encode()))
    if document.anywhere:
        headers.append((b"access-control-allow-origin", b"*"))
    status, body = document.status, document.body
    zipped = document.zipped and b"gzip" in raw_header(scope, b"accept-encoding")
    if status == 200:
        # The tag is weak, since the document has the same tag with and without gzip.
        headers.append((b"etag", b"W/" + document.tag))
        if document.tag in raw_header(scope, b"if-none-match"):
            status, body, zipped = 304, b"", b""
    if zipped:
        body = document.zipped
        headers.append((b"content-encoding", b"gzip"))
    if status != 304:
        headers.append((b"content-length", str(len(body)).encode()))
    if scope["method"] == "HEAD":
        body = b""
    scope["status"], scope["sent"] = status, len(body)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
