"""Accounts and machines: registration, visibility, codes that link a machine."""

from __future__ import annotations

from coordinator.http.routes.endpoint import Call
from shared.links import format_link
from shared.protocol.accounts import (
    LinkCode,
    RegisterReply,
    RegisterRequest,
    VisibilityRequest,
)


async def register(call: Call[RegisterRequest]) -> RegisterReply:
    coordinator = call.coordinator
    registered = await coordinator.volunteers.register(call.body)
    return RegisterReply(
        volunteer_id=registered.volunteer_id,
        worker_id=registered.worker_id,
        nickname=registered.nickname,
        created=registered.created,
        server=await coordinator.server.info(),
    )


async def visibility(call: Call[VisibilityRequest]) -> None:
    await call.coordinator.volunteers.set_public(call.principal, call.body.public)


async def link(call: Call[None]) -> LinkCode:
    made = await call.coordinator.volunteers.link_code(call.principal)
    link = format_link(call.coordinator.server.link(made.code))
    return LinkCode(code=made.code, link=link, expires_at=made.expires_at or 0.0)
