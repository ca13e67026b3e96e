"""Every endpoint of the coordinator as one typed call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import quote

import msgspec

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
from shared.protocol.limits import LONG_POLL_S_MAX
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
from volunteer.control.commands import History
from volunteer.net.client import Call, Client
from volunteer.net.retry import FOREVER

LISTING_BYTES_MAX = 16 << 20
MANIFEST_BYTES_MAX = 64 << 20  # of a dataset: about 120 bytes a chunk
ASK_S = 15.0  # patience of what a person waits for
SHORT_S = 5.0  # patience of what is only courtesy

CURSOR_CHARS_MAX = 64

T = TypeVar("T")
Nothing = type(None)


class Api:
    """The coordinator as a worker sees it. What training depends on is retried until it is answered."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def server(self, patience_s: float = FOREVER) -> ServerInfo:
        return await self.client.call(
            Call(
                method="GET", path="/server", reply=ServerInfo, secret=False, patience_s=patience_s
            )
        )

    async def register(
        self, request: RegisterRequest, patience_s: float = FOREVER
    ) -> RegisterReply:
        return await self._post("/workers/register", RegisterReply, request, patience_s=patience_s)

    async def benchmark(self, request: BenchmarkRequest, patience_s: float = FOREVER) -> None:
        await self._post("/workers/benchmark", Nothing, request, patience_s=patience_s)

    async def heartbeat(self, request: Callable[[], HeartbeatRequest]) -> HeartbeatReply:
        """Asked for what to say at each try, so that none is old."""
        return await self._post("/workers/heartbeat", HeartbeatReply, request)

    async def leave(self, request: LeaveRequest) -> None:
        await self._post("/workers/leave", Nothing, request, patience_s=ASK_S)

    async def visibility(self, public: bool) -> None:
        """Whether others see the nickname from now on."""
        request = VisibilityRequest(public=public)
        await self._post("/workers/visibility", Nothing, request, patience_s=ASK_S)

    async def link(self) -> LinkCode:
        return await self._post("/links", LinkCode, patience_s=ASK_S)

    async def consent(self, run: str) -> None:
        await self._post(f"/runs/{_part(run)}/consent", Nothing)

    # Tasks.

    async def claim(self, request: ClaimRequest) -> ClaimReply:
        call = Call(
            method="POST",
            path="/claims",
            reply=ClaimReply,
            body=request,
            timeout_s=request.wait_s + 20.0,
        )
        return await self.client.call(call)

    async def begin(
        self,
        task: int,
        attempt: int,
        known: int | None = None,
        *,
        base: int | None = None,
        patience_s: float = FOREVER,
    ) -> BeginReply:
        """Held open while the merge that this worker waits for is not done.

        With the version `known` here, work that has begun goes on from the newest one. `base` is told late: see early.py.
        """
        request = BeginRequest(attempt=attempt, newest=known is not None, known=known, base=base)
        call = Call(
            method="POST",
            path=f"/tasks/{task}/begin",
            reply=BeginReply,
            body=request,
            timeout_s=LONG_POLL_S_MAX + 20.0,
            patience_s=patience_s,
        )
        return await self.client.call(call)

    async def release(
        self, task: int, request: ReleaseRequest, patience_s: float = SHORT_S
    ) -> None:
        await self._post(f"/tasks/{task}/release", Nothing, request, patience_s=patience_s)

    async def upload(self, request: UploadRequest) -> UploadInfo:
        """Open an upload, or find the one that was opened before; not retried, see transfer.py."""
        return await self._post("/uploads", UploadInfo, request, patience_s=0)

    async def submit(self, task: int, request: SubmitRequest) -> Verdict:
        """Not retried: the outbox keeps the result and knows when to come back."""
        return await self._post(f"/tasks/{task}/submit", Verdict, request, patience_s=0)

    # Reading.

    async def me(self) -> Me:
        return await self._get("/workers/me", Me)

    async def runs(self) -> tuple[RunInfo, ...]:
        return await self._get("/runs", tuple[RunInfo, ...], bytes_max=LISTING_BYTES_MAX)

    async def run(self, name: str) -> RunInfo:
        return await self._get(f"/runs/{_part(name)}", RunInfo)

    async def versions(self, run: str, cursor: str = "") -> tuple[VersionInfo, ...]:
        return await self._list(f"/runs/{_part(run)}/versions", VersionInfo, cursor)

    async def latest(self, run: str) -> SignedManifest:
        return await self._get(f"/runs/{_part(run)}/versions/latest", SignedManifest)

    async def version(self, run: str, version: int) -> SignedManifest:
        return await self._get(f"/runs/{_part(run)}/versions/{version}", SignedManifest)

    async def summary(self, run: str) -> Summary:
        return await self._get(f"/runs/{_part(run)}/summary", Summary)

    async def loss(self, run: str) -> tuple[LossPoint, ...]:
        return await self._list(f"/runs/{_part(run)}/loss", LossPoint)

    async def workers(self, run: str) -> tuple[WorkerInfo, ...]:
        return await self._list(f"/runs/{_part(run)}/workers", WorkerInfo)

    async def dataset(self, name: str) -> DatasetManifest:
        path = f"/datasets/{_part(name)}"
        return await self._get(
            path, DatasetManifest, bytes_max=MANIFEST_BYTES_MAX, patience_s=FOREVER
        )

    async def contributions(self, cursor: str = "") -> History:
        """Verdicts, the newest first, and the cursor of those before."""
        next_cursor = ""

        def read(headers: Mapping[str, str]) -> None:
            nonlocal next_cursor
            next_cursor = headers.get("next-cursor", "")[:CURSOR_CHARS_MAX]

        call = Call(
            method="GET",
            path="/contributions",
            reply=tuple[Verdict, ...],
            bytes_max=LISTING_BYTES_MAX,
            patience_s=ASK_S,
            query={"cursor": cursor} if cursor else {},
            headers=read,
        )
        verdicts = await self.client.call(call)
        return History(verdicts=verdicts, cursor=next_cursor)

    async def contribution(self, number: int) -> Verdict:
        return await self._get(f"/contributions/{number}", Verdict)

    async def ledger(self, cursor: str = "") -> tuple[LedgerRow, ...]:
        return await self._list("/me/ledger", LedgerRow, cursor)

    async def leaderboard(self, run: str = "", days: int = 0) -> tuple[LeaderRow, ...]:
        query = {"run": run} if run else {}
        if days:
            query["days"] = str(days)
        return await self._get(
            "/leaderboard", tuple[LeaderRow, ...], bytes_max=LISTING_BYTES_MAX, query=query
        )

    async def _list(self, path: str, row: type[T], cursor: str = "") -> tuple[T, ...]:
        query = {"cursor": cursor} if cursor else {}
        rows: type[tuple[T, ...]] = tuple[row, ...]  # type: ignore[valid-type] # only known here
        return await self._get(path, rows, bytes_max=LISTING_BYTES_MAX, query=query)

    async def _get(
        self,
        path: str,
        reply: type[T],
        *,
        bytes_max: int = 1 << 20,
        patience_s: float = ASK_S,
        query: Mapping[str, str] | None = None,
    ) -> T:
        call = Call(
            method="GET",
            path=path,
            reply=reply,
            bytes_max=bytes_max,
            patience_s=patience_s,
            query=query or {},
        )
        return await self.client.call(call)

    async def _post(
        self,
        path: str,
        reply: type[T],
        body: msgspec.Struct | Callable[[], msgspec.Struct] | None = None,
        *,
        patience_s: float = FOREVER,
    ) -> T:
        call = Call(method="POST", path=path, reply=reply, body=body, patience_s=patience_s)
        return await self.client.call(call)


def _part(name: str) -> str:
    """A name as one part of a path: it comes from the other side."""
    return quote(name, safe="")
