"""A hostile minority in an open run: what its updates, as large as they are let through, do to the
model under the rule that such a run has by default.
"""

from __future__ import annotations

import secrets
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.admin import runs as admin
from coordinator.admin.command import NameRequest
from coordinator.database import runs, versions
from coordinator.runs.definition import Definition, definition
from shared.protocol.contributions import Verdict
from shared.tensors.codec import codec
from shared.tensors.frame import open_frame
from tests.support.local_coordinator import LocalCoordinator, Worker, decode, local_coordinator

OPEN = {"open": True, "proof_of_work_bits": 1}
PLAIN = """
name = "tiny"
workload = "gpt"
dataset = "sums"
[model]
block_size = 8
n_layer = 1
n_head = 1
n_embd = 8
dropout = 0.0
shared_momentum = false
[task]
local_steps = 2
batch_size = 2
min_steps = 1
"""
BY_INVITATION = """
[plan]
aggregate = "mean"
[validation]
norm_room = 2.0
clip_until = 1.0
"""
NORM = 0.03  # of an honest update
Update = NDArray[np.float32]


def honest(size: int, seed: int) -> Update:
    """A direction that all have in common, and as much of its own."""
    common = np.random.default_rng(0).normal(size=size)
    own = np.random.default_rng(seed).normal(size=size)
    found = common + own
    return (NORM * found / np.linalg.norm(found)).astype(np.float32)


async def submit(worker: Worker, factor: float, seed: int) -> Verdict:
    lease = await worker.claim()
    begun = await worker.begin(lease)
    about = await about_of(worker.house, lease.job.run)
    flat = np.float32(factor) * honest(about.parameters, seed)
    tensors, at = {}, 0
    for spec in about.schema:
        tensors[spec.name] = flat[at : at + spec.count].reshape(spec.shape)
        at += spec.count
    path = worker.house.coordinator.blobs.scratch() / f"made-{secrets.token_hex(4)}"
    codec(lease.grant.codec).encode(tensors, about.schema, path)
    data = path.read_bytes()
    await worker.upload(lease, data)
    said = worker.submission(lease, begun, data)
    return decode(await worker.post(f"/tasks/{lease.task}/submit", said), Verdict)


async def about_of(home: LocalCoordinator, run: str) -> Definition:
    return definition(await home.coordinator.db.read(lambda conn: runs.by_name(conn, run)))


async def weights(home: LocalCoordinator, number: int) -> NDArray[np.float64]:
    row = await home.coordinator.db.read(lambda conn: versions.get(conn, 1, number))
    path = await home.coordinator.blobs.local(row.master_sha256)
    about = await about_of(home, "tiny")
    with open_frame(path, about.schema) as frame:
        parts = [np.ravel(frame.array(spec.name)) for spec in about.schema]
    return np.concatenate(parts).astype(np.float64)


async def moved(tmp_path: Path, text: str) -> tuple[float, float]:
    """Merge ten updates of whom four are flipped and 2.9 times as large: the cosine of what the
    model moved to the common direction, and by how much.
    """
    async with local_coordinator(tmp_path / "coordinator", **OPEN) as home:
        await home.start_run(text)
        workers = [await home.stranger(f"worker-{number}") for number in range(10)]
        for number in range(10):  # they have passed checks so far
            await home.coordinator.volunteers.vouch(f"worker-{number}")
        for number, worker in enumerate(workers):
            factor = -2.9 if number in (1, 3, 6, 8) else 1.0
            verdict = await submit(worker, factor, seed=number + 1)
            assert verdict.state == "accepted", verdict.message
        assert await home.coordinator.merger.merge_if_due(1)
        step = await weights(home, 0) - await weights(home, 1)
    common = np.random.default_rng(0).normal(size=len(step))
    size = float(np.linalg.norm(step))
    return float(step @ common) / size / float(np.linalg.norm(common)), size


async def test_a_sign_flip_at_nearly_three_times_honest_size_moves_the_model_little(
    tmp_path: Path,
) -> None:
    cosine, size = await moved(tmp_path, PLAIN)
    assert cosine > 0.7
    assert size > 0.3 * NORM


async def test_the_defaults_by_invitation_are_turned_round_by_it(tmp_path: Path) -> None:
    cosine, _ = await moved(tmp_path, PLAIN + BY_INVITATION)
    assert cosine < -0.5


async def test_the_rule_is_settled_when_the_run_is_made_and_shown(tmp_path: Path) -> None:
    async with local_coordinator(tmp_path / "coordinator", **OPEN) as home:
        shown = await admin.show.run(
            home.coordinator, NameRequest(name=await home.start_run(PLAIN))
        )
        assert shown.rule == "centred-clip from 5 contributions on, mean of fewer"
        assert shown.gate


@pytest.mark.parametrize("said", ["yes", "no"])
async def test_a_command_knows_what_the_last_server_was(tmp_path: Path, said: str) -> None:
    """`run create` beside a server, or after it, is another process with settings of its own."""
    from coordinator.accounts.server_identity import ServerAddress

    async with local_coordinator(tmp_path / "coordinator", open=said == "yes") as home:
        await home.coordinator.server.set_address(ServerAddress(url="http://127.0.0.1:1"))
    async with local_coordinator(tmp_path / "coordinator") as home:
        shown = await admin.show.run(
            home.coordinator, NameRequest(name=await home.start_run(PLAIN))
        )
        assert shown.gate is (said == "yes")
