"""Samples of the versions of a run, pictures or text, at addresses that a browser may open."""

from __future__ import annotations

from coordinator.http.routes.endpoint_app import Call, Reply
from coordinator.runs.public import check_shown
from coordinator.runs.samples import Kind
from shared.errors import NotFound

_SAFE = (("x-content-type-options", "nosniff"), ("cache-control", "no-cache"))


async def _check_public(call: Call[None]) -> None:
    if not call.coordinator.settings.public_page:
        raise NotFound("this coordinator shows nothing to the public")
    await check_shown(call.coordinator.db, call.coordinator.settings, call.text("run"))


async def sample(call: Call[None]) -> Reply:
    await _check_public(call)
    samples = call.coordinator.samples
    drawn = await samples.of(call.text("run"), call.query_number("version"))
    if not drawn.sha256:
        kind = ("content-type", "text/plain; charset=utf-8")
        return Reply(headers=(kind, *_SAFE), body=drawn.text.encode())
    tag = ("etag", f'"{drawn.sha256}"')
    if tag[1] in call.header("if-none-match"):
        return Reply(status=304, headers=(tag, *_SAFE))
    body = await samples.picture(drawn)
    return Reply(headers=(("content-type", "image/png"), tag, *_SAFE), body=body)


async def _film(call: Call[None], kind: Kind) -> Reply:
    await _check_public(call)
    body = await call.coordinator.samples.timelapse(call.text("run"), kind)
    return Reply(headers=(("content-type", f"image/{kind}"), *_SAFE), body=body)


async def gif(call: Call[None]) -> Reply:
    return await _film(call, "gif")


async def webp(call: Call[None]) -> Reply:
    return await _film(call, "webp")
