"""A run whose phase ends by its held-out loss: settled when a version is made, stored with it, and
never taken back.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from coordinator.database import evaluations, runs, versions
from shared.errors import InvalidRunFile
from tests.support.local_coordinator import RUN, LocalCoordinator, local_coordinator

PHASED = RUN.replace(
    "quorum = 2",
    """quorum = 1
phases = [{ until_slope = 0.01, slope_window = 3, overrides = { local_steps = 1 } }]""",
)


@pytest.fixture
async def home(tmp_path: Path, database_url: str) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path, database=database_url) as made:
        yield made


async def measured(home: LocalCoordinator, *losses: float) -> None:
    """The newest version was found to have this loss (of several: those before it too)."""

    def store(conn: object) -> None:
        run = runs.by_id(conn, 1)  # type: ignore[arg-type]
        for back, loss in enumerate(reversed(losses)):
            version = run.head - back
            evaluations.set_evaluation(conn, 1, version, state="done", loss=loss)  # type: ignore[arg-type]

    await home.coordinator.db.write(store)


async def phases_of(home: LocalCoordinator) -> list[int]:
    pairs = await home.coordinator.db.read(lambda conn: versions.listing(conn, 1, -1, 100))
    return [row.phase for row, _ in pairs]


async def test_a_phase_ends_when_the_measured_loss_hardly_falls(home: LocalCoordinator) -> None:
    await home.start_run(PHASED)
    ann = await home.join("Ann")
    steps = []
    for number, loss in enumerate((5.0, 4.0, 3.0, 2.99, 2.98, 2.5, 2.0)):
        await measured(home, loss)
        lease = await ann.claim()
        steps.append(lease.job.steps)
        begun = await ann.begin(lease)
        data = await ann.update("tiny", number)
        await ann.upload(lease, data)
        await ann.post(f"/tasks/{lease.task}/submit", ann.submission(lease, begun, data))
        assert await home.coordinator.merger.merge_if_due(1)
    # 3.00, 2.99, 2.98 are within one in a hundred of each other when version 5 is made.
    assert await phases_of(home) == [0, 0, 0, 0, 0, 1, 1, 1]
    assert steps == [1, 1, 1, 1, 1, 2, 2]
    await home.coordinator.runs.rollback("tiny", 2)
    assert (await phases_of(home))[-1] == 1
    assert (await home.coordinator.checks.run()).breaches == ()


async def test_what_is_never_measured_can_end_no_phase(home: LocalCoordinator) -> None:
    with pytest.raises(InvalidRunFile, match=r"phase 1 .* every = 0 measures none: set every = 1"):
        await home.start_run(PHASED + "[evaluation]\nevery = 0\n")
