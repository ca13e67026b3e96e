"""Blobs by hash: whole or in ranges, streamed; a volunteer gets only the blobs that it may read."""

from __future__ import annotations

from coordinator.http.routes.endpoint_app import Call, Reply, json_reply
from coordinator.request_body import byte_range
from coordinator.storage.blobs import check_name
from shared.errors import NotFound
from shared.protocol.base import ErrorBody
from shared.protocol.versions import BlobUrl


async def blob(call: Call[None]) -> Reply:
    return await _blob_reply(call, await _readable(call))


async def blob_url(call: Call[None]) -> BlobUrl:
    return BlobUrl(url=await call.coordinator.blobs.url(await _readable(call)))


async def _readable(call: Call[None]) -> str:
    """Return the name of a blob that this volunteer may read. Raises NotFound."""
    name = check_name(call.text("sha256"))
    if not await call.coordinator.datasets.may_read(name):
        raise NotFound("there is no such blob, or it is not for volunteers")
    return name


async def any_blob(call: Call[None]) -> Reply:
    """Serve any blob to the organiser, including updates."""
    return await _blob_reply(call, check_name(call.text("sha256")))


async def _blob_reply(call: Call[None], name: str) -> Reply:
    coordinator = call.coordinator
    tag = f'"{name}"'
    headers = [
        ("etag", tag),
        ("accept-ranges", "bytes"),
        ("cache-control", "private, max-age=31536000, immutable"),
        ("content-type", "application/octet-stream"),
    ]
    if tag in call.header("if-none-match"):
        return Reply(status=304, headers=tuple(headers[:3]))
    if not await coordinator.datasets.is_stored(name):
        raise NotFound("there is no such blob, or it was let go")
    size = await coordinator.blobs.size(name)
    span = None
    if call.header("if-range") in ("", tag):
        try:
            span = byte_range(call.header("range"), size)
        except ValueError:
            return _unsatisfiable(call, size)
    start, stop = span or (0, size)
    if span is not None:
        headers.append(("content-range", f"bytes {start}-{stop - 1}/{size}"))
    return Reply(
        status=200 if span is None else 206,
        headers=tuple(headers),
        stream=await coordinator.blobs.open_range(name, start, stop),
        size=stop - start,
    )


def _unsatisfiable(call: Call[None], size: int) -> Reply:
    error = ErrorBody(
        code="bad_request",
        message=f"the blob has {size} bytes, so this range does not exist",
        request_id=str(call.scope.get("request_id", "")),
    )
    return json_reply(error, 416, (("content-range", f"bytes */{size}"),))
