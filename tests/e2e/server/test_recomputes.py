"""Tasks done again: honest work passes, other work ends the account that sent it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
import torch
from sqlalchemy import Connection, select, update
from typing_extensions import override

from coordinator.admin.command import NameRequest
from coordinator.admin.runs import show
from coordinator.checking import recompute_queue as checking
from coordinator.checking.case import Case
from coordinator.checking.recompute_comparison import RecomputeFiles, redo
from coordinator.database import volunteers
from coordinator.database.ledger import payments
from coordinator.database.recomputes import waiting
from coordinator.database.tables.trust import recomputes
from coordinator.rules.draws import Redone
from shared.protocol.contributions import Verdict
from shared.workloads.base import Job, Progress, Result, Work, Workload, load
from shared.workloads.data.local_data import LocalData
from shared.workloads.training.micro_batch import Paced
from tests.e2e.workloads.test_dcgan import PRESETS, RUN, copied
from tests.support.local_coordinator import LocalCoordinator, decode, local_coordinator
from tests.support.local_volunteer import LocalMachine

TASKS = 4
Tensors = Mapping[str, torch.Tensor]
LEARNING = """
name = "tiny"
workload = "gpt"
dataset = "sums"
[model]
block_size = 8
n_layer = 1
n_head = 2
n_embd = 16
dropout = 0.1
[train]
lr = 0.01
warmup_steps = 0
precision = "{precision}"
[task]
local_steps = 8
batch_size = 8
min_steps = 1
[plan]
preset = "{preset}"
codec = "{codec}"
[trust]
recompute = 1.0
"""


def run_file(codec: str = "int8", preset: str = "fedavg", precision: str = "float32") -> str:
    text = LEARNING.format(codec=codec, preset=preset, precision=precision)
    if preset == "fedavg":
        return text.replace("[plan]", "[plan]\nquorum = 1")
    return text.replace("lr = 0.01\nwarmup_steps = 0\n", "")  # the server makes the steps


async def results(home: LocalCoordinator, count: int) -> list[tuple[str, str]]:
    """Return results and sentences of recomputes, once so many are done."""

    def done(conn: Connection) -> list[tuple[str, str]]:
        query = select(recomputes.c.result, recomputes.c.message)
        found = conn.execute(query.where(recomputes.c.state == "done"))
        return [(row[0], row[1]) for row in found]

    async with asyncio.timeout(120):
        while len(found := await home.coordinator.db.read(done)) < count:
            await asyncio.sleep(0.02)
    return found


async def postponed(home: LocalCoordinator) -> tuple[str, ...]:
    """Return why recomputes wait, once one does."""
    async with asyncio.timeout(120):
        while not (found := (await home.coordinator.volunteers.trust()).backlog.reasons):
            await asyncio.sleep(0.02)
    return tuple(why for why, _ in found)


async def settled(home: LocalCoordinator) -> None:
    """Wait until every recompute that was ordered has a result."""
    async with asyncio.timeout(120):
        while await home.coordinator.db.read(waiting):
            await asyncio.sleep(0.02)


async def balances(home: LocalCoordinator, name: str) -> tuple[str, int, int]:
    """Return the standing of a volunteer, what it was promised and what it earned."""
    found = next(p for p in await home.coordinator.volunteers.list() if p.nickname == name)

    def read(conn: Connection) -> tuple[str, int, int]:
        has = payments.balances(conn, found.volunteer_id)
        standing = volunteers.existing(conn, found.volunteer_id).standing
        return standing, has.escrow_micro + has.pending_micro, has.earned_micro

    return await home.coordinator.db.read(read)


@pytest.mark.parametrize(
    ("codec", "preset", "precision"),
    [
        pytest.param("float32", "fedavg", "float32", marks=pytest.mark.slow),
        ("int8", "fedavg", "float32"),
        ("int4", "fedavg", "float32"),
        pytest.param("int8", "fedavg", "bfloat16", marks=pytest.mark.slow),
        pytest.param("int8", "sync-sgd", "float32", marks=pytest.mark.slow),
    ],
)
async def test_honest_work_passes_whatever_its_codec(
    tmp_path: Path, codec: str, preset: str, precision: str
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(run_file(codec, preset, precision))
        async with home.coordinator.working():
            machine = LocalMachine(tmp_path / "machine", home)
            await machine.join("Ann")
            async with machine.working(max_tasks=TASKS - 1) as process:
                assert await process.ended(120) == 0
            async with machine.working(max_tasks=1) as process:  # from files alone
                assert await process.ended(120) == 0
                found = await results(home, TASKS)
        assert {result for result, _ in found} == {"passed"}, found  # every part of a lease
        cost = (await show.run(home.coordinator, NameRequest(name="tiny"))).checks
        assert cost is not None
        assert cost.drawn.passed >= TASKS
        assert cost.checked_s > 0
        assert await home.coordinator.ledger.check() == ()


class Short:
    """Runs out of memory in the turn of the generator, unless the work saves memory."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._advances = 0
        self._saves = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def begin_with(self, micro_batch: int, *, most: bool, room: int) -> None:
        self._saves = most
        assert isinstance(self._work, Paced)
        self._work.begin_with(micro_batch, most=most, room=room)

    def halve(self) -> int:
        self._saves = True
        return self._work.halve()

    def advance(self) -> Progress:
        self._advances += 1
        if self._advances == 2 and not self._saves:
            raise MemoryError("not enough")
        return self._work.advance()


class Lazy:
    """Adds noise of about the length of the update."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def result(self) -> tuple[Result, Mapping[str, torch.Tensor]]:
        report, tensors = self._work.result()
        noise = {name: value + 0.1 * torch.randn_like(value) for name, value in tensors.items()}
        return report, noise


def wrapped(name: str, kind: Callable[[Work], Any]) -> Workload:
    workload = load(name)
    begin: Callable[..., Work] = workload.begin
    workload.begin = lambda *a, **k: kind(begin(*a, **k))  # type: ignore[method-assign]
    return workload


def lazy(name: str) -> Workload:
    """Return a workload whose work is not what was leased."""
    return wrapped(name, Lazy)


def short(name: str) -> Workload:
    """Return a workload that runs out of memory."""
    return wrapped(name, Short)


class Flipped:
    """Hands in the opposite of what a task learnt."""

    def __init__(self, work: Work, job: Job, base: Tensors) -> None:
        self._work, self._job, self._base = work, job, dict(base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def result(self) -> tuple[Result, Tensors]:
        report, tensors = self._work.result()
        learnt = {n: v for n, v in tensors.items() if "running" not in n and "tracked" not in n}
        if self._job.update == "gradient":
            return report, {**tensors, **{n: -v for n, v in learnt.items()}}
        return report, {**tensors, **{n: 2 * self._base[n] - v for n, v in learnt.items()}}


def flipped(name: str) -> Workload:
    workload = load(name)
    begin = workload.begin

    def other(job: Job, weights: Tensors, *more: Any) -> Work:
        return Flipped(begin(job, weights, *more), job, weights)  # type: ignore[return-value]

    workload.begin = other  # type: ignore[method-assign,assignment]
    return workload


async def test_other_work_ends_its_account_and_earns_nothing(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(run_file())
        async with home.coordinator.working():
            machine = LocalMachine(tmp_path / "machine", home)
            await machine.join("Eve")
            async with machine.working(lazy, max_tasks=1) as process:
                await process.ended(120)
                found = await results(home, 1)
        assert found[0][0] == "failed", found
        assert await balances(home, "Eve") == ("suspended", 0, 0)
        assert await home.coordinator.ledger.check() == ()


async def test_work_that_a_merge_overtook_is_checked_like_any_that_is_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise whoever submits at the moment of a merge is paid for anything."""
    async with local_coordinator(tmp_path / "coordinator") as home:
        text = run_file("float32", "gradient-average").replace("[plan]", "[plan]\nquorum = 2")
        await home.start_run(text)
        team = [await home.join(name) for name in ("Eve", "Ann", "Bob")]
        leases = [await worker.claim() for worker in team]
        verdicts = []
        for worker, lease in zip(team, leases, strict=True):
            base, data = await worker.begin(lease), await worker.update("tiny", lease.task)
            await worker.upload(lease, data)
            said = worker.submission(lease, base, data)
            with monkeypatch.context() as patched:
                if worker is team[0]:  # its check lasts until the others are merged
                    patched.setattr(home.coordinator.intake, "_check", AsyncMock())
                reply = await worker.post(f"/tasks/{lease.task}/submit", said)
            verdicts.append(decode(reply, Verdict))
        assert [said.state for said in verdicts] == ["checking", "accepted", "accepted"]
        await home.coordinator.merger.merge_if_due(1)
        await home.coordinator.intake.recheck()
        late = await team[0].verdict(verdicts[0].contribution)
        assert late.state == "superseded"
        async with home.coordinator.working():
            assert {result for result, _ in await results(home, 3)} == {"failed"}
        assert await balances(home, "Eve") == ("suspended", 0, 0)
        assert await home.coordinator.ledger.check() == ()


class NamesAnotherDevice(httpx.AsyncBaseTransport):
    """The way to the coordinator of a volunteer that says its work was done by a GPU."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    @override
    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/submit"):
            said = json.loads(await request.aread()) | {"device": "cuda:0"}
            headers = {k: v for k, v in request.headers.items() if k != "content-length"}
            request = httpx.Request(
                request.method, request.url, headers=headers, content=json.dumps(said).encode()
            )
        return await self._inner.handle_async_request(request)


async def test_the_class_of_a_device_is_that_of_the_lease_whatever_a_result_says(
    tmp_path: Path,
) -> None:
    """Naming another class with the result was a way never to be suspended."""
    async with local_coordinator(tmp_path / "coordinator", open=True, proof_of_work_bits=0) as home:
        await home.start_run(run_file(preset="sync-sgd"))
        home.transport = NamesAnotherDevice(home.transport)
        async with home.coordinator.working():
            machine = LocalMachine(tmp_path / "machine", home)
            await machine.join("Eve")
            async with machine.working(lazy, max_tasks=1) as process:
                await process.ended(240)
                found = await results(home, 1)
        assert "failed" in {result for result, _ in found}, found
        assert await balances(home, "Eve") == ("suspended", 0, 0)


async def test_a_small_task_is_done_while_a_huge_one_waits_at_its_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A jam of huge tasks delays nobody."""
    began, ended = threading.Event(), threading.Event()
    huge = run_file().replace('"tiny"', '"huge"').replace("local_steps = 8", "local_steps = 64")

    def held(
        stop: Callable[[], bool], case: Case, files: RecomputeFiles, data: LocalData
    ) -> Redone:
        while case.job.steps > 8 and not ended.wait(0.01):
            began.set()
            stop()
            turns.append("huge")
        before = len(turns)
        redone = redo(stop, case, files, data)
        if case.job.steps == 8:
            meanwhile.append(len(turns) - before)
        return redone

    turns: list[str] = []
    meanwhile: list[int] = []
    monkeypatch.setattr(checking, "redo", held)
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(run_file())
        await home.coordinator.runs.create(huge)
        await home.coordinator.runs.start("huge")
        async with home.coordinator.working():
            for name, run in (("Jam", "huge"), ("Ann", "tiny")):
                machine = LocalMachine(tmp_path / name, home)
                await machine.join(name)
                async with machine.working(runs=(run,), max_tasks=1) as process:
                    assert await process.ended(120) == 0
                    while not began.is_set():
                        await asyncio.sleep(0.02)
                    if name == "Jam":  # what asks first does not stand first
                        await change(home, drawn_at=recomputes.c.drawn_at + 60.0)
            assert [result for result, _ in await results(home, 1)] == ["passed"]
            assert (await balances(home, "Ann"))[0] != "suspended"
            assert meanwhile[0] <= 1  # the step that was under way
            ended.set()
            assert [result for result, _ in await results(home, 2)] == ["passed"] * 2


async def change(home: LocalCoordinator, **values: Any) -> None:
    """Change the recomputes that have no result yet."""
    query = update(recomputes).where(recomputes.c.state != "done").values(**values)
    await home.coordinator.db.write(lambda conn: conn.execute(query))
    home.coordinator.signals.notify("recomputes")


async def test_a_base_that_is_gone_is_a_reason_to_wait(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.start_run(run_file())
        machine = LocalMachine(tmp_path / "machine", home)
        await machine.join("Ann")
        async with machine.working(max_tasks=1) as process:
            assert await process.ended(120) == 0

        def drawn(conn: Connection) -> str:
            return str(conn.execute(select(recomputes.c.work)).scalar_one())

        work = await home.coordinator.db.read(drawn)
        await home.coordinator.blobs.delete(json.loads(work)["base_sha256"], "asked")
        async with home.coordinator.working():
            backlog = await postponed(home)
        assert "is not in the store" in backlog[0]
        assert (await balances(home, "Ann"))[0] == "vetted"


@pytest.mark.parametrize(
    ("preset", "workload"),
    [
        pytest.param("fedavg", None, marks=pytest.mark.slow),
        ("gradient-average", None),
        pytest.param("fedavg", short, marks=pytest.mark.slow),
    ],
)
async def test_pictures_are_done_again_like_text(
    tmp_path: Path, preset: str, workload: Callable[[str], Workload] | None
) -> None:
    """Also those of a machine that was short of memory: its batches are cut alike."""
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.coordinator.datasets.add(copied)
        text = RUN.replace("[plan]\n", "[plan]\n" + PRESETS[preset])
        await home.coordinator.runs.create(text + "[trust]\nrecompute = 1.0\n")
        await home.coordinator.runs.start("digits")
        async with home.coordinator.working():
            machine = LocalMachine(tmp_path / "machine", home)
            await machine.join("Ann")
            async with machine.working(workload, max_tasks=TASKS) as process:
                assert await process.ended(120) == 0
                found = await results(home, TASKS - 1)  # one may be cancelled by a merge
        assert {result for result, _ in found} == {"passed"}, found
