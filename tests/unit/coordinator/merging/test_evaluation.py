"""Evaluations that end in another way than with a loss: the server stops, or another process has the
version.
"""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import sqlalchemy as sa

from coordinator.database.tables.versions import evaluations
from coordinator.merging.evaluation import PAUSE_MAX_S, TRIES_MAX, EvaluatedVersion
from shared.errors import InvalidFrame, StorageFull, Unavailable
from shared.workloads.base import Sample
from tests.support.local_coordinator import LocalCoordinator, local_coordinator

MEASURED = EvaluatedVersion(metrics={"loss": 4.0}, sample=Sample(kind="text", title=""))


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[LocalCoordinator]:
    async with local_coordinator(tmp_path) as made:
        await made.start_run()
        yield made


def raising(error: Exception) -> Callable[[object], Awaitable[object]]:
    async def fail(_: object) -> object:
        raise error

    return fail


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


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("away"),
        StorageFull("no space is left"),
        OSError(errno.EIO, "input/output error"),
    ],
)
async def test_a_store_that_fails_once_costs_a_version_no_loss(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def measure(run: object, weights: Path, *, sample: bool) -> EvaluatedVersion:
        return msgspec.structs.replace(MEASURED, sample=Sample(kind="png", title="", data=b"png"))

    monkeypatch.setattr(home.coordinator.evaluation, "measure", measure)
    for point in ("local", "put_bytes"):
        with monkeypatch.context() as patched:
            patched.setattr(home.coordinator.blobs, point, raising(error))
            assert await home.coordinator.evaluation.evaluate_next()
        assert await stored(home) == ("waiting", None)
        assert not await home.coordinator.evaluation.evaluate_next()  # not at once
        await home.clock.advance(PAUSE_MAX_S)
    assert await home.coordinator.evaluation.evaluate_next()
    assert await stored(home) == ("done", 4.0)
    assert home.coordinator.evaluation.outcomes == {("tiny", "done"): 1}


@pytest.mark.parametrize(
    ("error", "tries"), [(Unavailable("away"), TRIES_MAX), (InvalidFrame("no frame"), 1)]
)
async def test_a_version_that_cannot_be_measured_fails_in_the_end(
    home: LocalCoordinator, monkeypatch: pytest.MonkeyPatch, error: Exception, tries: int
) -> None:
    monkeypatch.setattr(home.coordinator.blobs, "local", raising(error))
    for _ in range(tries):
        assert await stored(home) == ("waiting", None)
        assert await home.coordinator.evaluation.evaluate_next()
        await home.clock.advance(PAUSE_MAX_S)
    assert await stored(home) == ("failed", None)
    assert home.coordinator.evaluation.outcomes == {("tiny", "failed"): 1}


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
