"""Every route, as data. The order is that of matching: what is called most stands first."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.http.openapi import document
from coordinator.http.routes import (
    about,
    admin,
    blobs,
    contributions,
    runs,
    samples,
    tasks,
    uploads,
    workers,
)
from coordinator.http.routes.endpoint import Call, Endpoint, Query, Reply, json_reply
from shared.protocol.accounts import (
    BenchmarkRequest,
    LeaveRequest,
    LinkCode,
    Me,
    RegisterReply,
    RegisterRequest,
    RunInfo,
    ServerInfo,
    VisibilityRequest,
    WorkerInfo,
)
from shared.protocol.heartbeat import (
    HeartbeatReply,
    HeartbeatRequest,
    LeaderRow,
    LedgerRow,
    LossPoint,
    Summary,
)
from shared.protocol.limits import API
from shared.protocol.work import (
    BeginReply,
    BeginRequest,
    ClaimReply,
    ClaimRequest,
    ReleaseRequest,
    SignedManifest,
    SubmitRequest,
    UploadInfo,
    UploadRequest,
    Verdict,
    VersionInfo,
)
from shared.workloads.base import DatasetManifest

_BYTES = "application/octet-stream"
_CURSOR = Query(name="cursor", kind=int, help="Where the last page ended.")

_WORKERS = (
    Endpoint(
        method="POST",
        path=f"{API}/workers/heartbeat",
        handler=workers.heartbeat,
        summary="I live and this is how far my tasks are",
        request=HeartbeatRequest,
        reply=HeartbeatReply,
    ),
    Endpoint(
        method="POST",
        path=f"{API}/workers/register",
        handler=workers.register,
        summary="Register a worker; the same ids and secret get the same account",
        auth="none",
        request=RegisterRequest,
        reply=RegisterReply,
        strict=True,
        writes=True,
    ),
    Endpoint(
        method="POST",
        path=f"{API}/workers/benchmark",
        handler=workers.benchmark,
        summary="Store what a worker measured of itself",
        request=BenchmarkRequest,
    ),
    Endpoint(
        method="GET",
        path=f"{API}/workers/me",
        handler=workers.me,
        summary="My account, credits and machines",
        reply=Me,
    ),
    Endpoint(
        method="POST",
        path=f"{API}/workers/leave",
        handler=workers.leave,
        summary="This machine goes; with forget the whole account is wiped",
        request=LeaveRequest,
    ),
    Endpoint(
        method="POST",
        path=f"{API}/workers/visibility",
        handler=workers.visibility,
        summary="Show my nickname to others, or hide it",
        request=VisibilityRequest,
    ),
    Endpoint(
        method="POST",
        path=f"{API}/links",
        handler=workers.link,
        summary="A ten-minute code that adds a machine to my account",
        reply=LinkCode,
    ),
)

_WORK = (
    Endpoint(
        method="POST",
        path=f"{API}/claims",
        handler=tasks.claim,
        summary="Take a task; waits until there is one or wait_s is over",
        request=ClaimRequest,
        reply=ClaimReply,
    ),
    Endpoint(
        method="POST",
        path=f"{API}/tasks/{{task}}/begin",
        handler=tasks.begin,
        summary="Begin a task: its base version is bound now",
        request=BeginRequest,
        reply=BeginReply,
    ),
    Endpoint(
        method="POST",
        path=f"{API}/tasks/{{task}}/release",
        handler=tasks.release,
        summary="Give a task back",
        request=ReleaseRequest,
    ),
    Endpoint(
        method="POST",
        path=f"{API}/tasks/{{task}}/submit",
        handler=tasks.submit,
        summary="Hand in a result; the same one again gets the same verdict",
        request=SubmitRequest,
        reply=Verdict,
    ),
    Endpoint(
        method="POST",
        path=f"{API}/uploads",
        handler=uploads.create,
        summary="Begin an upload for a lease; the same again finds the same upload",
        request=UploadRequest,
        reply=UploadInfo,
        writes=True,
    ),
    Endpoint(
        method="GET",
        path=f"{API}/uploads/{{upload}}",
        handler=uploads.info,
        summary="How far an upload is",
        reply=UploadInfo,
    ),
    Endpoint(
        method="PUT",
        path=f"{API}/uploads/{{upload}}",
        handler=uploads.write,
        summary="Send bytes from Upload-Offset on; with the last byte the hash is checked",
        reply=UploadInfo,
        sends=_BYTES,
        headers=("Upload-Offset",),
        writes=True,
    ),
    Endpoint(
        method="GET",
        path=f"{API}/blobs/{{sha256}}",
        handler=blobs.blob,
        summary="The bytes of a blob; Range, If-Range and If-None-Match are understood",
        gives=_BYTES,
        headers=("Range", "If-Range", "If-None-Match"),
    ),
)

_READING = (
    Endpoint(
        method="GET",
        path=f"{API}/runs",
        handler=runs.listing,
        summary="Every run",
        reply=tuple[RunInfo, ...],
    ),
    Endpoint(
        method="GET",
        path=f"{API}/runs/{{run}}",
        handler=runs.info,
        summary="One run",
        reply=RunInfo,
    ),
    Endpoint(
        method="POST",
        path=f"{API}/runs/{{run}}/consent",
        handler=runs.consent,
        summary="I have seen the licence of this run and agree",
    ),
    Endpoint(
        method="GET",
        path=f"{API}/runs/{{run}}/versions",
        handler=runs.versions,
        summary="The history of a run, oldest first",
        reply=tuple[VersionInfo, ...],
        query=(_CURSOR,),
    ),
    Endpoint(
        method="GET",
        path=f"{API}/runs/{{run}}/versions/latest",
        handler=runs.latest,
        summary="The signed manifest of the newest version; its ETag names the weights",
        reply=SignedManifest,
        headers=("If-None-Match",),
    ),
    Endpoint(
        method="GET",
        path=f"{API}/runs/{{run}}/versions/{{version}}",
        handler=runs.version,
        summary="The signed manifest of one version",
        reply=SignedManifest,
        headers=("If-None-Match",),
    ),
    Endpoint(
        method="GET",
        path=f"{API}/runs/{{run}}/summary",
        handler=runs.summary,
        summary="The figures of a run",
        reply=Summary,
    ),
    Endpoint(
        method="GET",
        path=f"{API}/runs/{{run}}/loss",
        handler=runs.loss,
        summary="Measured losses, oldest first, as many as a curve can show",
        reply=tuple[LossPoint, ...],
    ),
    Endpoint(
        method="GET",
        path=f"{API}/runs/{{run}}/workers",
        handler=runs.workers,
        summary="Machines at work on a run, without names",
        reply=tuple[WorkerInfo, ...],
    ),
    Endpoint(
        method="GET",
        path=f"{API}/datasets/{{dataset}}",
        handler=runs.dataset,
        summary="What a dataset is made of, without its held-out split",
        reply=DatasetManifest,
    ),
    Endpoint(
        method="GET",
        path=f"{API}/leaderboard",
        handler=runs.leaderboard,
        summary="Who earned how much",
        reply=tuple[LeaderRow, ...],
        query=(
            Query(name="run", kind=str, help="Of one run."),
            Query(name="days", kind=int, help="Of the last days."),
        ),
    ),
    Endpoint(
        method="GET",
        path=f"{API}/contributions",
        handler=contributions.history,
        summary="My verdicts, newest first; the header Next-Cursor continues",
        reply=tuple[Verdict, ...],
        query=(_CURSOR,),
    ),
    Endpoint(
        method="GET",
        path=f"{API}/contributions/{{contribution}}",
        handler=contributions.verdict,
        summary="Where one contribution of mine stands",
        reply=Verdict,
    ),
    Endpoint(
        method="GET",
        path=f"{API}/me/ledger",
        handler=contributions.ledger,
        summary="My credits line by line, newest first; the id of the last line continues",
        reply=tuple[LedgerRow, ...],
        query=(_CURSOR,),
    ),
)


async def _openapi(_: Call[None]) -> Reply:
    return json_reply(document(ENDPOINTS))


_ABOUT: Sequence[Endpoint] = (
    Endpoint(
        method="GET",
        path=f"{API}/server",
        handler=about.server,
        summary="Who this coordinator is and what it runs",
        auth="none",
        reply=ServerInfo,
    ),
    Endpoint(
        method="GET",
        path=f"{API}/openapi.json",
        handler=_openapi,
        summary="This document",
        auth="none",
        reply=dict,
    ),
    Endpoint(
        method="GET",
        path="/health",
        handler=about.health,
        summary="The process answers",
        auth="none",
        reply=about.Health,
    ),
    Endpoint(
        method="GET",
        path="/ready",
        handler=about.ready,
        summary="The database answers and work is taken in; 503 while starting or stopping",
        auth="none",
        reply=about.Health,
    ),
    Endpoint(
        method="GET",
        path="/metrics",
        handler=about.metrics,
        summary="Counts and gauges for Prometheus",
        auth="none",
        gives="text/plain",
    ),
    Endpoint(
        method="GET",
        path="/join",
        handler=about.join,
        summary="How to join, for a browser that opened a join link",
        auth="none",
        gives="text/html",
    ),
)

ENDPOINTS: tuple[Endpoint, ...] = (
    *_WORKERS,
    *_WORK,
    *_READING,
    *samples.ENDPOINTS,
    *admin.ENDPOINTS,
    *_ABOUT,
)
