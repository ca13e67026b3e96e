"""Requests of workers: registration, account, claims, begun tasks, heartbeats, uploads,
submissions, and answers to prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import msgspec

from coordinator.http.routes.endpoint_app import Call
from coordinator.request_body import (
    INTEGER_DIGITS_MAX,
    ClientGone,
    Receive,
    body_stream,
    until_gone,
)
from coordinator.scheduling.heartbeat_replies import MORE_S
from coordinator.storage.disk_space import RETRY_S
from shared.errors import BadRequest, Unavailable
from shared.network.links import format_link
from shared.protocol.accounts import (
    BenchmarkRequest,
    Challenge,
    LeaveRequest,
    LinkCode,
    MachineOrder,
    Me,
    RegisterReply,
    RegisterRequest,
    VisibilityRequest,
)
from shared.protocol.base import Reason
from shared.protocol.contributions import (
    SubmitReply,
    SubmitRequest,
    UploadInfo,
    UploadRequest,
    Verdict,
)
from shared.protocol.heartbeat import HeartbeatReply, HeartbeatRequest
from shared.protocol.inference import AnswerGoOn, AnswerOffer, AnswerTokens, AnswerWork
from shared.protocol.leases import (
    BeginReply,
    BeginRequest,
    ClaimReply,
    ClaimRequest,
    IdleReply,
    ReleaseRequest,
)
from shared.protocol.limits import NEWS_MAX
from shared.protocol.members import MemberData

T = TypeVar("T")

UNDECIDED = ("received", "checking")
STOPPING_S = 3.0  # about the time that a restart takes


async def register(call: Call[RegisterRequest]) -> RegisterReply:
    coordinator = call.coordinator
    registered = await coordinator.volunteers.register(call.body, call.address)
    return RegisterReply(
        volunteer_id=registered.volunteer_id,
        worker_id=registered.worker_id,
        nickname=registered.nickname,
        created=registered.created,
        server=await coordinator.server.info(),
    )


async def challenge(call: Call[None]) -> Challenge:
    return await call.coordinator.volunteers.challenge(
        call.query("volunteer"), call.query("nickname")
    )


async def benchmark(call: Call[BenchmarkRequest]) -> None:
    await call.coordinator.volunteers.set_benchmark(call.principal, call.body)


async def me(call: Call[None]) -> Me:
    return await call.coordinator.volunteers.me(call.principal)


async def leave(call: Call[LeaveRequest]) -> None:
    await call.coordinator.volunteers.leave(call.principal, call.body)


async def consent(call: Call[None]) -> None:
    await call.coordinator.volunteers.consent(call.principal, call.text("run"))


async def declare_data(call: Call[MemberData]) -> None:
    await call.coordinator.member_data.declare(call.principal, call.text("run"), call.body)


async def withdraw_data(call: Call[None]) -> None:
    await call.coordinator.member_data.withdraw(call.principal, call.text("run"))


async def visibility(call: Call[VisibilityRequest]) -> None:
    await call.coordinator.volunteers.set_public(call.principal, call.body.public)


async def order(call: Call[MachineOrder]) -> None:
    await call.coordinator.volunteers.order(call.principal, call.body)


async def link(call: Call[None]) -> LinkCode:
    code = await call.coordinator.volunteers.link_code(call.principal)
    link = format_link(call.coordinator.server.link(code.code))
    return LinkCode(code=code.code, link=link, expires_at=code.expires_at or 0.0)


async def claim(call: Call[ClaimRequest]) -> ClaimReply:
    coordinator = call.coordinator
    if coordinator.space.read_only:
        message = "the coordinator's disk is full; it continues when there is space again"
        return ClaimReply(
            idle=IdleReply(reason=Reason.READ_ONLY, message=message, retry_after_s=RETRY_S)
        )
    claiming = coordinator.claims.claim(call.principal, call.body)
    return await _while_wanted(claiming, call.receive, coordinator.stopping)


async def _while_wanted(work: Awaitable[T], receive: Receive, stopping: asyncio.Event) -> T:
    """Return the result of a long wait; cancel it when the client hangs up (ClientGone) or the
    server stops (Unavailable), or else a lease could be left without a worker.
    """
    working = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(until_gone(receive))
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((working, disconnect, stop), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if disconnect.done():
            raise ClientGone
        raise Unavailable("the coordinator is restarting", retry_after_s=STOPPING_S)
    finally:
        for task in (working, disconnect, stop):
            task.cancel()
        await asyncio.gather(working, disconnect, stop, return_exceptions=True)


async def offer(call: Call[AnswerOffer]) -> AnswerWork:
    coordinator = call.coordinator
    offering = coordinator.answerers.offer(call.principal, call.body)
    return await _while_wanted(offering, call.receive, coordinator.stopping)


async def answer_tokens(call: Call[AnswerTokens]) -> AnswerGoOn:
    answerers = call.coordinator.answerers
    return await answerers.tokens(call.principal, call.text("answer"), call.body)


async def begin(call: Call[BeginRequest]) -> BeginReply:
    coordinator, body = call.coordinator, call.body
    task = call.number("task")
    beginning = coordinator.task_leases.begin(
        call.principal, task, body.attempt, newest=body.newest
    )
    start = await _while_wanted(beginning, call.receive, coordinator.stopping)
    return BeginReply(
        version=start.version,
        finish_by=start.finish_by,
        part=start.part,
        tries=start.tries,
        manifest=None
        if start.version == body.known
        else await coordinator.runs.queries.manifest(start.run, start.version),
    )


async def release(call: Call[ReleaseRequest]) -> None:
    await call.coordinator.task_leases.release(call.principal, call.number("task"), call.body)


async def submit(call: Call[SubmitRequest]) -> SubmitReply:
    """Return the verdict and the state of the account at the same instant."""
    coordinator, principal = call.coordinator, call.principal
    number, fresh = await coordinator.intake.submit(principal, call.number("task"), call.body)
    me: Me | None
    me, (new, verdict) = await coordinator.volunteers.me_with(
        principal,
        lambda conn, new: (new, coordinator.intake.stands(conn, principal, number, new)),
        since=coordinator.heartbeats.told_until(principal),
    )
    news = tuple(item for _, item in new[-NEWS_MAX:])
    if fresh:
        coordinator.intake.count(verdict)
    if verdict.state in UNDECIDED:  # only a verdict is sent with the account and other new verdicts
        me, news = None, ()
    elif new:
        coordinator.heartbeats.record_told(principal, new[-1][0])
    fields = {name: getattr(verdict, name) for name in Verdict.__struct_fields__}
    return SubmitReply(**fields, me=me, news=news)


async def heartbeat(call: Call[HeartbeatRequest]) -> HeartbeatReply:
    """Return orders, news and, where there are new verdicts, the state of the account at the same
    instant.
    """
    coordinator, principal, since = call.coordinator, call.principal, call.body.news_since
    reply, news = await coordinator.heartbeats.answer(principal, call.body)
    if not news:
        return reply
    me, verdict_news = await coordinator.volunteers.me_with(
        principal, lambda conn, _: coordinator.heartbeats.news(conn, principal, since)
    )
    coordinator.heartbeats.record_sent(principal, verdict_news)
    return msgspec.structs.replace(
        reply,
        next_s=MORE_S if verdict_news.until < reply.news_until else reply.next_s,
        news=verdict_news.verdicts,
        news_until=verdict_news.until,
        earned_micro=verdict_news.earned_micro,
        pending_micro=verdict_news.pending_micro,
        me=me,
    )


async def create_upload(call: Call[UploadRequest]) -> UploadInfo:
    return await call.coordinator.uploads.create(call.principal, call.body)


async def upload(call: Call[None]) -> UploadInfo:
    offset = call.header("upload-offset")
    if not (offset.isascii() and offset.isdigit() and len(offset) <= INTEGER_DIGITS_MAX):
        raise BadRequest("the header Upload-Offset must say at which byte this body begins")
    stream = body_stream(call.scope, call.receive)
    return await call.coordinator.uploads.write(
        call.principal, call.text("upload"), int(offset), stream
    )
