"""Coming, staying, going: what a worker says of itself."""

from __future__ import annotations

from coordinator.http.routes.endpoint import Call
from shared.links import format_link
from shared.protocol.accounts import (
    BenchmarkRequest,
    LeaveRequest,
    LinkCode,
    Me,
    RegisterReply,
    RegisterRequest,
    VisibilityRequest,
)
from shared.protocol.heartbeat import HeartbeatReply, HeartbeatRequest


async def register(call: Call[RegisterRequest]) -> RegisterReply:
    coordinator = call.coordinator
    registered = await coordinator.volunteers.register(call.body)
    return RegisterReply(
        volunteer_id=registered.volunteer_id,
        worker_id=registered.worker_id,
        nickname=registered.nickname,
        created=registered.created,
        server=await coordinator.server_info(),
    )


async def heartbeat(call: Call[HeartbeatRequest]) -> HeartbeatReply:
    return await call.coordinator.pulse.beat(call.principal, call.body)


async def benchmark(call: Call[BenchmarkRequest]) -> None:
    await call.coordinator.volunteers.set_benchmark(call.principal, call.body)


async def me(call: Call[None]) -> Me:
    return await call.coordinator.volunteers.me(call.principal)


async def leave(call: Call[LeaveRequest]) -> None:
    await call.coordinator.volunteers.leave(call.principal, call.body)


async def visibility(call: Call[VisibilityRequest]) -> None:
    await call.coordinator.volunteers.set_public(call.principal, call.body.public)


async def link(call: Call[None]) -> LinkCode:
    made = await call.coordinator.volunteers.link_code(call.principal)
    link = format_link(call.coordinator.link(made.code))
    return LinkCode(code=made.code, link=link, expires_at=made.expires_at or 0.0)
