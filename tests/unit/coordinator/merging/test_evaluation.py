"""Evaluations that end in another way than with a loss: the server stops, or another process has the
version.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from coordinator.database.tables.versions import evaluations
from coordinator.merging.evaluation import EvaluatedVersion
from shared.workloads.base import Sample
from tests.support.local_coordinator import LocalCoordinator, local_coordinator

MEASURED = EvaluatedVersion(metrics={"loss": 4.0}, sample=Sample(kind="text", title=""))


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as made:
        await made.start_run()
        yield made


async def stored(home: LocalCoordinator) -> tuple[str, float | None]:
    """State and loss of version 0."""
    query = sa.select(evaluations.c.state, evaluations.c.loss)
    row = await home.coordinator.db.read(lambda conn: conn.execute(query).one())
    return row.state, row.loss


async def test_a_version_whose_evaluation_the_server_stops_is_free_for_others_at_once(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes = [None, MEASURED]

    async def measure(run: object, weights: Path, *, sample: bool) -> EvaluatedVersion | None:
        return outcomes.pop(0)

    monkeypatch.setattr(home.coordinator.evaluation, "measure", measure)
    assert await home.coordinator.evaluation.evaluate_next()
    assert await stored(home) == ("waiting", None)
    assert await home.coordinator.evaluation.evaluate_next()
    assert await stored(home) == ("done", 4.0)


async def test_a_version_that_another_process_evaluates_by_now_is_left_to_it(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(run: object, weights: Path, *, sample: bool) -> EvaluatedVersion:
        values = {"owner": "another", "attempt": evaluations.c.attempt + 1}
        taken = sa.update(evaluations).values(**values)
        await home.coordinator.db.write(lambda conn: conn.execute(taken))
        return MEASURED

    monkeypatch.setattr(home.coordinator.evaluation, "measure", measure)
    watch = home.coordinator.signals.watch("run:1")
    assert await home.coordinator.evaluation.evaluate_next()
    assert await stored(home) == ("running", None)
    assert home.coordinator.evaluation.outcomes == {}
    assert not await watch.wait(0)  # nobody hears of a loss
