"""Volunteers over real sockets that hand in numbers instead of training, and remember every answer.

They never give up on a request: each is retried with the same ids until there is a reply, whatever
happens to the coordinator meanwhile. The replies are the evidence that `losses` holds against the
database.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import msgspec
import numpy as np

from coordinator.database.tables.contributions import contributions as contributions_table
from coordinator.http.app import Coordinator
from shared.decoding import decode
from shared.protocol.accounts import Me, RegisterReply
from shared.protocol.contributions import SubmitRequest, UploadInfo, Verdict
from shared.protocol.leases import BeginReply, ClaimReply, Lease
from shared.protocol.limits import API
from shared.tensors.codec import codec
from shared.tensors.spec import Schema

T = TypeVar("T")

AGAIN_S = 0.01  # before the next try while nobody listens
ANSWER_S = 900.0  # no coordinator may be away for longer, whatever else its machine does
GONE = 410  # to a lease that was given back and is somebody else's by now
GOOD = ("accepted", "merged", "superseded")


class Named(Protocol):
    """Volunteer with an account."""

    @property
    def name(self) -> str: ...

    @property
    def volunteer_id(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Held:
    """Lease from the reply to a claim to the request that ends it: no other worker may hold it."""

    task: int
    attempt: int
    worker: str
    since: int
    until: int


@dataclass
class Diary:
    """Every reply to a volunteer, in one order, which diaries of several processes share."""

    answers: int = 0
    leases: list[Held] = field(default_factory=list)
    verdicts: list[tuple[Named, Verdict]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def now(self) -> int:
        return time.monotonic_ns()

    async def more(self, count: int) -> None:
        """Wait for so many more answers."""
        until = self.answers + count
        async with asyncio.timeout(ANSWER_S):
            while self.answers < until:
                self.answered.clear()
                await self.answered.wait()

    async def judged(self, count: int) -> None:
        """Wait for so many more verdicts."""
        until = len(self.verdicts) + count
        async with asyncio.timeout(ANSWER_S):
            while len(self.verdicts) < until:
                await self.more(1)


class Numbers:
    """One worker that makes up its updates, the same ones for the same task and attempt."""

    def __init__(self, url: str, name: str, schema: Schema, diary: Diary, scratch: Path) -> None:
        self.name = name
        self.diary = diary
        self.stopping = False
        self.wait_s = 1.0  # of a claim
        self.pieces = 2  # of an upload
        self._trouble = ""  # why the last try had no answer
        self._rng = random.Random(name)
        self._schema = schema
        self._scratch = scratch
        self._ids = 0
        self.volunteer_id, self.worker_id = self._id(), self._id()
        self._secret = self._id() + self._id()
        token = f"Bearer {self.worker_id}.{self._secret}"
        self.http = httpx.AsyncClient(
            base_url=url + API, headers={"Authorization": token}, timeout=ANSWER_S
        )

    def _id(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"

    async def ask(
        self, method: str, path: str, kind: type[T], *, done: int = 0, **content: Any
    ) -> T | None:
        """Send a request until there is a reply; return None if it was refused.

        A refusal goes into the diary. The status `done` is no refusal of a request that was sent
        before: it was obeyed, and the reply lost.
        """
        loop = asyncio.get_running_loop()
        until, tries = loop.time() + ANSWER_S, 1
        while (reply := await self._try(method, path, **content)) is None:
            assert loop.time() < until, f"{method} {path} had no answer: {self._trouble}"
            await asyncio.sleep(AGAIN_S)
            tries += 1
        self.diary.answers += 1
        self.diary.answered.set()
        if reply.status_code >= 400:
            if tries == 1 or reply.status_code != done:
                self.diary.refusals.append(f"{method} {path}: {reply.status_code} {reply.text}")
            return None
        return decode(reply.content, kind) if reply.content else None

    async def _try(self, method: str, path: str, **content: Any) -> httpx.Response | None:
        """Return the response; None while the coordinator is away or unavailable."""
        try:
            reply = await self.http.request(method, path, **content)
        except httpx.TransportError as error:
            self._trouble = repr(error)
            return None
        self._trouble = reply.text
        return reply if reply.status_code != 503 else None

    async def post(self, path: str, kind: type[T], body: Any, *, done: int = 0) -> T | None:
        return await self.ask("POST", path, kind, done=done, content=msgspec.json.encode(body))

    async def join(self) -> None:
        """Register the worker."""
        body = {
            "volunteer_id": self.volunteer_id,
            "worker_id": self.worker_id,
            "secret": self._secret,
            "nickname": self.name,
            "workloads": ["gpt"],
        }
        assert await self.post("/workers/register", RegisterReply, body)

    async def work(self) -> None:
        """Do task after task until `stopping`."""
        while not self.stopping:
            lease = await self._claim()
            if lease is None:
                continue
            since, dice = self.diary.now(), self._rng.random()
            path = f"/tasks/{lease.task}"
            begun = await self.post(f"{path}/begin", BeginReply, {"attempt": lease.attempt})
            if begun is None:
                continue
            if dice < 0.1:
                self._let_go(lease, since)
                given_back = {"attempt": lease.attempt}
                await self.post(f"{path}/release", type(None), given_back, done=GONE)
                continue
            data = self._update(lease, broken=dice > 0.95)
            if not await self._upload(lease, data):
                continue
            self._let_go(lease, since)
            verdict = await self.post(f"{path}/submit", Verdict, submission(lease, begun, data))
            if verdict is not None:
                self.diary.verdicts.append((self, verdict))
                self.diary.answered.set()

    def _let_go(self, lease: Lease, since: int) -> None:
        """Note that the request is about to be sent: another worker may hold the task now."""
        ended = self.diary.now()
        self.diary.leases.append(
            Held(
                task=lease.task,
                attempt=lease.attempt,
                worker=self.name,
                since=since,
                until=ended,
            )
        )

    async def _claim(self) -> Lease | None:
        body = {"claim_id": self._id(), "wait_s": self.wait_s, "codecs": ["float32"]}
        reply = await self.post("/claims", ClaimReply, body)
        return None if reply is None else reply.lease

    def _update(self, lease: Lease, broken: bool = False) -> bytes:
        rng = np.random.default_rng((lease.task, lease.attempt))
        tensors = {
            s.name: (rng.standard_normal(s.shape) * 1e-3).astype(np.float32) for s in self._schema
        }
        path = self._scratch / self.worker_id
        codec("float32").encode(tensors, self._schema, path)
        data = path.read_bytes()
        return data[:-4] if broken else data  # cut short: refused, and nobody is blamed for it

    async def _upload(self, lease: Lease, data: bytes) -> bool:
        body = {
            "task": lease.task,
            "attempt": lease.attempt,
            "part": 0,
            "tries": 0,
            "sha256": hashlib.sha256(data).hexdigest(),
            "size": len(data),
        }
        info = await self.post("/uploads", UploadInfo, body)
        while info is not None and not info.complete:
            info = await self._put(info, data, body)
        return info is not None

    async def _put(self, info: UploadInfo, data: bytes, body: Any) -> UploadInfo | None:
        """Send a piece; ask for the offset after a loss."""
        piece = data[info.offset :][: len(data) // self.pieces + 1]
        headers = {"Upload-Offset": str(info.offset)}
        try:
            reply = await self.http.put(
                f"/uploads/{info.upload_id}", content=piece, headers=headers
            )
        except httpx.TransportError:
            return await self.post("/uploads", UploadInfo, body)
        if reply.status_code in (409, 503):
            return await self.post("/uploads", UploadInfo, body)
        assert reply.status_code == 200, reply.text
        return decode(reply.content, UploadInfo)

    async def me(self) -> Me:
        found = await self.ask("GET", "/workers/me", Me)
        assert found is not None
        return found


def submission(lease: Lease, begun: BeginReply, data: bytes) -> SubmitRequest:
    """Return the request that submits an update."""
    return SubmitRequest(
        attempt=lease.attempt,
        base_version=begun.version,
        codec=lease.grant.codec,
        sha256=hashlib.sha256(data).hexdigest(),
        size=len(data),
        steps=lease.job.steps,
        samples=lease.job.stop - lease.job.start,
        loss_first=5.0,
        loss_last=4.9,
        train_s=0.1,
    )


def overlaps(leases: Sequence[Held]) -> list[str]:
    """Tasks that two held at one time, or one attempt that two were given."""
    found, by_task = [], defaultdict(list)
    for held in leases:
        by_task[held.task].append(held)
    for task, several in by_task.items():
        several.sort(key=lambda held: held.since)
        for one, other in itertools.pairwise(several):
            if other.since < one.until or other.attempt <= one.attempt:
                found.append(f"task {task}: {one} and {other}")
    return found


async def losses(coordinator: Coordinator, diary: Diary, volunteers: Sequence[Named]) -> list[str]:
    """Return the replies that hold no longer, and every invariant that is broken."""
    rows = await coordinator.db.read(
        lambda conn: list(conn.execute(contributions_table.select()).mappings())
    )
    by_id = {row["id"]: row for row in rows}
    found = overlaps(diary.leases) + diary.refusals
    for who, verdict in diary.verdicts:
        row = by_id.get(verdict.contribution)
        if row is None:
            found.append(f"{who.name}'s contribution {verdict.contribution} is lost")
        elif verdict.state in GOOD and row["state"] not in GOOD:
            found.append(f"contribution {row['id']} was {verdict.state} and is {row['state']}")
        elif verdict.state == "rejected" and (row["state"], row["reason"]) != (
            "rejected",
            verdict.reason,
        ):
            found.append(f"contribution {row['id']} was rejected and is {row['state']}")
    told = [verdict.contribution for _, verdict in diary.verdicts]
    if len(set(told)) != len(told):
        found.append("two results got one contribution")
    found += [f"{row['id']} hangs in checking" for row in rows if row["state"] == "checking"]
    worths = Counter[str]()
    for row in rows:
        worths[row["volunteer_id"]] += row["price_micro"] if row["state"] in GOOD else 0
    for who in volunteers:
        worth = worths[who.volunteer_id]
        balances = await coordinator.ledger.balances(who.volunteer_id)
        if balances.pending_micro + balances.escrow_micro + balances.earned_micro != worth:
            found.append(f"{who.name} has {balances}, for work worth {worth}")
    found += await coordinator.ledger.check()
    found += (await coordinator.checks.run()).breaches
    return found
