"""Each cause of a standstill, put into a real server: every surface names it within 40 s, and stops
naming it within 40 s of its end.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, insert, update

from coordinator.database import runs
from coordinator.database.monitoring import replicas
from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.experience import chunks
from coordinator.rules.overview import ReplicaFigures
from coordinator.rules.standing import REST_MAX_S
from coordinator.rules.standstill_causes import HANDLING
from coordinator.services import opened
from coordinator.top.tables import lines
from shared.protocol.base import Cause, Reason
from shared.protocol.heartbeat import HeartbeatReply, HeartbeatRequest, RunBeat
from shared.protocol.leases import ClaimReply, ReleaseRequest
from shared.protocol.limits import API
from shared.protocol.members import MemberData
from tests.support import rollouts_run
from tests.support.failpoints import fail, faults
from tests.support.local_coordinator import (
    RUN,
    LocalCoordinator,
    Worker,
    decode,
    local_coordinator,
)
from tests.support.members import contribute, declare
from tests.support.virtual_clock import VirtualClock
from tests.support.workplaces import workplace
from volunteer.agent.run_watcher import RunWatcher, merging_words
from volunteer.control.status import PauseStatus, Status
from volunteer.headless import status_lines

STEP_S, MOST_S = 5.0, 40.0
SMALL = {"hardware": {"devices": [{"id": "cpu", "kind": "cpu", "name": "Atom", "memory_bytes": 1}]}}


# A machine at work hears nothing of nobody being here.
PAUSED = Status(pauses=(PauseStatus(device="", by="you", message="", until=""),))


class Headless:
    """A volunteer without a screen: the last line that it has printed about its run."""

    def __init__(self) -> None:
        self._line = ""
        memory = SimpleNamespace(memory=SimpleNamespace(show_name=None, read=()))
        bus: Any = SimpleNamespace(
            emit=lambda event: None,
            status=PAUSED,
            notice=self._print,
        )
        judge: Any = SimpleNamespace(apply=lambda news, me, until: None)
        place = workplace(VirtualClock(), store={"home": memory}, bus=bus)
        self._watcher = RunWatcher(place=place, verdicts=judge)

    def _print(self, message: object, level: str = "info") -> None:
        self._line = str(message)

    def hears(self, beat: RunBeat) -> str:
        """Return the last printed line, with the beat heard."""
        self._watcher.apply_heartbeat(HeartbeatReply(now=0.0, next_s=30.0, runs=(beat,)))
        return self._line


@dataclass
class Scene:
    """A coordinator with one run, and machines that are kept alive."""

    home: LocalCoordinator
    run: str
    machines: list[Worker] = field(default_factory=list)
    headless: Headless = field(default_factory=lambda: Headless())

    async def join(self, name: str, **more: Any) -> Worker:
        machine = await self.home.join(name, **more)
        self.machines.append(machine)
        return machine

    async def write(self, change: Callable[[Connection], object]) -> None:
        await self.home.coordinator.db.write(change)

    async def beat(self, seconds: float) -> None:
        """Let time pass, with the heartbeats of the machines and of the server."""
        coordinator, now = self.home.coordinator, self.home.clock.now
        for _ in range(int(seconds / STEP_S)):
            await self.home.clock.advance(STEP_S)
            figures = ReplicaFigures(where="http://this", closed=coordinator.space.why)
            await self.write(partial(replicas.beat, replica_id="this", figures=figures, now=now()))
            for machine in self.machines:
                coordinator.renewals.note_alive(machine.worker_id)
            await coordinator.renewals.flush()

    async def surfaces(self) -> dict[str, str]:
        """Return what each surface says."""
        home, coordinator = self.home, self.home.coordinator
        seen = await coordinator.overviews.get()
        shown = await home.admin.post("/api/v1/admin/run.show", json={"name": self.run})
        beat = await self.heard()
        return {
            "status and top": "\n".join(lines(seen)),
            "top at 80 columns": " ".join(" ".join(lines(seen, 80)).split()),
            "run show": str(shown.json()["run"]["standstill"]),
            "page": (await home.client().get(f"/runs/{self.run}")).text,
            "home page": (await home.client().get("/")).text,
            "figures": (await home.client().get("/figures.json")).text,
            "metrics": (await home.client().get("/metrics")).text,
            "--no-ui": self.headless.hears(beat),
            "app": str(merging_words(beat)),
            "volunteer status": "\n".join(status_lines(Status(beats=(beat,)))),
        }

    async def heard(self) -> RunBeat:
        """Return the run's part of a heartbeat reply."""
        if not self.machines:  # somebody who only looks
            answers = await self.home.coordinator.run_queries.beats()
            return next(beat for beat in answers if beat.run == self.run)
        reply = await self.machines[0].post("/workers/heartbeat", HeartbeatRequest())
        beats = decode(reply, HeartbeatReply).runs
        return next(beat for beat in beats if beat.run == self.run)

    async def alerts(self) -> list[str]:
        await self.home.coordinator.alerts.look()
        return [alert.message for alert in await self.home.coordinator.alerts.list()]


Act = Callable[[Scene], Awaitable[Any]]


@dataclass(frozen=True)
class Case:
    """Cause of a standstill: how it begins and ends, and words that every surface must say."""

    cause: Cause
    begin: Act
    end: Act
    words: str
    settings: dict[str, Any] = field(default_factory=dict)
    text: str = RUN


async def nothing(_: Scene) -> None:
    pass


async def two_machines(scene: Scene) -> None:
    for name in ("Ann", "Bob"):
        await scene.join(name)


async def one_works(scene: Scene) -> None:
    await (await scene.join("Eve")).work(77)


# --- how each begins and ends ---


async def pause(scene: Scene) -> None:
    await two_machines(scene)
    await scene.home.coordinator.runs.pause(scene.run, "the data is renewed")


async def resume(scene: Scene) -> None:
    await scene.home.coordinator.runs.resume(scene.run)


async def pauses_itself(scene: Scene) -> None:
    await two_machines(scene)
    change = runs.StateChange(at=scene.home.clock.now(), actor="run", reason="the loss is NaN")
    await scene.write(lambda conn: runs.move(conn, runs.by_name(conn, scene.run), "paused", change))


async def disk_fills(scene: Scene) -> None:
    await two_machines(scene)
    space = scene.home.coordinator.space
    space.floor_bytes, space._free = 1 << 20, lambda _: 1 << 10
    space.look()


async def disk_empties(scene: Scene) -> None:
    space = scene.home.coordinator.space
    space._free = lambda _: 1 << 40
    space.look()


async def store_goes_away(scene: Scene) -> None:
    await two_machines(scene)
    scratch = scene.home.coordinator.blobs.scratch()
    scratch.rename(scratch.with_name("away"))
    scene.home.coordinator.space.look()


async def store_comes_back(scene: Scene) -> None:
    scratch = scene.home.coordinator.blobs.scratch()
    scratch.with_name("away").rename(scratch)
    scene.home.coordinator.space.look()


async def merge_fails(scene: Scene) -> None:
    await two_machines(scene)
    for seed, machine in enumerate(scene.machines):
        assert (await machine.work(seed)).state == "accepted"
    broken = fail(OSError(errno.EIO, "input/output error")).before("put_file")
    with faults(broken).installed():
        assert not await scene.home.coordinator.merger.merge_if_due(1)


async def merges(scene: Scene) -> None:
    assert await scene.home.coordinator.merger.merge_if_due(1)


async def both_work(scene: Scene) -> None:
    await two_machines(scene)
    for seed, machine in enumerate(scene.machines):
        assert (await machine.work(seed)).state == "accepted"


async def tasks_fail(scene: Scene) -> None:
    for name in ("Ann", "Bob", "Cid"):
        machine = await scene.join(name)
        lease = await machine.claim()
        report = ReleaseRequest(attempt=lease.attempt, failed=True, reason="warm_size is below 3")
        reply = await machine.post(f"/tasks/{lease.task}/release", report)
        assert reply.status_code < 300, reply.text


async def work_is_refused(scene: Scene) -> None:
    for seed, name in enumerate(("Ann", "Bob", "Cid")):
        assert (await (await scene.join(name)).work(seed)).state == "accepted"
    refusal = {"state": "rejected", "reason": "norm", "message": "the update is far too large"}
    await scene.write(lambda conn: conn.execute(update(contributions).values(**refusal)))


def chunk(number: int, at: float, samples: int) -> dict[str, Any]:
    return {
        "run_id": 1, "number": number, "sha256": f"{number:064x}", "size": 1, "episodes": 40,
        "samples": samples, "sealed_at": at, "retired_at": None,
    }  # fmt: skip


async def nothing_teaches(scene: Scene) -> None:
    await scene.join("Ann", workloads=["rollouts"])
    now = scene.home.clock.now()
    rows = [chunk(number, now, 0) for number in range(3)]
    await scene.write(lambda conn: conn.execute(insert(chunks), rows))


async def something_teaches(scene: Scene) -> None:
    row = chunk(3, scene.home.clock.now(), 640)
    await scene.write(lambda conn: conn.execute(insert(chunks), [row]))


async def small_machine_joins(scene: Scene) -> None:
    await scene.join("Ann", **SMALL)


async def large_machine_joins(scene: Scene) -> None:
    await scene.join("Bob")


async def updates_lack_proof(scene: Scene) -> None:
    await both_work(scene)
    await scene.write(lambda conn: conn.execute(update(contributions).values(unproven=True)))


async def proofs_pass(scene: Scene) -> None:
    await scene.write(lambda conn: conn.execute(update(contributions).values(unproven=False)))
    await merges(scene)


async def long_work(scene: Scene) -> None:
    await two_machines(scene)
    await scene.machines[0].claim()
    await scene.beat(65.0)


async def version_comes(scene: Scene) -> None:
    for seed, machine in enumerate(scene.machines):
        lease = await machine.claim()
        await machine.hand_in(lease, await machine.begin(lease), seed)
    await merges(scene)


async def data_comes(scene: Scene) -> None:
    numbers = msgspec.json.encode(MemberData(samples=50, items=400))
    [machine, _] = scene.machines
    reply = await machine.http.put(f"{API}/runs/{scene.run}/data", content=numbers)
    assert reply.status_code == 204, reply.text


async def one_member_works(scene: Scene) -> None:
    await two_machines(scene)
    for machine in scene.machines:
        await declare(machine, 50)
    await contribute(scene.machines[0], 1)
    await scene.beat(65.0)


async def company_comes(scene: Scene) -> None:
    await contribute(scene.machines[1], 2)
    await merges(scene)


NOBODY_S = 95.0  # a machine that was killed counts as here for so long
CASES = (
    Case(Cause.PAUSED, pause, resume, "the data is renewed"),
    Case(Cause.AT_FAULT, pauses_itself, resume, "it paused itself: the loss is NaN"),
    Case(Cause.CLOSED, disk_fills, disk_empties, "accepts nothing new: 1.02 kB are free"),
    Case(Cause.CLOSED, store_goes_away, store_comes_back, "cannot be written"),
    Case(Cause.MERGE_FAILS, merge_fails, merges, "the merge to version 1 fails"),
    Case(Cause.FAILING, tasks_fail, one_works, "3 tasks failed, on 3 machines: warm_size is below"),
    Case(Cause.REFUSED, work_is_refused, one_works, "were refused: the update is far too large"),
    Case(
        Cause.NOTHING_TEACHES,
        nothing_teaches,
        something_teaches,
        "nothing teaches: 0.0% of the 120 newest problems",
        text=rollouts_run.RUN,
    ),
    Case(Cause.NO_FIT, small_machine_joins, large_machine_joins, "the machine here does not fit"),
    Case(Cause.NOBODY, nothing, two_machines, "nobody is here"),
    Case(
        Cause.NO_DATA,
        two_machines,
        data_comes,
        "nobody with data for it is here, of 2 machines online",
        text=f'{RUN}[data]\nat = "members"\n',
    ),
    Case(Cause.PROOF, updates_lack_proof, proofs_pass, "2 contributions wait for proof"),
    Case(Cause.MERGE_DUE, both_work, merges, "its merge is due since"),
    Case(
        Cause.COMPANY,
        one_member_works,
        company_comes,
        "its merge waits for an update of another member",
        settings={"alert_stalled_s": 60.0},
        text=RUN.replace("quorum = 2", "quorum = 2\nmin_contributions = 2")
        + '[data]\nat = "members"\n',
    ),
    Case(
        Cause.STALLED,
        long_work,
        version_comes,
        "no version for",
        settings={"alert_stalled_s": 60.0},
    ),
)


async def names(scene: Scene, case: Case) -> set[str]:
    """Return the surfaces that name the cause."""
    said = await scene.surfaces()
    label = f'coordinator_run_standstill{{cause="{case.cause}",run="{scene.run}"}} 1'
    codes = {
        "metrics": label,
        "figures": f'"standstill":"{case.cause}"',
        "run show": case.words,
        "home page": case.words,
    }
    if case.cause == Cause.PAUSED:  # the page says it in words of its own, with the date
        codes |= {"page": "the organiser paused this run", "home page": "paused"}
        codes |= {"status and top": "paused", "top at 80 columns": "paused"}
    return {surface for surface, text in said.items() if codes.get(surface, case.words) in text}


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{case.cause}-{case.begin.__name__}" for case in CASES]
)
async def test_every_surface_names_the_cause_and_stops_naming_it(
    case: Case, tmp_path: Path
) -> None:
    settings = {"metrics": "public", "public_page": True, **case.settings}
    async with local_coordinator(tmp_path, **settings) as home:
        scene = Scene(home, await started(home, case.text))
        now = home.clock.now()
        await scene.write(lambda conn: replicas.begin(conn, "this", "here", now))
        await case.begin(scene)
        await scene.beat(MOST_S if case.cause != Cause.MERGE_DUE else 60.0 + MOST_S)
        surfaces = set(await scene.surfaces())
        assert await names(scene, case) == surfaces
        if HANDLING[case.cause].patience_s == 0.0:
            assert any(case.words in message for message in await scene.alerts())
        await case.end(scene)
        await scene.beat(MOST_S)
        assert await names(scene, case) == set()
        assert not any(case.words in message for message in await scene.alerts())


async def started(home: LocalCoordinator, text: str) -> str:
    if 'workload = "gpt"' in text:
        return await home.start_run(text)
    run = await home.coordinator.runs.create(text)
    await home.coordinator.runs.start(run.name)
    return run.name


async def test_a_command_beside_a_server_that_ended_says_so(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run, settings = await home.start_run(), home.coordinator.settings
    async with opened(settings) as coordinator:
        info = await coordinator.run_queries.info(run)
    assert info.standstill is not None
    assert info.standstill.cause == Cause.NO_SERVER


def test_each_cause_is_provoked() -> None:
    assert {case.cause for case in CASES} | {Cause.NO_SERVER} == set(Cause)


async def test_a_machine_rests_for_the_run_whose_tasks_it_failed_alone(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        await home.start_run()
        await home.coordinator.runs.pause("tiny")
        boom = await home.coordinator.runs.create(RUN.replace('"tiny"', '"boom"'))
        await home.coordinator.runs.start(boom.name)
        bob = await home.join("Bob")

        async def fails() -> str:
            body = {"claim_id": secrets.token_hex(16), "wait_s": 0.0, "codecs": ["float32"]}
            reply = decode(await bob.post("/claims", body), ClaimReply)
            if reply.lease is None:
                assert reply.idle is not None
                return reply.idle.message
            lease = reply.lease
            report = ReleaseRequest(attempt=lease.attempt, failed=True, reason="NaN")
            assert (await bob.post(f"/tasks/{lease.task}/release", report)).status_code < 300
            return ""

        said = [await fails() for _ in range(6)]
        assert said[:4] == [""] * 4
        assert 'gave back tasks of "boom" as failed' in said[-1]
        await home.coordinator.runs.resume("tiny")
        assert (await bob.work()).state == "accepted"
        await home.coordinator.runs.pause("tiny")
        assert 'gave back tasks of "boom" as failed' in await fails()
        await home.clock.advance(REST_MAX_S)
        assert await fails() == ""


async def test_a_machine_hears_why_the_only_run_is_paused(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path) as home:
        run, mia = await home.start_run(), await home.join("Mia")
        await home.coordinator.runs.pause(run, "the data is renewed")
        for chosen in ([], [run]):
            body = {"claim_id": secrets.token_hex(16), "wait_s": 0.0, "runs": chosen}
            idle = decode(await mia.post("/claims", body), ClaimReply).idle
            assert idle is not None
            assert idle.reason == Reason.RUN_PAUSED
            assert idle.message == (
                f'"{run}" does not go on: paused by its organiser: the data is renewed'
            )
