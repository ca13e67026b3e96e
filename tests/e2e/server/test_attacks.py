"""Every attack of the experiments on a run that is open to strangers, each by an account of its own
over HTTP: who sends something else than its task's work earns nothing, and the model goes on.

Honest clients of these checks are in test_recomputes.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from coordinator.database import datasets, runs, versions
from coordinator.runs.definition import Definition, definition
from coordinator.runs.version_files import read_weights
from shared.protocol.contributions import Verdict
from shared.tensors.codec import codec
from shared.tensors.spec import Schema
from shared.workloads.base import Job
from shared.workloads.data.local_data import LocalData
from tests.e2e.server.test_open_run import LEARNING
from tests.e2e.server.test_recomputes import balances, settled
from tests.e2e.workloads.test_dcgan import RUN as DIGITS
from tests.e2e.workloads.test_dcgan import copied
from tests.experiments.digits import Weights
from tests.experiments.trust_attacks import ATTACKS, BUFFERS, Attack, Scene, norm
from tests.support.local_coordinator import LocalCoordinator, Worker, decode, local_coordinator

RUN = (
    LEARNING.replace("min_steps = 1", "min_steps = 1")
    + """
[trust]
recompute = 1.0
"""
)
HONEST = 4  # tasks before the attacks
AGAIN = "own last again"
HOSTILE = [name for name in ATTACKS if name != "copy"]  # of what is honest
CLIPPED = 1.5  # median norms from which an update is scaled down


def worked(scene: Scene) -> Weights:
    """Honest work."""
    return scene.own()


class Client:
    """A volunteer that does its tasks, and sends what an attack makes of them."""

    def __init__(self, worker: Worker, attack: Attack, seen: list[Weights]) -> None:
        self._worker, self._attack, self._seen = worker, attack, seen
        self._last: dict[int, Weights] = {}

    async def work(self) -> Verdict:
        worker, home = self._worker, self._worker.house
        lease = await worker.claim()
        begun = await worker.begin(lease)
        learn = await learner(home, lease.job, begun.version)
        row = await home.coordinator.db.read(lambda conn: runs.by_name(conn, lease.run))
        schema = definition(row).schema
        whole = learn(lease.job)
        update = self._attack(self._scene(lease.job, learn, parameters(schema)))
        self._last.setdefault(0, update)
        path = home.coordinator.blobs.scratch() / secrets.token_hex(4)
        codec(lease.grant.codec).encode({**whole, **update}, schema, path)
        data = path.read_bytes()
        await worker.upload(lease, data)
        said = worker.submission(lease, begun, data)
        reply = await worker.post(f"/tasks/{lease.task}/submit", said)
        return decode(reply, Verdict)

    def _scene(self, job: Job, do: Callable[[Job], Weights], names: Sequence[str]) -> Scene:
        def learn(job: Job) -> Weights:
            made = do(job)
            return {name: made[name] for name in names}

        own, size = learn(job), job.stop - job.start

        def part(steps: int) -> Weights:
            stop = job.start + steps * job.batch_size
            return learn(msgspec.structs.replace(job, steps=steps, stop=stop))

        def elsewhere() -> Weights:
            start = job.stop if job.start < size else job.start - size
            return learn(msgspec.structs.replace(job, start=start, stop=start + size))

        def backdoor() -> Weights:
            door = {name: np.zeros_like(value) for name, value in own.items()}
            widest = max(door, key=lambda name: door[name].size)
            door[widest][-1] = 1.0  # one token, wherever
            return door

        return Scene(
            who=0,
            honest=self._seen[-8:] or [own],
            own=lambda: own,
            part=part,
            elsewhere=elsewhere,
            backdoor=backdoor,
            whole=lambda: do(job),
            merged=self._seen[-1] if self._seen else None,
            limit=CLIPPED * float(np.median([norm(one) for one in self._seen or [own]])),
            steps=job.steps,
            rng=np.random.default_rng(3),
            last=self._last,
        )


async def learner(home: LocalCoordinator, job: Job, version: int) -> Callable[[Job], Weights]:
    """Return what does jobs from a version, as a volunteer does."""

    def read(conn: Any) -> tuple[Any, Any, Any]:
        run = runs.by_name(conn, job.run)
        data = datasets.by_id(conn, run.dataset_id)  # type: ignore[arg-type]
        return run, data.manifest, versions.get(conn, run.id, version)

    run, manifest, base = await home.coordinator.db.read(read)
    about, local = definition(run), home.coordinator.blobs.local
    named = [chunk.sha256 for chunk in (*manifest.chunks, *manifest.assets.values())]
    data = LocalData(manifest, {name: await local(name) for name in named}, {})
    weights = read_weights(await local(base.published_sha256), about)
    return lambda job: learnt(about, job, weights, data)


def parameters(schema: Schema) -> list[str]:
    """The names of what a model learns."""
    return [spec.name for spec in schema if spec.role == "parameter"]


def learnt(
    about: Definition, job: Job, base: Mapping[str, torch.Tensor], data: LocalData
) -> Weights:
    """The update that a job makes, and the buffers as they are then."""
    work = about.workload.begin(job, base, data, "cpu")
    while not work.done:
        work.advance()
    after, names = work.result()[1], set(parameters(about.schema))
    return {
        name: (base[name] - value if name in names else value).numpy()
        for name, value in after.items()
    }


async def loss(home: LocalCoordinator) -> float:
    """The loss of the newest version that was measured."""
    found = await home.coordinator.runs.queries.versions("tiny")
    return max((v.version, v.loss) for v in found if v.loss is not None)[1]


async def account(home: LocalCoordinator, name: str) -> tuple[str, int]:
    """The standing of an account, and all that it was paid or promised."""
    standing, promised, earned = await balances(home, name)
    return standing, promised + earned


@pytest.mark.slow
async def test_no_attack_earns_or_stops_the_model(tmp_path: Path) -> None:
    """Fourteen hostile accounts, each with an attack of its own, beside one honest volunteer."""
    async with local_coordinator(tmp_path / "coordinator", open=True, proof_of_work_bits=1) as home:
        await home.start_run(RUN)
        async with home.coordinator.working():
            seen: list[Weights] = []

            def noted(scene: Scene) -> Weights:
                seen.append(scene.own())
                return scene.own()

            ann = Client(await home.stranger("Ann"), noted, seen)
            await home.coordinator.volunteers.vouch("Ann")
            for _ in range(HONEST):
                assert (await ann.work()).state == "accepted"
            before = await loss(home)
            for name in HOSTILE:
                eve = Client(await home.stranger(f"Eve {HOSTILE.index(name)}"), ATTACKS[name], seen)
                await eve.work()
                if name == AGAIN:  # its first is honest work
                    await eve.work()
            await settled(home)
            ends = {n: await account(home, f"Eve {i}") for i, n in enumerate(HOSTILE)}
            standing, paid = await account(home, "Ann")
            assert standing == "vetted"
            assert paid > 0
            assert ends == dict.fromkeys(HOSTILE, ("suspended", 0))
            assert (await ann.work()).state == "accepted"
            assert await loss(home) < 1.05 * before
        assert await home.coordinator.ledger.check() == ()


async def buffers(home: LocalCoordinator, number: int) -> float:
    """The largest number in the buffers of a version."""

    def read(conn: Any) -> tuple[Any, Any]:
        run = runs.by_name(conn, "digits")
        return run, versions.get(conn, run.id, number)

    run, row = await home.coordinator.db.read(read)
    about = definition(run)
    weights = read_weights(await home.coordinator.blobs.local(row.master_sha256), about)
    names = [spec.name for spec in about.schema if spec.role == "buffer"]
    return max(float(weights[name].abs().max()) for name in names)


async def test_buffers_of_a_hostile_account_move_no_version(tmp_path: Path) -> None:
    """Running means of a million beside honest parameters, by one of three."""
    async with local_coordinator(tmp_path / "coordinator") as home:
        await home.coordinator.datasets.add(copied)
        await home.coordinator.runs.create(DIGITS.replace("quorum = 2", "quorum = 3"))
        await home.coordinator.runs.start("digits")
        for number, attack in enumerate((BUFFERS["buffers"], worked, worked)):
            worker = await home.join(f"worker-{number}", workloads=["dcgan"])
            assert (await Client(worker, attack, []).work()).state == "accepted"
        assert await home.coordinator.merger.merge_if_due(1)
        assert await buffers(home, 1) < 10
