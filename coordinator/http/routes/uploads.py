"""Uploads: begin, go on, ask how far."""

from __future__ import annotations

from coordinator.http.request import INTEGER_DIGITS_MAX, body_stream
from coordinator.http.routes.endpoint import Call
from shared.errors import BadRequest
from shared.protocol.work import UploadInfo, UploadRequest


async def create(call: Call[UploadRequest]) -> UploadInfo:
    return await call.coordinator.uploads.create(call.principal, call.body)


async def info(call: Call[None]) -> UploadInfo:
    return await call.coordinator.uploads.info(call.principal, call.text("upload"))


async def write(call: Call[None]) -> UploadInfo:
    offset = call.header("upload-offset")
    if not (offset.isascii() and offset.isdigit() and len(offset) <= INTEGER_DIGITS_MAX):
        raise BadRequest("the header Upload-Offset must say at which byte this body begins")
    stream = body_stream(call.scope, call.receive)
    return await call.coordinator.uploads.write(
        call.principal, call.text("upload"), int(offset), stream
    )
