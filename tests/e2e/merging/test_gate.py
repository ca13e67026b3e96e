"""The gate of a run: no version is published whose loss exploded."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Connection, select

from coordinator.database.tables.contributions import contributions
from coordinator.database.tables.versions import evaluations
from tests.support.local_coordinator import RUN, LocalCoordinator, local_coordinator

# The norm of an update is no reason to refuse or clip it here: only the measured loss is.
LAX = """
[train]
lr = 10.0
[validation]
norm_room = 1e6
"""


async def hand_in(home: LocalCoordinator, seed: int, scale: float) -> None:
    worker = await home.join(f"Worker {seed}")
    lease = await worker.claim()
    begun = await worker.begin(lease)
    data = await worker.update("tiny", seed, scale)
    await worker.upload(lease, data)
    said = worker.submission(lease, begun, data)
    reply = await worker.post(f"/tasks/{lease.task}/submit", said)
    assert reply.json()["state"] == "accepted", reply.text


async def states(home: LocalCoordinator) -> list[str]:
    query = select(contributions.c.state).order_by(contributions.c.id)
    return [row[0] for row in await home.coordinator.db.read(lambda c: c.execute(query).all())]


def losses(conn: Connection) -> list[float]:
    """Return the measured losses by version."""
    query = select(evaluations.c.loss).order_by(evaluations.c.version)
    return [float(row[0]) for row in conn.execute(query)]


@pytest.mark.parametrize("gate", [True, False])
async def test_an_update_that_ruins_the_model_is_set_aside_before_anything_is_published(
    tmp_path: Path, gate: bool
) -> None:
    text = RUN.replace("quorum = 2", "quorum = 3") + LAX
    async with local_coordinator(tmp_path) as home:
        await home.start_run(f"{text}[evaluation]\ngate = {str(gate).lower()}\n")
        assert await home.coordinator.evaluation.evaluate_next()  # version 0: about 5.7
        for seed, scale in ((1, 0.01), (2, 30.0), (3, 0.01)):
            await hand_in(home, seed, scale)
        for _ in range(3):  # the second failure finds out whose content it is
            await home.coordinator.merger.merge_if_due(1)
        ruined = ["merged", "rejected", "merged"] if gate else ["merged"] * 3
        assert await states(home) == ruined
        assert await home.coordinator.evaluation.evaluate_next()
        before, after = await home.coordinator.db.read(losses)
        assert before < 6.0
        assert after < 1.5 * before if gate else after > 100.0
