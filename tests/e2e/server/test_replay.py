"""Every stored task, done again from the database and the blob store alone, gives the same bytes:
its worker's and those of any other replay.

One run for each workload and preset, each with one of the codecs. Nothing of a worker is at hand
when its tasks are done again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
from sqlalchemy import Connection, select

from coordinator.checking.case import Case
from coordinator.checking.recompute_comparison import Workbench, update_of
from coordinator.database import contributions, runs, tasks, versions
from coordinator.database.contributions import ContributionRow
from coordinator.database.tables.contributions import contributions as contribution_rows
from coordinator.database.tables.trust import recomputes
from coordinator.database.tasks import TaskRow
from coordinator.plan.plan_tables import Plan
from coordinator.plan.presets import PRESETS
from coordinator.runs.definition import definition
from coordinator.runs.version_files import read_weights
from coordinator.scheduling import lease_message
from shared.errors import InvalidRunFile
from shared.tensors.codec import codec
from shared.workloads.base import DatasetManifest, Job, installed
from shared.workloads.data.local_data import LocalData
from tests.e2e.server.test_recomputes import LEARNING
from tests.e2e.workloads.test_causal_lm import RUN as CAUSAL
from tests.e2e.workloads.test_causal_lm import TRAINED
from tests.e2e.workloads.test_dcgan import RUN as DIGITS
from tests.e2e.workloads.test_dcgan import copied
from tests.support.local_coordinator import LocalCoordinator, local_coordinator
from tests.support.local_volunteer import LocalMachine
from tests.support.rollouts_run import RUN as ROLLOUTS
from tests.support.selfplay_run import RUN as GAMES
from volunteer.control import commands

CODECS = get_args(get_type_hints(Plan)["codec"])
NO_DATA = DatasetManifest(name="", kind="", licence="", source="", chunks=())
LEARNERS = ("gomoku", "rollouts")
RUNS = {
    "gpt": LEARNING.partition("[plan]")[0].replace("{precision}", "float32"),
    "dcgan": DIGITS.partition("[plan]")[0],
    "causal-lm": CAUSAL.partition("[plan]")[0].format(model=TRAINED["lora"]),
    "gomoku": GAMES.replace("simulations = 16", "simulations = 8"),
    "rollouts": ROLLOUTS.replace("warm_steps = 300", "warm_steps = 5"),
}
SHARED = ("gpt with shared momentum", "diloco", "int4")
BRIEF = ("gpt async-sgd", "dcgan fedavg", " ".join(SHARED[:2]))


def test_the_registries_name_nothing_that_is_not_replayed_here() -> None:
    assert set(RUNS) == set(installed()) - {"cnn", "writer"}


def cells() -> Iterator[tuple[str, str, str]]:
    """Return each workload with each preset, the codecs in turn."""
    for index, (workload, preset) in enumerate((w, p) for w in RUNS for p in PRESETS):
        yield workload, preset, CODECS[index % len(CODECS)]
    yield SHARED


def text_of(workload: str, preset: str, codec_name: str) -> str:
    """Return the run file of a cell."""
    head = RUNS[workload.partition(" ")[0]]
    if workload == SHARED[0]:
        head = head.replace("[model]\n", "[model]\nshared_momentum = true\n")
    options = ""
    if "[plan]" in head:  # what follows the plan stays
        head, _, rest = head.partition("[plan]")
        options = "[task.options]" + rest.partition("[task.options]")[2]
    lines = f'[plan]\npreset = "{preset}"\ncodec = "{codec_name}"\n'
    if PRESETS[preset].get("update") == "gradient":  # the server makes the steps
        head = head.replace("lr = 0.01\nwarmup_steps = 0\n", "").replace("lr = 1e-2\n", "")
    return f"{head}{lines}{options}\n[trust]\nrecompute = 1.0\n"


class Replays:
    """The stored tasks of a run, without anything of their workers."""

    def __init__(self, home: LocalCoordinator) -> None:
        self._db, self._blobs = home.coordinator.db, home.coordinator.blobs

    async def updates(self, folder: Path) -> dict[int, tuple[str, list[str]]]:
        """Return, by contribution, the hash of its update and those of two replays."""
        query = select(recomputes.c.contribution_id, recomputes.c.work)
        stored = await self._db.read(
            lambda conn: conn.execute(query.where(recomputes.c.flops > 0)).all()
        )
        return {
            number: await self._update(number, work, folder / str(number))
            for number, work in stored
        }

    async def _update(self, number: int, work: str, path: Path) -> tuple[str, list[str]]:
        def read(conn: Connection) -> tuple[ContributionRow, Case]:
            row = contributions.by_id(conn, number)
            return row, Case.from_stored(conn, work, runs.by_id(conn, row.run_id))

        row, case = await self._db.read(read)
        weights, data = await self._blobs.local(case.base_sha256), await case.data(self._blobs)
        hashes = []
        for _ in range(2):
            bench = Workbench(stop=lambda: False)
            update = await asyncio.to_thread(update_of, bench, case, weights, data)
            schema = definition(case.run).schema
            hashes.append(codec(row.codec).encode(update, schema, path, case.job.seed).sha256)
        return row.sha256, hashes

    async def episodes(self) -> dict[int, tuple[str, list[str]]]:
        """Return, by contribution, hashes of a file of episodes or of a match, and of two replays;
        times are left out.
        """
        kinds = contribution_rows.c.kind.in_(("experience", "evaluation"))
        query = select(contribution_rows.c.id).where(kinds, contribution_rows.c.state == "accepted")
        numbers = await self._db.read(lambda conn: list(conn.execute(query).scalars()))
        return {number: await self._episodes(number) for number in numbers}

    async def _episodes(self, number: int) -> tuple[str, list[str]]:
        def read(conn: Connection) -> tuple[ContributionRow, TaskRow, Job, str]:
            row = contributions.by_id(conn, number)
            task = tasks.holder(conn, row.task_id, for_update=False)
            spec = lease_message.read_spec(conn, row.run_id)
            base = versions.get(conn, row.run_id, row.base_version)
            job = lease_message.job(lease_message.JobBase.at(spec, base), task)
            bound = msgspec.structs.replace(
                job, base_version=base.version, base_sha256=base.published_sha256
            )
            return row, task, bound, base.published_sha256

        row, task, job, base = await self._db.read(read)
        run = await self._db.read(lambda conn: runs.by_id(conn, row.run_id))
        about = definition(run)
        manifest, more = lease_message.own_data(task) or NO_DATA, about.workload.files(job.config)
        refs = (*manifest.chunks, *manifest.assets.values(), *more.values())
        files = {ref.sha256: await self._blobs.local(ref.sha256) for ref in refs}
        data = LocalData(manifest, files, more)
        weights = await self._blobs.local(base)

        def play() -> bytes:
            work = about.workload.begin(job, read_weights(weights, about), data, "cpu")
            while not work.done:
                work.advance()
            return work.result()[0].experience

        replays = [await asyncio.to_thread(play) for _ in range(2)]
        return row.sha256, [hashlib.sha256(replay).hexdigest() for replay in replays]


def covered(conn: Connection) -> bool:
    """Return True if an update was drawn, and episodes were accepted."""
    c = contribution_rows.c
    queries = (
        select(recomputes.c.contribution_id).where(recomputes.c.flops > 0),
        select(c.id).where(c.kind == "experience", c.state == "accepted"),
    )
    return all(conn.execute(query).first() is not None for query in queries)


async def started(home: LocalCoordinator, workload: str, text: str) -> None:
    """Start a run."""
    if workload in ("gpt", "causal-lm", SHARED[0]):
        await home.start_run(text)
        return
    run = await home.coordinator.runs.create(text)
    await home.coordinator.runs.start(run.name)


@pytest.mark.parametrize(
    ("workload", "preset", "codec_name"),
    [
        pytest.param(
            *cell, id=" ".join(cell), marks=[] if " ".join(cell[:2]) in BRIEF else pytest.mark.slow
        )
        for cell in cells()
    ],
)
async def test_a_stored_task_gives_the_same_bytes_whenever_it_is_done(
    tmp_path: Path, workload: str, preset: str, codec_name: str
) -> None:
    async with local_coordinator(tmp_path / "coordinator") as home:
        if workload == "dcgan":
            await home.coordinator.datasets.add(copied)
        text = text_of(workload, preset, codec_name)
        machine = LocalMachine(tmp_path / "machine", home)
        await machine.join("Ann")
        if workload in LEARNERS and PRESETS[preset].get("update") == "gradient":
            with pytest.raises(InvalidRunFile, match="merges gradients, but learners"):
                await started(home, workload, text)
            return
        await started(home, workload, text)
        most = 0 if workload in LEARNERS else 3  # a learner works until it has played too
        async with home.coordinator.working(), machine.working(max_tasks=most) as process:
            if not most:
                async with process.eventually(120):
                    while not await home.coordinator.db.read(covered):
                        await process.tick()
                await process.control.do(commands.Stop(how="finish"))
            assert await process.ended(120) == 0
        replays = Replays(home)
        updates = await replays.updates(tmp_path)
        episodes = await replays.episodes()
        assert updates
        assert bool(episodes) is (workload in LEARNERS)
        for submitted, replayed in (*updates.values(), *episodes.values()):
            assert replayed == [submitted] * 2
